"""vLLM `ECConnector` for leased embeddings: in the engine's processes, and its other end in the LLM replica."""
