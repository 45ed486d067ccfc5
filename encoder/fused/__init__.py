"""Fused towers: GEMMs by QuACK and cuBLAS, rotary attention, and the measurement of attention backends."""
