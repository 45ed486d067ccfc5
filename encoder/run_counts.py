"""What a runner counts: every batch is a replay or an eager run with its reason. It must not know who reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Reason(StrEnum):
    """Why a batch ran without a graph."""

    OVER_LARGEST = "over_largest_budget"
    NOT_CAPTURED = "not_captured_yet"
    SEGMENTS = "more_segments_than_the_graph_holds"
    REFUSED = "refused_at_check"
    CHEAPER = "cheaper_eagerly"
    MEMORY = "memory_bound"
    NO_GPU = "cpu_device"
    SWITCHED_OFF = "graphs_off"
    ATTENTION = "attention_without_borders_on_the_device"
    ARENA = "grids_overfill_the_arena"


@dataclass(frozen=True)
class Ran:
    """How one batch ran."""

    budget: int | None
    """Of the graph that was replayed, in tokens; None for an eager run."""
    reason: Reason | None
    """Why it ran eagerly; None for a replay."""
    num_tokens: int
    """Of all its images, padding apart."""
    num_images: int


@dataclass(frozen=True)
class RunCounts:
    """Since the start. Tokens are merged tokens."""

    replays: int = 0
    eager_runs: Mapping[str, int] = field(default_factory=dict)
    """By `Reason`."""
    captures: int = 0
    refusals: int = 0
    tokens: int = 0
    """Of all batches, padding apart."""
    replayed_tokens: int = 0
    """Of those that were replayed, padding apart."""
    padding_tokens: int = 0
    grid_hits: int = 0
    grid_misses: int = 0


@dataclass
class Tally:
    """Adds up while running."""

    replays: int = 0
    captures: int = 0
    refusals: int = 0
    tokens: int = 0
    replayed_tokens: int = 0
    padding_tokens: int = 0
    eager_runs: Counter[str] = field(default_factory=Counter)

    def replayed(self, num_tokens: int, budget: int) -> None:
        self.replays += 1
        self.tokens += num_tokens
        self.replayed_tokens += num_tokens
        self.padding_tokens += budget - num_tokens

    def ran_eagerly(self, num_tokens: int, reason: Reason) -> None:
        self.eager_runs[reason.value] += 1
        self.tokens += num_tokens

    def counts(self, *, grid_hits: int, grid_misses: int) -> RunCounts:
        return RunCounts(
            replays=self.replays,
            eager_runs=dict(self.eager_runs),
            captures=self.captures,
            refusals=self.refusals,
            tokens=self.tokens,
            replayed_tokens=self.replayed_tokens,
            padding_tokens=self.padding_tokens,
            grid_hits=grid_hits,
            grid_misses=grid_misses,
        )
