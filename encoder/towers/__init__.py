"""The eager reference tower: layers, attention, weights."""
