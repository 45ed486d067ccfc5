"""What language models have to read, and which of them a long prompt goes to: the one that will have read it first.

A router only knows what it has sent by itself; so before a long prompt goes anywhere, a few replicas are asked. Pure:
it must not know of Ray, nor how they are asked; `affinity_router.py` does that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from cachetools import LRUCache

from deployments.affinity import HELD, MAX_PUBLISHED, PREFIX_BYTES, Call, published

WORK = "work"
"""The entry that holds `PromptWork.tokens`; of replicas that are asked."""
RUNNING_TOKENS = 768
"""What an answer that is being written adds to the time until a new prompt is read, in prompt tokens: 20 ms, of steps
that are shared, against 26 us a token (benchmarks/LOG.md 27, 28)."""


@dataclass
class Taken:
    """A prompt that a replica has taken."""

    call: Call
    is_read: bool = False


class PromptWork:
    """What one language model has taken, and the conversations that its prefix cache may hold. For one event loop."""

    def __init__(self, *, remembers: bool) -> None:
        """`remembers`: whether there is a prefix cache."""
        self.tokens = 0
        """Of prompts that are not read yet, and RUNNING_TOKENS for each that is."""
        self._read: LRUCache[str, None] = LRUCache(MAX_PUBLISHED if remembers else 0)

    @contextmanager
    def taken(self, call: Call) -> Iterator[Taken]:
        """From here on the prompt is to be read; `read` tells that it is."""
        taken = Taken(call)
        self.tokens += call.cost
        try:
            yield taken
        finally:
            self.tokens -= RUNNING_TOKENS if taken.is_read else call.cost

    def read(self, taken: Taken) -> None:
        """The first token is there. Of no effect the second time."""
        if not taken.is_read:
            taken.is_read = True
            self.tokens += RUNNING_TOKENS - taken.call.cost
            if taken.call.key is not None and self._read.maxsize:
                self._read.pop(taken.call.key, None)
                self._read[taken.call.key] = None

    def told(self) -> dict[str, Any]:
        """What a replica answers to a router, and Serve's controller to all of them every few seconds."""
        return {HELD: published(self._read), WORK: self.tokens}


def soonest(call: Call, told: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The replicas that told, the one first that will have read the prompt first; equals in the order that they have.

    Args:
        told: by replica, `PromptWork.told`; one without WORK is left out.
    """

    def tokens(name: str) -> int:
        held = np.frombuffer(told[name].get(HELD, b""), ">u4")
        holds = call.key is not None and int(call.key[: 2 * PREFIX_BYTES], 16) in held
        return int(told[name][WORK]) + (0 if holds else call.cost)

    return sorted((name for name, stats in told.items() if WORK in stats), key=tokens)
