"""Embedding transfer from encoder to LLM replicas: shared memory on one host, RDMA (NIXL) between hosts."""
