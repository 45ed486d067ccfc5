"""Packs images into batches: packing rules, measured costs, run counts."""
