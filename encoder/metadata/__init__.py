"""Converts patch grids to positions, segments and window order, on host and device."""
