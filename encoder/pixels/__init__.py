"""Resizes images and cuts them into patches, on CPU and GPU."""
