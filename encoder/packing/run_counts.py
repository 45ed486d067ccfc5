"""Counts of a runner: every batch is a replay, or an eager run with a reason."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum


class Reason(StrEnum):
    """Reason why a batch ran without a graph."""

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


class Fallback(StrEnum):
    """Reason why an encoder on a GPU runs without fused kernels although it may use them."""

    UNSUPPORTED = "unsupported"
    """By the GPU, the dtype or the tower's head dimension."""
    DIFFERS = "differs_from_eager"
    BACKEND = "attention_backend_unavailable"
    KERNELS = "kernels_failed"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Record of one batch's run."""

    budget: int | None
    """Budget in tokens of the replayed graph; None for an eager run."""
    reason: Reason | None
    """Reason of an eager run; None for a replay."""
    num_tokens: int
    """Tokens of all images, without padding."""
    num_images: int


@dataclass
class RunCounts:
    """Counts since start-up. Tokens are counted after the merge."""

    replays: int = 0
    eager_runs: dict[str, int] = field(default_factory=dict)
    """Eager runs by `Reason`."""
    captures: int = 0
    refusals: int = 0
    tokens: int = 0
    """Tokens of all batches, without padding."""
    replayed_tokens: int = 0
    """Tokens of replayed batches, without padding."""
    padding_tokens: int = 0
    grid_hits: int = 0
    grid_misses: int = 0
    fusion_fallback: Fallback | None = None

    def copy(self) -> RunCounts:
        """Returns a copy, which other threads may read."""
        return replace(self, eager_runs=dict(self.eager_runs))

    def add_replay(self, num_tokens: int, budget: int) -> None:
        """Counts a replayed batch."""
        self.replays += 1
        self.tokens += num_tokens
        self.replayed_tokens += num_tokens
        self.padding_tokens += budget - num_tokens

    def add_eager_run(self, num_tokens: int, reason: Reason) -> None:
        """Counts an eager run."""
        self.eager_runs[reason.value] = self.eager_runs.get(reason.value, 0) + 1
        self.tokens += num_tokens
