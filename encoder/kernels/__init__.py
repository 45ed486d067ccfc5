"""Triton kernels of the fused towers; each module pairs a kernel with the function that launches it.

Kernels operate on tensors and know nothing of towers. They launch on the current device and stream: callers make the
tensors' device current. These modules require Triton and are imported lazily.
"""
