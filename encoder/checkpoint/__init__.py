"""Facts of a checkpoint: vision configuration, image rules, files. Does not import torch."""
