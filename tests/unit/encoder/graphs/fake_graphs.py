"""Stands in for CUDA graphs on the CPU: a replay is a run over the whole budget, with NaN past the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from encoder.forwards import TowerForward
from encoder.graphs.buffers import GraphBuffers, GraphCapacity, GraphKey
from encoder.graphs.captured import GraphMemoryError, GraphRefusedError
from encoder.graphs.trial_batches import timing_batch, trial_batch
from encoder.metadata.device_tables import GridTables, Layout
from encoder.metadata.geometry import Grid
from encoder.metadata.segments import AttentionBackend
from encoder.metadata.tower_metadata import expanded_metadata
from encoder.towers.tower import VisionTower

BYTES_PER_TOKEN = 1000


def borders_on_the_device(backend: AttentionBackend) -> Callable[..., Tensor]:
    """In place of `encoder.towers.backends.load`: attention that reads its borders, in plain torch."""
    assert backend is AttentionBackend.VARLEN
    return attend


def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """See `VarlenAttention`; rows of no segment come out as NaN."""
    out = torch.full_like(q, float("nan"))
    borders = cu_seqlens.tolist()
    for start, end in pairwise(borders):
        assert 0 <= end - start <= max_seqlen
        queries, keys, values = (tensor[start:end].transpose(0, 1)[None] for tensor in (q, k, v))
        if end > start:
            out[start:end] = F.scaled_dot_product_attention(queries, keys, values)[0].transpose(0, 1)
    return out


def forward_of(tower: VisionTower) -> TowerForward:
    """The eager tower as it is on a GPU. `borders_on_the_device` has to take the place of the loader of backends."""
    return TowerForward(
        "eager", tower, tower.config, tower.dtype, torch.device("cpu"), AttentionBackend.VARLEN, "a stand-in"
    )


@dataclass(frozen=True)
class FakeGraph:
    shape: GraphCapacity
    grids: tuple[Grid, ...]
    alike: tuple[Grid, ...]
    replay_ms: float


class FakeGraphs:
    """Times are those of `ms`, bytes grow with the largest budget.

    A budget in `bad` cannot be captured, one in `differing` is refused when it is judged.
    """

    def __init__(
        self,
        forward: TowerForward,
        tables: GridTables,
        largest_budget: int,
        max_images: int,
        ms: Callable[[int], float] = lambda budget: 1.0 + budget / 1000,
        eager: Callable[[int], float] = lambda tokens: 5.0 + tokens / 1000,
    ) -> None:
        self._forward, self._tables, self._max_images = forward, tables, max_images
        self._buffers = GraphBuffers(
            largest_budget, max_images, forward.config, dtype=forward.dtype, device=forward.device
        )
        self._ms, self._eager = ms, eager
        self.captured: dict[GraphKey, FakeGraph] = {}
        self.begun: set[GraphKey] = set()
        self.bad: set[int] = set()
        self.differing: set[int] = set()
        self.free_bytes = 2**40
        self.replayed: list[GraphKey] = []
        self.sweeps = 0
        self.slower = 1.0
        self.pool: object = 1

    @property
    def buffer_bytes(self) -> int:
        return self._buffers.num_bytes

    def capture(self, key: GraphKey) -> FakeGraph:
        self.begin(key)
        return self.finish(key)

    def begin(self, key: GraphKey) -> int:
        if key.budget in self.bad:
            raise GraphRefusedError(f"budget {key.budget} cannot be captured")
        before = max((each.budget for each in (*self.captured, *self.begun)), default=0)
        grown = max(0, key.budget - before) * BYTES_PER_TOKEN
        if grown > self.free_bytes:
            raise GraphMemoryError("no memory")
        self.begun.add(key)
        return grown

    def finish(self, key: GraphKey) -> FakeGraph:
        self.begun.remove(key)
        if key.budget in self.differing:
            raise GraphRefusedError(f"budget {key.budget} differs")
        shape = GraphCapacity.for_key(key, self._max_images, self._forward.config)
        grids = tuple(trial_batch(shape, self._forward.config))
        alike = tuple(timing_batch(shape, self._forward.config))
        self.captured[key] = FakeGraph(shape, grids, alike, self._ms(key.budget))
        return self.captured[key]

    def find_graph(self, layout: Layout, budget: int) -> GraphKey | None:
        holding = [key for key, graph in self.captured.items() if key.budget >= budget and graph.shape.fits(layout)]
        return min(holding, default=None)

    def replay(self, key: GraphKey, patches: Tensor, layout: Layout) -> Tensor:
        shape, buffers = self.captured[key].shape, self._buffers
        buffers.load(patches, layout, shape)
        buffers.spoil_padding(layout, shape)
        laid_out = expanded_metadata(
            self._forward.expand,
            self._tables.arena,
            buffers.description,
            self._forward.config,
            self._forward.backend,
            tokens=key.budget,
            frames=shape.max_images,
            windows=shape.max_windows,
            max_seqlen=key.max_seqlen,
            image_tokens=(key.budget,),
        )
        buffers.output(key.budget).copy_(self._forward.run(buffers.patches(key.budget), laid_out))
        self.replayed.append(key)
        return buffers.output(layout.num_tokens)

    def trim(self) -> None: ...

    def replay_ms(self, key: GraphKey, grids: Sequence[Grid]) -> float:
        return self._ms(key.budget)

    def eager_ms(self, grids: Sequence[Grid]) -> float:
        unit = self._forward.config.merge_unit
        return self._eager(sum(t * h * w for t, h, w in grids) // unit)

    def sustained_ms(
        self, keys: Sequence[GraphKey], batches: Sequence[Sequence[Grid]]
    ) -> tuple[list[float], list[float]]:
        self.sweeps += 1
        replays = [self.slower * self.replay_ms(key, ()) for key in keys]
        return replays, [self.slower * self.eager_ms(grids) for grids in batches]
