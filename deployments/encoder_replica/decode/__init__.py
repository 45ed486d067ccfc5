"""Image decoding in worker processes with bounded time and memory."""
