"""All code that touches vLLM or runs in its processes."""
