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

from deployments.routing.affinity import MAX_PUBLISHED, PREFIX_BYTES, PUBLISHED_DIGESTS, Call, concatenate_prefixes

PENDING_TOKENS = "work"
"""Key of `PrefillLoad.tokens` in the routing stats of replicas that are probed."""
RUNNING_TOKENS = 768
"""Delay that a decoding request adds to the prefill of a new prompt, in prompt tokens: 20 ms of shared steps, at 26 us
per prompt token (benchmarks/log/2026-11-22-prefill-chunks.md)."""


@dataclass
class ActivePrompt:
    """A prompt in flight at a replica. `is_prefilled`: whether its prefill is complete."""

    call: Call
    is_prefilled: bool = False


class PrefillLoad:
    """Prompts in flight at one language model, and conversations that its prefix cache may hold. For one event loop."""

    def __init__(self, *, has_prefix_cache: bool) -> None:
        """`has_prefix_cache`: whether the engine has a prefix cache."""
        self.tokens = 0
        """Pending prefill tokens, plus RUNNING_TOKENS for each prompt in flight whose prefill is complete."""
        self._prefilled: LRUCache[str, None] = LRUCache(MAX_PUBLISHED if has_prefix_cache else 0)

    @contextmanager
    def track(self, call: Call) -> Iterator[ActivePrompt]:
        """Counts the prompt's tokens as pending until `finish_prefill`, and the prompt as in flight until the context
        ends.
        """
        prompt = ActivePrompt(call)
        self.tokens += call.cost
        try:
            yield prompt
        finally:
            self.tokens -= RUNNING_TOKENS if prompt.is_prefilled else call.cost
            prompt.is_prefilled = True

    def finish_prefill(self, prompt: ActivePrompt) -> None:
        """Records that prefill is complete, at the first output token. Idempotent."""
        if not prompt.is_prefilled:
            prompt.is_prefilled = True
            self.tokens += RUNNING_TOKENS - prompt.call.cost
            if prompt.call.key is not None and self._prefilled.maxsize:
                self._prefilled.pop(prompt.call.key, None)
                self._prefilled[prompt.call.key] = None

    def routing_stats(self) -> dict[str, Any]:
        """Returns the routing stats, with which a replica answers a router's probe, and which Serve's controller sends
        to all routers every few seconds.
        """
        return {PUBLISHED_DIGESTS: concatenate_prefixes(self._prefilled), PENDING_TOKENS: self.tokens}


def rank_by_pending_prefill(call: Call, stats: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the replicas that reported, by ascending pending tokens with the prompt; equal ones keep their order.

    A replica that caches the conversation's prefix gets the prompt at no cost.

    Args:
        stats: result of `PrefillLoad.routing_stats` by replica; one without PENDING_TOKENS is omitted.
    """

    def tokens(name: str) -> int:
        held = np.frombuffer(stats[name].get(PUBLISHED_DIGESTS, b""), ">u4")
        holds = call.key is not None and int(call.key[: 2 * PREFIX_BYTES], 16) in held
        return int(stats[name][PENDING_TOKENS]) + (0 if holds else call.cost)

    return sorted((name for name, report in stats.items() if PENDING_TOKENS in report), key=tokens)
