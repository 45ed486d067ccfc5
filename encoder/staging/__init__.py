"""Copies between host and device, CUDA streams, and a pipeline that overlaps them with compute."""
