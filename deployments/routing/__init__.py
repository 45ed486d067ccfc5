"""Replica choice: cache affinity with bounded load, prefill load; how calls are made."""
