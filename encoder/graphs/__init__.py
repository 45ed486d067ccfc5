"""CUDA graphs of a vision tower: capture, static buffers, capture policy."""
