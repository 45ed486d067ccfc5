"""What goes to the thread that owns the GPU and what comes back: jobs, results, errors, and what is worth counting.

It must not know of that thread, of Ray or of HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum

import torch

from deployments.device_health import Fault
from encoder.decoded import Decoded
from encoder.preprocess import Pixels
from encoder.run_counts import Ran, RunCounts


@dataclass(frozen=True)
class Encoded:
    """What a job's future gives."""

    tokens: torch.Tensor
    """`[num_tokens, width]` in host memory."""
    queue_ms: float
    encode_ms: float
    ran: Ran | None = None
    """How its batch ran."""


@dataclass(frozen=True, eq=False)
class Job:
    pixels: Pixels | Decoded
    num_tokens: int
    queued_at: float
    place: float
    """In line, see `fair_line.place_of`."""
    future: Future[Encoded] = field(default_factory=Future)
    alone: bool = False
    """Whether it is tried again, by itself, after a batch with it has failed."""


class Sign(Enum):
    """What lies in the queue beside jobs."""

    STOP = "stop"
    LOOK = "look whether there is something to do while nothing waits"


def _ignore(_: object) -> None: ...


@dataclass(frozen=True)
class WorkerEvents:
    """Called, on any thread, when something happens that is worth counting."""

    queued_tokens: Callable[[int], None] = _ignore
    """The tokens that wait or run now."""
    retried: Callable[[int], None] = _ignore
    """So many batches failed and are tried again image by image."""
    ran: Callable[[RunCounts], None] = _ignore
    """What the encoder has counted since its start: replays, and eager runs by reason."""
    sick: Callable[[Fault], None] = _ignore
    """The device is not used any more."""
