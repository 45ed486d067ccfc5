"""An encoder that waits and fails as a test says, and a worker around it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import numpy as np
import torch

from deployments.encoder_replica.gpu.jobs import Encoded, WorkerEvents
from deployments.encoder_replica.gpu.worker import GpuWorker
from encoder.encoder import Encoder
from encoder.images.size import num_tokens
from encoder.packing.greedy import Batch
from encoder.packing.run_counts import RunCounts, RunRecord
from encoder.pixels.preprocess import Pixels
from encoder.staging.staging import HostAllocator
from tests.unit.deployments.samples import IDENTITY

WAIT_S = 10


def image(value: int, num_tokens: int = 1) -> Pixels:
    """An image whose tokens are all `value` for the fake encoder."""
    return Pixels(np.full((3, 2, 2), value, np.uint8), (1, 2, 2 * num_tokens))


class FakeEncoder:
    """Takes `at_once` images of a call as a batch. Waits for `gate`; fails for the images in `bad`. `worth` tokens are
    worth a launch."""

    identity = IDENTITY
    resizes_on_device = False

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.ran: list[list[int]] = []
        self.at_once = self.worth = 10**6
        self.waiting: list[int] = []
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.bad: dict[int, BaseException] = {}
        self.lost: dict[int, BaseException] = {}
        self.fetch_gate = threading.Event()
        self.fetch_gate.set()
        self.fetch_threads: set[int] = set()
        self.rooms = 0
        self.room_error: Exception | None = None
        self.in_room: Callable[[], object] = lambda: None
        self.idle_steps = 0
        self.idle_error: Exception | None = None
        self.idle_threads: set[int] = set()

    @property
    def counts(self) -> RunCounts:
        return RunCounts(replays=len(self.calls))

    def idle_step(self) -> bool:
        """There are as many to do as `idle_steps` says."""
        self.idle_threads.add(threading.get_ident())
        if self.idle_error is not None:
            raise self.idle_error
        self.idle_steps -= 1
        return self.idle_steps >= 0

    def wait_for_room(self) -> None:
        self.rooms += 1
        self.in_room()
        if self.room_error is not None:
            raise self.room_error

    def count_tokens(self, pixels: Pixels) -> int:
        return num_tokens(pixels.grid_thw, IDENTITY.rules.merge_size)

    def num_to_launch(self, num_tokens: Sequence[int], waiting: int) -> int:
        self.waiting.append(waiting)
        return max(1, sum(total <= self.worth for total in accumulate(num_tokens)))

    def launch_batches(self, pixels: Sequence[Pixels]) -> Iterator[FakeLaunched]:
        assert pixels, "nothing to encode is not encoded"
        values = [int(each.values[0, 0, 0]) for each in pixels]
        self.calls.append(values)
        self.threads.add(threading.get_ident())
        self.entered.release()
        assert self.gate.wait(WAIT_S)
        for value in values:
            if value in self.bad:
                raise self.bad[value]
        for first in range(0, len(values), self.at_once):
            indices = tuple(range(len(values)))[first : first + self.at_once]
            self.ran.append([values[index] for index in indices])
            yield FakeLaunched(self, Batch(indices, None), self.ran[-1])


@dataclass
class FakeLaunched:
    """Waits for `fetch_gate`; fails for the images in `lost`."""

    encoder: FakeEncoder
    batch: Batch
    values: list[int]
    run_record: RunRecord | None = None

    def fetch(self, allocate: HostAllocator | None = None) -> list[torch.Tensor]:
        self.encoder.fetch_threads.add(threading.get_ident())
        assert self.encoder.fetch_gate.wait(WAIT_S)
        for value in self.values:
            if value in self.encoder.lost:
                raise self.encoder.lost[value]
        return [torch.full((1, 2), float(value)) for value in self.values]


class Owned:
    """A worker around a fake encoder."""

    def __init__(self, max_queued_tokens: int = 1000, events: WorkerEvents | None = None) -> None:
        self.encoder = FakeEncoder()
        made = cast(Encoder, self.encoder)
        self.worker = GpuWorker(lambda: made, max_queued_tokens=max_queued_tokens, events=events)

    def occupy(self) -> Future[Encoded]:
        """Image 0 is being encoded, and stays so until the gate is set."""
        self.encoder.gate.clear()
        future = self.worker.submit(image(0))
        assert self.encoder.entered.acquire(timeout=WAIT_S)
        return future

    def join(self) -> None:
        self.worker._thread.join(WAIT_S)
        assert not self.worker.is_alive


def value_of(future: Future[Encoded]) -> float:
    return float(future.result(WAIT_S).tokens[0, 0])
