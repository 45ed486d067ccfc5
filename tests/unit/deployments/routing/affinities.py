"""Affinity of a few replicas, and keys."""

from __future__ import annotations

import hashlib

from deployments.routing.affinity import (
    ActiveCall,
    Affinity,
    Call,
)

KEYS = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(400)]


def affinity_of(*names: str, load_factor: float = 1.25, separate_cache_hits: bool = False) -> Affinity:
    made = Affinity(load_factor=load_factor, separate_cache_hits=separate_cache_hits)
    made.set_replicas(names)
    return made


def begun(affinity: Affinity, name: str, call: Call) -> ActiveCall:
    found = affinity.begin(name, call)
    assert found is not None
    return found
