"""Serve deployment "Ingress": receives HTTP requests, calls encoder and LLM replicas, and returns the answers."""
