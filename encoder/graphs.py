"""CUDA graphs of a tower's forward, one for each budget, in one memory pool: capture, check, time, replay.

Every graph is compared with the forward it was captured from, on garbage in its padding, before it may be used. It must
not know how batches are chosen (`encoder.planning`) or where patches come from.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import Tensor

from encoder.geometry import Grid
from encoder.graph_inputs import GraphClass, GraphInputs
from encoder.metadata import TowerMetadata
from encoder.vision_config import VisionConfig

logger = logging.getLogger(__name__)

Forward = Callable[[Tensor, TowerMetadata], Tensor]
Prepare = Callable[[Sequence[Grid]], TowerMetadata]

TIMED_REPLAYS = 3


class GraphRefusedError(RuntimeError):
    """A captured graph that does not give what its forward gives, or would pass the memory bound; it is not used."""


@dataclass(frozen=True)
class CapturedGraph:
    """A graph that may be replayed."""

    shape: GraphClass
    graph: torch.cuda.CUDAGraph
    output: Tensor
    """`[budget, width]` in the pool; the next replay of any graph overwrites it."""
    replay_ms: float
    capture_s: float


class EncoderGraphs:
    """The graphs of one forward. Used by the thread that owns the device, on one stream."""

    def __init__(
        self,
        forward: Forward,
        prepare: Prepare,
        config: VisionConfig,
        *,
        largest_budget: int,
        max_images: int,
        tolerance: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`tolerance`: the relative error ‖graph - forward‖ / ‖forward‖ of an image over which a graph is refused."""
        self._forward = forward
        self._prepare = prepare
        self._config = config
        self._max_images = max_images
        self._tolerance = tolerance
        self._device = device
        largest = GraphClass.of(largest_budget, max_images, config)
        self._inputs = GraphInputs(largest, config, dtype=dtype, device=device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, CapturedGraph] = {}

    @property
    def captured(self) -> dict[int, CapturedGraph]:
        """By budget."""
        return dict(self._graphs)

    @torch.inference_mode()
    def capture(self, budget: int) -> CapturedGraph:
        """Captures, checks and times the graph of `budget`. Capture the largest first: the others fit into its memory.

        Raises:
            GraphRefusedError: the graph's output differs from the forward's.
        """
        started = time.perf_counter()
        shape = GraphClass.of(budget, self._max_images, self._config)
        grids = trial_batch(shape, self._config)
        metadata = self._prepare(grids)
        patches = torch.randn(metadata.num_patches, self._config.patch_dim, device=self._device)
        expected = self._forward(patches, metadata)
        self._inputs.load(patches, metadata, shape)
        self._inputs.spoil_padding(metadata, shape)
        views = self._inputs.views(shape)
        self._forward(
            *views
        )  # libraries allocate and choose at the first call of a shape, which a capture must not see
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = self._forward(*views)
        graph.replay()
        self._check(budget, output[: metadata.num_tokens], expected, metadata.image_tokens)
        captured = CapturedGraph(shape, graph, output, self._time(graph), time.perf_counter() - started)
        self._graphs[budget] = captured
        return captured

    def fitting(self, metadata: TowerMetadata, budget: int) -> CapturedGraph | None:
        """The smallest captured graph from `budget` up that holds the batch in every respect."""
        for candidate in sorted(self._graphs):
            if candidate >= budget and self._graphs[candidate].shape.holds(metadata):
                return self._graphs[candidate]
        return None

    @torch.inference_mode()
    def replay(self, captured: CapturedGraph, patches: Tensor, metadata: TowerMetadata) -> Tensor:
        """`[num_tokens, width]` in the pool's memory: copy what is to be kept before the next replay."""
        self._inputs.load(patches, metadata, captured.shape)
        captured.graph.replay()
        return captured.output[: metadata.num_tokens]

    def _check(self, budget: int, output: Tensor, expected: Tensor, image_tokens: Sequence[int]) -> None:
        for number, (ours, theirs) in enumerate(
            zip(output.float().split(list(image_tokens)), expected.float().split(list(image_tokens)), strict=True)
        ):
            error = ((ours - theirs).norm() / theirs.norm()).item()  # waits for the device; captures are not on the way
            if not error <= self._tolerance:
                raise GraphRefusedError(
                    f"the graph of budget {budget} differs from its forward by {error:.2e} in image {number}, "
                    f"the limit is {self._tolerance:.2e}"
                )

    def _time(self, graph: torch.cuda.CUDAGraph) -> float:
        """Median milliseconds of a replay."""
        times: list[float] = []
        for _ in range(TIMED_REPLAYS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return sorted(times)[len(times) // 2]


def trial_batch(shape: GraphClass, config: VisionConfig) -> list[Grid]:
    """Images of unequal sizes that leave some of the budget as padding: what a graph is checked with."""
    merge = config.spatial_merge_size
    grids: list[Grid] = []
    tokens = 0
    for rows in islice(cycle(range(3, 11)), shape.max_images):
        # About a third of what is left, in ever other proportions.
        columns = (shape.budget - tokens) // 3 // rows
        if columns < 1:
            break
        grids.append((1, rows * merge, columns * merge))
        tokens += rows * columns
    return grids or [(1, merge, merge)]
