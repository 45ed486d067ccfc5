"""Serve deployment "LLM": receives embeddings and runs vLLM's OpenAI application on them."""
