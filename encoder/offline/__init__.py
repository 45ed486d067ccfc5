"""Encodes a folder of images into a folder of embeddings (`vitray encode`)."""
