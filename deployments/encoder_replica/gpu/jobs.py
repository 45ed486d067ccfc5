"""Messages to and from the GPU thread: jobs, results, signals, and events to count."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

import torch

from deployments.encoder_replica.gpu.health import Fault
from encoder.images.decoded import Decoded
from encoder.packing.run_counts import RunCounts, RunRecord
from encoder.pixels.preprocess import Pixels

if TYPE_CHECKING:  # a GPU host without the servers' packages runs this module's tests
    from deployments.vllm.preparer import VllmInputs

Item: TypeAlias = "Pixels | Decoded | VllmInputs"


@dataclass(frozen=True)
class Encoded:
    """Result of a job."""

    tokens: torch.Tensor
    """`[num_tokens, width]` in host memory."""
    queue_ms: float
    encode_ms: float
    ran: RunRecord | None = None
    """How the image's batch ran: graph replay or eager."""


@dataclass(frozen=True, eq=False)
class Job:
    """One image to encode."""

    item: Item
    """Prepared input."""
    num_tokens: int
    queued_at_s: float
    place: float
    """Place in the queue, from `fair_queue.virtual_arrival_s`."""
    future: Future[Encoded] = field(default_factory=Future)
    alone: bool = False
    """Whether the job is retried alone because its batch failed."""


class Signal(Enum):
    """Signals in the queue of jobs."""

    STOP = "stop"
    WAKE = "wake"


def _ignore(_: object) -> None: ...


@dataclass(frozen=True)
class WorkerEvents:
    """Callbacks for metrics, called on any thread."""

    on_queued_tokens: Callable[[int], None] = _ignore
    """Tokens that are queued or being encoded now."""
    on_retry: Callable[[int], None] = _ignore
    """Number of batches that failed and are retried image by image."""
    on_run: Callable[[RunCounts], None] = _ignore
    """The encoder's counts since its start, such as replays, and eager runs by reason."""
    on_gpu_failure: Callable[[Fault], None] = _ignore
    """The device failed permanently."""
