"""Reads size, RGB pixels and digest of image files. Imports no torch."""
