"""Prefill load: pending prompt tokens of each language model, and the replica that would finish a long prompt first.

A router knows only the calls that it sent, so it probes a few replicas before it routes a long prompt. This module is
pure Python over numbers; `serve_router.py` sends the probes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from cachetools import LRUCache

from deployments.routing.affinity import Call

PROBES_NEAR, PROBES_FAR = 3, 2
"""Replicas that are probed on the host of the best one for the key, and on others, which balance the load of hosts
(benchmarks/log/2026-11-28-probes-near-and-far.md)."""
EARLIER_IMAGE_COST = 2
"""`Call.leaving_cost` of a visual token of an earlier turn, in prompt tokens."""
PENDING_TOKENS = "work"
"""Key of `PrefillLoad.tokens` in the answer to a probe."""
CONVERSATIONS = "conversations"
"""Key of the conversations that the prefix cache may hold in the answer to a probe: prefixes of digests, one after the
other."""
PREFIX_BYTES = 4
"""Bytes of each digest. A collision sends a prompt to a replica that does not cache its conversation."""
MAX_CONVERSATIONS = 1024
"""Most conversations in an answer, those prefilled last."""
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
        self._prefilled: LRUCache[str, bytes] = LRUCache(MAX_CONVERSATIONS if has_prefix_cache else 0)

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
                self._prefilled[prompt.call.key] = bytes.fromhex(prompt.call.key[: 2 * PREFIX_BYTES])

    def routing_stats(self) -> dict[str, Any]:
        """Returns the answer to a router's probe."""
        return {CONVERSATIONS: b"".join(self._prefilled.values()), PENDING_TOKENS: self.tokens}


def choose_probed(ranked: Sequence[str], hosts: Mapping[str, str]) -> dict[str, bool]:
    """Returns the replicas to be probed, each with whether it is on another host than the best one.

    Args:
        ranked: replicas, best for the prompt's conversation first.
        hosts: host by replica.
    """
    near = [name for name in ranked if hosts.get(name) == hosts.get(ranked[0])]
    far = [name for name in ranked if name not in near]
    return dict.fromkeys(near[:PROBES_NEAR], False) | dict.fromkeys(far[:PROBES_FAR], True)


def rank_by_pending_prefill(call: Call, stats: Mapping[str, Mapping[str, Any]], far: Mapping[str, bool]) -> list[str]:
    """Returns the replicas that reported, by ascending pending tokens with the prompt; equal ones keep their order.

    A replica that prefilled the conversation last gets the prompt at no cost, also on another host, where its images
    are cached then. Others get it at `call.cost`, on another host at `call.leaving_cost` in addition.

    Args:
        stats: result of `PrefillLoad.routing_stats` by replica; one without PENDING_TOKENS is omitted.
        far: result of `choose_probed`.
    """

    def tokens(name: str) -> int:
        held = np.frombuffer(stats[name].get(CONVERSATIONS, b""), ">u4")
        holds = call.key is not None and int(call.key[: 2 * PREFIX_BYTES], 16) in held
        missing = 0 if holds else call.cost + far[name] * call.leaving_cost
        return int(stats[name][PENDING_TOKENS]) + missing

    return sorted((name for name, report in stats.items() if PENDING_TOKENS in report), key=tokens)
