"""CUDA graphs of a tower's forward, in one memory pool: capture, check, time, replay.

Every graph is compared, with NaN in its padding, with the forward that it was captured from before it may be used. This
module is independent of packing (`encoder.packing.cost_based`), of the capture policy and of the source of patches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from encoder.device_errors import is_out_of_memory
from encoder.forwards import TowerForward
from encoder.graphs.buffers import GraphBuffers, GraphCapacity, GraphKey
from encoder.graphs.trial_batches import timing_batch, trial_batch
from encoder.metadata.device_tables import GridTables, Layout
from encoder.metadata.geometry import Grid
from encoder.metadata.tower_metadata import expanded_metadata
from encoder.start_check import largest_error_on_device


class GraphRefusedError(RuntimeError):
    """A graph cannot be captured or replayed, or its output differs from its forward's; it is not used."""


class GraphMemoryError(RuntimeError):
    """The device has not enough free memory to capture a graph."""


@dataclass(frozen=True)
class CapturedGraph:
    """A graph that passed its check and may be replayed."""

    shape: GraphCapacity
    graph: torch.cuda.CUDAGraph
    grids: tuple[Grid, ...]
    """Grids of the batch of the check and of `replay_ms`."""
    alike: tuple[Grid, ...]
    """Grids of the batch that is timed under load."""
    replay_ms: float


@dataclass(frozen=True)
class Trial:
    """A captured graph whose check may still be running on the device."""

    shape: GraphCapacity
    graph: torch.cuda.CUDAGraph
    grids: tuple[Grid, ...]
    pool_bytes: int
    """Growth of the pool by its capture."""
    errors: tuple[tuple[Tensor, float], ...]
    """For each run that it is compared with: the worst image's error, a float32 scalar on the device, and the limit."""
    events: tuple[torch.cuda.Event, torch.cuda.Event]
    """Timing events before and after its first replay."""


class EncoderGraphs:
    """CUDA graphs of one forward. Used by the thread that owns the device, on one stream."""

    def __init__(
        self,
        forward: TowerForward,
        tables: GridTables,
        *,
        largest_budget: int,
        max_images: int,
    ) -> None:
        self._forward = forward
        self._tables = tables
        self._max_images = max_images
        self._buffers = GraphBuffers(
            largest_budget, max_images, forward.config, dtype=forward.dtype, device=forward.device
        )
        self.pool = torch.cuda.graph_pool_handle()
        """Handle of the memory pool of the next capture; graphs of an earlier one share no memory with it."""
        self._stream = torch.cuda.Stream(forward.device)
        self._graphs: dict[GraphKey, CapturedGraph] = {}
        self._trials: dict[GraphKey, Trial] = {}
        self.runs_before_capture = 0
        """Number of captures before which the forward ran once uncaptured."""

    @property
    def captured(self) -> dict[GraphKey, CapturedGraph]:
        return dict(self._graphs)

    @property
    def buffer_bytes(self) -> int:
        """Device memory in bytes that all graphs share outside the pool."""
        return self._buffers.num_bytes + self._tables.arena.nbytes

    @property
    def free_bytes(self) -> int:
        """Free memory of the device in bytes."""
        return torch.cuda.mem_get_info(self._forward.device)[0]

    def capture(self, key: GraphKey) -> CapturedGraph:
        """Captures, checks and times one graph. Raises what `begin` and `finish` raise."""
        self.begin(key)
        return self.finish(key)

    @torch.inference_mode()
    def begin(self, key: GraphKey) -> int:
        """Captures a graph and starts its check without waiting for the device, so that captures can follow each other.

        Capture the largest graph first: the others reuse its memory. Returns the growth of the pool in bytes.

        Raises:
            GraphRefusedError: the graph cannot be captured.
            GraphMemoryError: the device has not enough memory for it.
        """
        try:
            with torch.cuda.device(self._forward.device):
                trial = self._trials[key] = self._begin(key)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise GraphMemoryError(f"not enough memory for the graph of budget {key.budget}: {error}") from error
            raise GraphRefusedError(f"the graph of budget {key.budget} cannot be captured: {error}") from error
        return trial.pool_bytes

    def _begin(self, key: GraphKey) -> Trial:
        config = self._forward.config
        shape = GraphCapacity.for_key(key, self._max_images, config)
        grids = trial_batch(shape, config)
        layout = self._layout(grids)
        assert shape.fits(layout), f"{grids} does not fit {shape}"
        patches = torch.randn(
            layout.num_patches, config.patch_dim, device=self._forward.device, dtype=self._forward.dtype
        )
        expected = self._forward.run(patches, self._forward.exact_metadata(self._tables, layout))
        self._buffers.load(patches, layout, shape)
        compared = [(expected, self._forward.tolerance)]
        if self._forward.same_rows_tolerance is not None:
            # An eager run padded to the graph's rows uses 8-bit GEMMs in the same places, so its limit is tighter.
            self._forward_in_place(shape)
            padded = self._buffers.output(layout.num_tokens).clone()
            compared.append((padded, min(self._forward.same_rows_tolerance, self._forward.tolerance)))
        self._buffers.spoil_padding(layout, shape)
        graph, grown = self._recorded(shape)
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        graph.replay()
        events[1].record()
        found = self._buffers.output(layout.num_tokens)
        errors = [(largest_error_on_device(found, other, layout.image_tokens), limit) for other, limit in compared]
        self._buffers.clear()
        return Trial(shape, graph, tuple(grids), grown, tuple(errors), events)

    @torch.inference_mode()
    def finish(self, key: GraphKey) -> CapturedGraph:
        """Waits for a graph's check, after which the graph may be replayed.

        Raises GraphRefusedError if its output differs from the forward's or its replay failed.
        """
        trial = self._trials.pop(key)
        shape = trial.shape
        try:
            errors = [(float(error), limit) for error, limit in trial.errors]
        except RuntimeError as failed:
            raise GraphRefusedError(f"the graph of budget {key.budget} cannot be replayed: {failed}") from failed
        for error, limit in errors:
            if not error <= limit:
                raise GraphRefusedError(
                    f"the graph of budget {key.budget} for images of up to {key.max_seqlen} patches differs "
                    f"from its forward by {error:.2e}, the limit is {limit:.2e}"
                )
        begin, end = trial.events
        end.synchronize()
        alike = timing_batch(shape, self._forward.config)
        captured = CapturedGraph(
            shape,
            trial.graph,
            trial.grids,
            tuple(alike if shape.fits(self._layout(alike)) else trial.grids),
            float(begin.elapsed_time(end)),
        )
        # Ascending: `find_graph` returns the first match.
        self._graphs = dict(sorted({**self._graphs, key: captured}.items()))
        return captured

    def find_graph(self, layout: Layout, budget: int) -> GraphKey | None:
        """Returns the smallest graph of `budget` or more that fits the batch, tightest in image length, or None."""
        holding = (key for key, graph in self._graphs.items() if key.budget >= budget and graph.shape.fits(layout))
        return next(holding, None)

    @torch.inference_mode()
    def replay(self, key: GraphKey, patches: Tensor, layout: Layout) -> Tensor:
        """Replays a graph. `patches`: `[num_patches, patch_dim]`, any float dtype.

        Returns `[num_tokens, width]`, a view of the static output buffer: copy it before the next replay.
        """
        captured = self._graphs[key]
        self._buffers.load(patches, layout, captured.shape)
        captured.graph.replay()
        return self._buffers.output(layout.num_tokens)

    @torch.inference_mode()
    def replay_ms(self, key: GraphKey, grids: Sequence[Grid]) -> float:
        """Returns the milliseconds of a replay for images with these grids. Waits for the device."""
        with torch.cuda.device(self._forward.device):
            self._buffers.describe(self._layout(grids))
            return self._milliseconds(self._graphs[key].graph.replay)

    @torch.inference_mode()
    def eager_ms(self, grids: Sequence[Grid]) -> float:
        """Returns the milliseconds of an eager run including its launches, the faster of two. Waits for the device."""
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
        """Returns the milliseconds of a replay of each graph and of an eager run of each batch, run back to back.

        Under sustained load the device slows down over time, so runs of similar size are measured next to each other.
        Launches of the eager runs overlap with the replays. Waits for the device.
        """
        sizes = [*(key.budget for key in keys), *(self._layout(grids).num_tokens for grids in batches)]
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in sizes]
        with torch.cuda.device(self._forward.device):
            # Random values, since zeros take less power.
            patches = self._buffers.randomize()
            if keys:
                # Untimed: the clock of an idle device differs.
                self._graphs[keys[0]].graph.replay()
            for at in sorted(range(len(sizes)), key=lambda at: (-sizes[at], at)):
                begin, end = events[at]
                if at < len(keys):
                    captured = self._graphs[keys[at]]
                    self._buffers.describe(self._layout(captured.alike))
                    begin.record()
                    captured.graph.replay()
                else:
                    # Only now: the layout of other grids may overwrite the arena.
                    layout = self._layout(batches[at - len(keys)])
                    begin.record()
                    self._forward.run(patches[: layout.num_patches], self._forward.exact_metadata(self._tables, layout))
                end.record()
            torch.cuda.synchronize()
            self._buffers.clear()
        times = [float(begin.elapsed_time(end)) for begin, end in events]
        return times[: len(keys)], times[len(keys) :]

    def trim(self) -> None:
        """Returns cached memory of the checks' eager runs to the device."""
        torch.cuda.empty_cache()

    def _layout(self, grids: Sequence[Grid]) -> Layout:
        layout = self._tables.layout(grids)
        if layout is None:
            raise ValueError(f"{len(grids)} grids of {sum(t * h * w for t, h, w in grids)} patches overfill the arena")
        return layout

    def _forward_in_place(self, shape: GraphCapacity) -> None:
        """Runs what a graph captures: metadata from the description, then the forward over the whole budget.

        The output goes to the static buffers, so that the next capture can reuse the pool.
        """
        forward, budget = self._forward, shape.key.budget
        laid_out = expanded_metadata(
            forward.expand,
            self._tables.arena,
            self._buffers.description,
            forward.config,
            forward.backend,
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

    def _recorded(self, shape: GraphCapacity) -> tuple[torch.cuda.CUDAGraph, int]:
        """Calls `_record`, after one uncaptured run if the forward needs it, so that first-call choices and allocations
        for the shape happen outside the capture. A forward that compiles always needs it: compiling within a capture
        leaves the device's random number generator and the pool unusable.
        """
        if not self._forward.may_compile:
            try:
                return self._record(shape)
            except RuntimeError as error:  # the second try raises another if it persists
                if is_out_of_memory(error):
                    raise
        self.runs_before_capture += 1
        self._forward_in_place(shape)
        return self._record(shape)

    def _record(self, shape: GraphCapacity) -> tuple[torch.cuda.CUDAGraph, int]:
        """Captures the graph. Returns it and the growth of the pool in bytes."""
        device = self._forward.device
        graph = torch.cuda.CUDAGraph()
        before = self._pool_bytes()
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            # "thread_local": other threads may allocate and copy during the capture.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                self._forward_in_place(shape)
            except BaseException:
                with suppress(RuntimeError):  # the first error is the one to report
                    self._end(graph)
                raise
            self._end(graph)
        torch.cuda.current_stream(device).wait_stream(self._stream)
        return graph, self._pool_bytes() - before

    def _pool_bytes(self) -> int:
        """Returns this pool's bytes, as other threads allocate too. The driver's graph memory cannot be queried."""
        return sum(
            int(segment["total_size"]) for segment in torch.cuda.memory_snapshot(self.pool, include_traces=False)
        )

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a capture. An aborted capture keeps the pool, so the next one gets a new pool."""
        try:
            graph.capture_end()
        except RuntimeError:
            self.pool = torch.cuda.graph_pool_handle()
            raise

    def _milliseconds(self, run: Callable[[], object]) -> float:
        torch.cuda.synchronize(self._forward.device)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))
