"""Prefill load: pending prompt tokens of each language model, and the replica that would finish a long prompt first.

A router knows only the calls that it sent, so it probes a few replicas before it routes a long prompt. This module is
pure Python over numbers; `serve_router.py` sends the probes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from cachetools import LRUCache

from deployments.routing.affinity import HELD, MAX_PUBLISHED, PREFIX_BYTES, Call, published

WORK = "work"
"""Key of `PrefillLoad.tokens` in the routing stats of replicas that are probed."""
RUNNING_TOKENS = 768
"""Delay that a decoding request adds to the prefill of a new prompt, in prompt tokens: 20 ms of shared steps, at 26 us
per prompt token (benchmarks/log/2026-11-22-prefill-chunks.md)."""


@dataclass
class Taken:
    """A prompt in flight at a replica. `is_read`: whether its prefill is complete."""

    call: Call
    is_read: bool = False


class PrefillLoad:
    """Prompts in flight at one language model, and conversations that its prefix cache may hold. For one event loop."""

    def __init__(self, *, remembers: bool) -> None:
        """`remembers`: whether the engine has a prefix cache."""
        self.tokens = 0
        """Pending prefill tokens, plus RUNNING_TOKENS for each prompt in flight whose prefill is complete."""
        self._read: LRUCache[str, None] = LRUCache(MAX_PUBLISHED if remembers else 0)

    @contextmanager
    def taken(self, call: Call) -> Iterator[Taken]:
        """Counts the prompt's tokens as pending until `read`, and the prompt as in flight until the context ends."""
        taken = Taken(call)
        self.tokens += call.cost
        try:
            yield taken
        finally:
            self.tokens -= RUNNING_TOKENS if taken.is_read else call.cost
            taken.is_read = True

    def read(self, taken: Taken) -> None:
        """Records that prefill is complete, at the first output token. Idempotent."""
        if not taken.is_read:
            taken.is_read = True
            self.tokens += RUNNING_TOKENS - taken.call.cost
            if taken.call.key is not None and self._read.maxsize:
                self._read.pop(taken.call.key, None)
                self._read[taken.call.key] = None

    def told(self) -> dict[str, Any]:
        """Returns the routing stats, with which a replica answers a router's probe, and which Serve's controller sends
        to all routers every few seconds.
        """
        return {HELD: published(self._read), WORK: self.tokens}


def soonest(call: Call, told: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the replicas that reported, by ascending pending tokens with the prompt; equal ones keep their order.

    A replica that caches the conversation's prefix gets the prompt at no cost.

    Args:
        told: result of `PrefillLoad.told` by replica; one without WORK is omitted.
    """

    def tokens(name: str) -> int:
        held = np.frombuffer(told[name].get(HELD, b""), ">u4")
        holds = call.key is not None and int(call.key[: 2 * PREFIX_BYTES], 16) in held
        return int(told[name][WORK]) + (0 if holds else call.cost)

    return sorted((name for name, stats in told.items() if WORK in stats), key=tokens)
