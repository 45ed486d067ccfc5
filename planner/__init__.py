"""Capacity planning: `vitray plan` and the queueing model behind it. Not used for serving."""
