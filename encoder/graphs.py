"""CUDA graphs of a tower's forward, in one memory pool: capture, check, time, replay.

Every graph is compared with the forward it was captured from, on garbage in its padding, before it may be used. It must
not know how batches are chosen (`encoder.planning`), which graphs are wanted or where patches come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from encoder.forwards import TowerForward, largest_error_on_device
from encoder.geometry import Grid
from encoder.graph_inputs import GraphBuffers, GraphClass, GraphKey, smallest_fitting
from encoder.graph_trials import timing_batch, trial_batch
from encoder.grid_tables import GridTables, Layout


class GraphRefusedError(RuntimeError):
    """A graph that cannot be captured, or does not give what its forward gives; it is not used."""


class NoRoomError(RuntimeError):
    """The device has no memory left for a graph."""


@dataclass(frozen=True)
class CapturedGraph:
    """A graph that may be replayed."""

    shape: GraphClass
    graph: torch.cuda.CUDAGraph
    grids: tuple[Grid, ...]
    """What it was checked with, and timed first."""
    alike: tuple[Grid, ...]
    """What it is timed with under load."""
    replay_ms: float
    pool_bytes: int
    """By how much the pool grew for it."""


@dataclass(frozen=True)
class Trial:
    """A graph that is captured and not yet judged: the device may still be at it."""

    shape: GraphClass
    graph: torch.cuda.CUDAGraph
    grids: tuple[Grid, ...]
    pool_bytes: int
    error: Tensor
    """float32 scalar on the device: of the worst image."""
    events: tuple[torch.cuda.Event, torch.cuda.Event]
    """Around its first replay."""


class EncoderGraphs:
    """The graphs of one forward. Used by the thread that owns the device, on one stream."""

    def __init__(
        self,
        forward: TowerForward,
        tables: GridTables,
        *,
        largest_budget: int,
        max_images: int,
        tolerance: float | None = None,
    ) -> None:
        """`tolerance`: the error ‖graph - forward‖ / ‖forward‖ of an image over which a graph is refused.

        None takes the forward's.
        """
        self._forward = forward
        self._tables = tables
        self._max_images = max_images
        self._tolerance = forward.tolerance if tolerance is None else tolerance
        self._buffers = GraphBuffers(
            largest_budget, max_images, forward.config, dtype=forward.dtype, device=forward.device
        )
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(forward.device)
        self._graphs: dict[GraphKey, CapturedGraph] = {}
        self._trials: dict[GraphKey, Trial] = {}
        self.runs_before_capture = 0
        """Graphs whose forward had to run once more before it could be captured."""

    @property
    def captured(self) -> dict[GraphKey, CapturedGraph]:
        return dict(self._graphs)

    @property
    def buffer_bytes(self) -> int:
        """What all graphs share beside the pool."""
        return self._buffers.num_bytes + self._tables.arena.nbytes

    @property
    def free_bytes(self) -> int:
        """What the device has left for the pool."""
        return torch.cuda.mem_get_info(self._forward.device)[0]

    def capture(self, key: GraphKey) -> CapturedGraph:
        """Captures, checks and times one graph. Raises what `begin` and `finish` raise."""
        self.begin(key)
        return self.finish(key)

    @torch.inference_mode()
    def begin(self, key: GraphKey) -> int:
        """Captures a graph and has it tried, without waiting for the device: several may follow one another.

        Capture the largest first: the others fit into its memory. Returns by how many bytes the pool grew.

        Raises:
            GraphRefusedError: it cannot be captured.
            NoRoomError: the device has no room for it.
        """
        try:
            with torch.cuda.device(self._forward.device):
                trial = self._trials[key] = self._begin(key)
        except torch.cuda.OutOfMemoryError as error:
            raise NoRoomError(f"no memory for the graph of budget {key.budget}: {error}") from error
        except RuntimeError as error:
            raise GraphRefusedError(f"the graph of budget {key.budget} cannot be captured: {error}") from error
        return trial.pool_bytes

    def _begin(self, key: GraphKey) -> Trial:
        config = self._forward.config
        shape = GraphClass.of(key, self._max_images, config)
        grids = trial_batch(shape, config)
        layout = self._layout(grids)
        assert shape.holds(layout), f"{grids} does not fit {shape}"
        patches = torch.randn(
            layout.num_patches, config.patch_dim, device=self._forward.device, dtype=self._forward.dtype
        )
        expected = self._forward.run(patches, self._forward.exact_metadata(self._tables, layout))
        self._buffers.load(patches, layout, shape)
        self._buffers.spoil_padding(layout, shape)
        graph, grown = self._recorded(shape)
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        graph.replay()
        events[1].record()
        error = largest_error_on_device(self._buffers.output(layout.num_tokens), expected, layout.image_tokens)
        self._buffers.clear()
        return Trial(shape, graph, tuple(grids), grown, error, events)

    @torch.inference_mode()
    def finish(self, key: GraphKey) -> CapturedGraph:
        """Waits for the device; from now on the graph may be replayed.

        Raises GraphRefusedError where its output differs from the forward's, or its replay has failed.
        """
        trial = self._trials.pop(key)
        shape = trial.shape
        try:
            error = float(trial.error)
        except RuntimeError as failed:
            raise GraphRefusedError(f"the graph of budget {key.budget} cannot be replayed: {failed}") from failed
        if not error <= self._tolerance:
            raise GraphRefusedError(
                f"the graph of budget {key.budget} for images of up to {key.max_seqlen} patches differs "
                f"from its forward by {error:.2e}, the limit is {self._tolerance:.2e}"
            )
        begin, end = trial.events
        end.synchronize()
        alike = timing_batch(shape, self._forward.config)
        captured = CapturedGraph(
            shape,
            trial.graph,
            trial.grids,
            tuple(alike if shape.holds(self._layout(alike)) else trial.grids),
            float(begin.elapsed_time(end)),
            trial.pool_bytes,
        )
        # Ascending, as they are looked through.
        self._graphs = dict(sorted({**self._graphs, key: captured}.items()))
        return captured

    def fitting(self, layout: Layout, budget: int) -> GraphKey | None:
        """The smallest captured graph from `budget` up that holds the batch, with the tightest bound on its images."""
        return smallest_fitting(self._graphs, layout, budget)

    @torch.inference_mode()
    def replay(self, key: GraphKey, patches: Tensor, layout: Layout) -> Tensor:
        """`[num_tokens, width]` in the buffers' memory: copy what is to be kept before the next replay."""
        captured = self._graphs[key]
        self._buffers.load(patches, layout, captured.shape)
        captured.graph.replay()
        return self._buffers.output(layout.num_tokens)

    @torch.inference_mode()
    def replay_ms(self, key: GraphKey, grids: Sequence[Grid]) -> float:
        """Milliseconds of a replay for images of these sizes, whatever is in them. Waits for the device."""
        self._buffers.describe(self._layout(grids))
        return self._milliseconds(self._graphs[key].graph.replay)

    @torch.inference_mode()
    def eager_ms(self, grids: Sequence[Grid]) -> float:
        """Milliseconds of the forward without a graph, launches included; the better of two runs. Waits."""
        layout = self._layout(grids)
        patches = torch.zeros(
            layout.num_patches, self._forward.config.patch_dim, device=self._forward.device, dtype=self._forward.dtype
        )

        def run() -> None:
            self._forward.run(patches, self._forward.exact_metadata(self._tables, layout))

        # The first run of a shape may compile or load kernels.
        with torch.cuda.device(self._forward.device):
            return min(self._milliseconds(run), self._milliseconds(run))

    @torch.inference_mode()
    def sustained_ms(
        self, keys: Sequence[GraphKey], batches: Sequence[Sequence[Grid]]
    ) -> tuple[list[float], list[float]]:
        """Milliseconds of a replay of each graph, and of each batch without one, without a pause between them.

        A device that is busy for long runs slower than one that is measured now and then, and the slower the longer:
        what is of one size is measured side by side. Launches of the batches hide behind the replays. Waits for the
        device.
        """
        layouts = [self._layout(grids) for grids in batches]
        sizes = [*(key.budget for key in keys), *(layout.num_tokens for layout in layouts)]
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in sizes]
        with torch.cuda.device(self._forward.device):
            # Random values, since zeros take less power.
            patches = self._buffers.randomize()
            if keys:
                # Until it is busy the clock is another.
                self._graphs[keys[0]].graph.replay()
            for at in sorted(range(len(sizes)), key=lambda at: (-sizes[at], at)):
                begin, end = events[at]
                if at < len(keys):
                    captured = self._graphs[keys[at]]
                    self._buffers.describe(self._layout(captured.alike))
                    begin.record()
                    captured.graph.replay()
                else:
                    layout = layouts[at - len(keys)]
                    begin.record()
                    self._forward.run(patches[: layout.num_patches], self._forward.exact_metadata(self._tables, layout))
                end.record()
            torch.cuda.synchronize()
            self._buffers.clear()
        times = [float(begin.elapsed_time(end)) for begin, end in events]
        return times[: len(keys)], times[len(keys) :]

    def trim(self) -> None:
        """Gives memory back that eager runs took for their checks, and that no run needs now."""
        torch.cuda.empty_cache()

    def _layout(self, grids: Sequence[Grid]) -> Layout:
        layout = self._tables.layout(grids)
        if layout is None:
            raise ValueError(f"{len(grids)} grids of {sum(t * h * w for t, h, w in grids)} patches overfill the arena")
        return layout

    def _forward_in_place(self, shape: GraphClass) -> None:
        """What is captured: description to metadata, the forward over the whole budget, its output kept apart.

        The output lies in the buffers, so that the pool is free for the next capture.
        """
        forward, budget, described = self._forward, shape.key.budget, self._buffers.described
        laid_out = forward.metadata(
            self._tables.arena,
            described,
            tokens=budget,
            frames=shape.max_images,
            windows=shape.max_windows,
            max_seqlen=shape.key.max_seqlen,
            image_tokens=(budget,),
        )
        patches, out = self._buffers.patches(budget), self._buffers.output(budget)
        if forward.run_into is None:
            out.copy_(forward.run(patches, laid_out))
        else:
            forward.run_into(patches, laid_out, out)

    def _recorded(self, shape: GraphClass) -> tuple[torch.cuda.CUDAGraph, int]:
        """As `_record`, after a run where the forward wants one: what chooses or allocates at the first call of a shape
        does so in it. One that compiles always does: a compiler within a capture leaves the device's random numbers and
        the pool unusable.
        """
        if not self._forward.compiles:
            try:
                return self._record(shape)
            except torch.cuda.OutOfMemoryError:
                raise
            except RuntimeError:
                pass  # said by the next try, where that fails too
        self.runs_before_capture += 1
        self._forward_in_place(shape)
        return self._record(shape)

    def _record(self, shape: GraphClass) -> tuple[torch.cuda.CUDAGraph, int]:
        """The graph, and by how many bytes the pool grew."""
        device = self._forward.device
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.memory_reserved(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            # Other threads go on allocating and copying meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._forward_in_place(shape)
            except BaseException:
                with suppress(RuntimeError):  # what went wrong in between is what to tell
                    self._end(graph)
                raise
            self._end(graph)
        torch.cuda.current_stream(device).wait_stream(self._stream)
        return graph, torch.cuda.memory_reserved(device) - before

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a capture. The pool stays with one that was broken off, so the next has another."""
        try:
            graph.capture_end()
        except RuntimeError:
            self._pool = torch.cuda.graph_pool_handle()
            raise

    def _milliseconds(self, run: Callable[[], object]) -> float:
        torch.cuda.synchronize(self._forward.device)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))
