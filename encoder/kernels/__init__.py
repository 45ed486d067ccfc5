"""Triton kernels of the fused towers, one idea a file; each module pairs a kernel with the function that launches it.

They know tensors, not towers. All launch on the current device and stream: whoever calls them makes the tensors'
device current. Importing one needs Triton; nothing outside the fused path imports them.
"""
