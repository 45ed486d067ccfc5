"""Checkpoints: small random ones for tests, and the small model that answers questions about drawn scenes."""
