"""The thread that owns the GPU: its jobs, their completion, its health."""
