"""Reads the duration of audio files from their headers. Imports no torch."""
