"""The application with encoders on fake GPUs: everything is real except vLLM and the forward, which takes a set time.

A machine without a GPU can thus show in real time how a fleet scales, queues and sheds: a replica sleeps for the time
of its tokens at a set speed, after a set start-up time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from ray.serve import Application

from benchmarks.simulation.stand_in_app import bound
from configs.schema import AppConfig
from deployments.encoder_replica import deployment as encoder_module
from deployments.encoder_replica.deployment import EncoderReplica
from encoder.encoder import Encoder
from encoder.images.decoded import Decoded
from encoder.images.size import num_tokens
from encoder.packing.greedy import Batch
from encoder.packing.run_counts import RunRecord
from encoder.pixels.preprocess import Pixels
from encoder.staging.pipeline import Launched
from encoder.staging.staging import HostAllocator
from tests.cluster.stand_in_llm import StandInLLM


@dataclass(frozen=True)
class _Run:
    """A launched batch: its completion time, and a row of zeros for each token of its images."""

    batch: Batch
    num_tokens: tuple[int, ...]
    width: int
    done_at: float
    run_record: RunRecord | None = None
    """None: neither a graph replay nor an eager run."""

    def on_device(self) -> list[torch.Tensor]:
        return self.fetch()

    def fetch(self, allocate: HostAllocator | None = None) -> list[torch.Tensor]:
        _sleep_until(self.done_at)
        places = [allocate(count, self.width, torch.float32) if allocate else None for count in self.num_tokens]
        return [
            torch.zeros(count, self.width) if place is None else place.zero_()
            for count, place in zip(self.num_tokens, places, strict=True)
        ]


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


class SetSpeedEncoder(Encoder):
    """Plans batches as the encoder does, and takes the set time for each. All encoders of a process share one speed.

    `batches_under_way` batches are in flight: on a GPU two, one that is computed and one that follows without a pause.
    """

    tokens_per_s: ClassVar[float] = 0.0
    batches_under_way: ClassVar[int] = 2
    _done_at: ClassVar[deque[float]] = deque()

    @property
    def resizes_on_device(self) -> bool:
        """True as on a GPU, so that decoders only decode."""
        return True

    def launch_batches(self, pixels: Sequence[Pixels | Decoded]) -> Iterator[Launched]:
        grids = [image.grid_thw for image in pixels]
        merge, width = self.identity.rules.merge_size, self.identity.vision.width
        for batch in sorted(self.runner.plan_batches(grids), key=lambda planned: min(planned.indices)):
            counts = tuple(num_tokens(grids[index], merge) for index in batch.indices)
            self.wait_for_room()
            begins = max([time.monotonic(), *self._done_at])
            self._done_at.append(begins + sum(counts) / self.tokens_per_s)
            yield cast(Launched, _Run(batch, counts, width, self._done_at[-1]))

    def wait_for_room(self) -> None:
        while len(self._done_at) >= self.batches_under_way:
            _sleep_until(self._done_at.popleft())


class FakeGpuEncoder(EncoderReplica):
    """The application's replica around a SetSpeedEncoder."""

    def __init__(self, config: AppConfig, tokens_per_s: float, start_s: float, batches_under_way: int) -> None:
        began = time.monotonic()
        SetSpeedEncoder.tokens_per_s, SetSpeedEncoder.batches_under_way = tokens_per_s, batches_under_way
        SetSpeedEncoder._done_at = deque()
        vars(encoder_module).update(Encoder=SetSpeedEncoder, pin_shared=lambda address, num_bytes: None)
        super().__init__(config)
        time.sleep(max(0.0, began + start_s - time.monotonic()))


def build(args: dict[str, Any]) -> Application:
    """Builds the application as `deployments.app.build_app` does. `args`: those of AppConfig and of FakeGpuEncoder."""
    args = dict(args)
    of_encoder = [args.pop(name) for name in ("tokens_per_s", "start_s", "batches_under_way")]
    return bound(AppConfig.model_validate(args), FakeGpuEncoder, *of_encoder, llm=StandInLLM)
