"""Serve deployment "Encoder": embedding cache, request coalescing, hand-off to the GPU."""
