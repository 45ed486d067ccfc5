"""Captures CUDA graphs at start-up or one at a time in idle moments, times them, and maintains the cost table."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from configs.encoder_config import EncoderConfig
from encoder.checkpoint.vision_config import VisionConfig
from encoder.graphs.budgets import resolve_budgets, tight_keys, whole_keys
from encoder.graphs.buffers import GraphKey, whole
from encoder.graphs.capture_policy import MemoryModel, RunTimes, best_tight, best_whole
from encoder.graphs.captured import CapturedGraph, EncoderGraphs, GraphMemoryError, GraphRefusedError
from encoder.graphs.traffic_histogram import TrafficHistogram
from encoder.graphs.trial_batches import compact_grid
from encoder.metadata.device_tables import Layout
from encoder.metadata.geometry import Grid
from encoder.packing.costs import Costs, attention_work
from encoder.packing.run_counts import Reason, RunCounts

logger = logging.getLogger(__name__)

GIB = 2**30
# Device memory that captures leave free, for eager runs and other users of the device.
_RESERVE_BYTES = 256 * 2**20
# Eager runs are timed at about every second budget; between two measurements the time is interpolated.
_EAGER_RATIO = 1.9
# Budget (tokens) at which attention's share is measured: large enough to be measurable, small enough to be quick.
_WORK_BUDGET = 2048
# "hybrid" captures every third budget at start-up, including the largest.
_HYBRID_EVERY = 3
_GIVE_UP_AFTER = 3
# A capture runs the forward about this many times. Captures that would take longer than this limit happen only at
# start-up.
_RUNS_A_CAPTURE, _LONGEST_STEP_S = 5, 1.0


class GraphCapturer:
    """Decides which graphs to capture, captures and times them. Used only by the thread that owns the device."""

    def __init__(
        self,
        graphs: EncoderGraphs,
        config: EncoderConfig,
        vision: VisionConfig,
        counts: RunCounts,
        *,
        activation_bytes: int,
        length_classes: Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`activation_bytes`: upper bound per token."""
        self.graphs = graphs
        self.costs = Costs()
        self.budgets = resolve_budgets(config.encoder_cudagraph_token_budgets, graphs=True)
        self.wanted = TrafficHistogram()
        self._config, self._vision, self._counts, self._clock = config, vision, counts, clock
        self._length_classes = length_classes
        self._memory = MemoryModel(activation_bytes)
        self._refused: set[GraphKey] = set()
        self._no_room: set[GraphKey] = set()
        self._eager_batches: dict[int, tuple[tuple[Grid, ...], float]] = {}
        self._timed = 0
        self._looked_at = self._look_again_at = 0

    @property
    def used_bytes(self) -> int:
        """Device memory in bytes of the graph pool and the shared buffers."""
        return self.graphs.buffer_bytes + self._memory.pool_bytes

    def start(self) -> None:
        """Captures the graphs that must exist before the first request."""
        keys = self._start_keys()
        if not keys:
            return
        started = self._clock()
        begun: list[GraphKey] = []
        for key in keys:
            if not begun and len(self._refused) >= _GIVE_UP_AFTER:
                logger.warning(
                    "%d encoder graphs were refused and none captured: running without graphs", len(self._refused)
                )
                break
            if self._begin(key):
                begun.append(key)
        # In a second pass: `_finish` waits for the device, which checks the first graphs while later ones are captured.
        for key in begun:
            self._finish(key)
        self._time_under_load()
        self.graphs.trim()
        logger.info(
            "captured %d encoder graphs in %.1f s, %.2f GiB; refused %d, no room for %d",
            len(self.graphs.captured),
            self._clock() - started,
            self.used_bytes / GIB,
            len(self._refused),
            len(self._no_room),
        )

    def step(self) -> bool:
        """Captures one graph, or times all captured ones again. Returns False if there was nothing to do."""
        total = self.wanted.total
        if self._config.graph_capture != "startup" and not self._looked_at <= total < self._look_again_at:
            key = self._next()
            if key is not None:
                if self._begin(key):
                    self._finish(key)
                return True
            # The search is slow: repeat it only when the histogram has grown by a tenth (or was halved).
            self._looked_at, self._look_again_at = total, int(1.1 * total) + 1
            if self._timed != len(self.graphs.captured):
                self._time_under_load()
                return True
        return False

    def eager_reason(self, layout: Layout, budget: int | None) -> Reason:
        """Returns why a batch runs eagerly: no captured graph holds it, or `budget` is None."""
        if layout.num_tokens > max(self.budgets):
            return Reason.OVER_LARGEST
        wanted = layout.num_tokens if budget is None else budget
        reachable = [graph.shape for key, graph in self.graphs.captured.items() if key.budget >= wanted]
        if any(shape.fits(layout) for shape in reachable):
            return Reason.CHEAPER
        if any(not shape.fits_segments(layout) for shape in reachable):
            return Reason.SEGMENTS
        for keys, reason in ((self._refused, Reason.REFUSED), (self._no_room, Reason.MEMORY)):
            if any(key.budget >= wanted for key in keys):
                return reason
        return Reason.NOT_CAPTURED

    def _start_keys(self) -> list[GraphKey]:
        keys = whole_keys(self.budgets, self._vision.merge_unit)
        if self._config.graph_capture == "on_demand":
            return []
        if self._config.graph_capture == "hybrid":
            return keys[::_HYBRID_EVERY]
        return keys + self._tight_keys(self.budgets)

    def _tight_keys(self, budgets: Sequence[int]) -> list[GraphKey]:
        config = self._config
        return tight_keys(
            budgets, self._length_classes, self._vision.merge_unit, config.encoder_cudagraph_max_images_per_batch
        )

    def _next(self) -> GraphKey | None:
        captured = self.graphs.captured
        there = {key for key in captured if key == whole(key.budget, self._vision)}
        open_ = [key for key in whole_keys(self.budgets, self._vision.merge_unit) if self._may_capture(key)]
        best = best_whole(self.wanted, there, open_, self._prices())
        if best is None:
            tight = self._tight_keys([key.budget for key in there])
            best = best_tight(self.wanted, there, [key for key in tight if self._may_capture(key)])
        if best is None and self._config.graph_capture == "hybrid":
            best = next(iter(open_), None)
        return best

    def _prices(self) -> RunTimes:
        table = self.costs.packing_table()
        if table is None:
            # Before the first timing: a graph saves the launches, assumed to take as long as about a thousand tokens.
            return RunTimes(eager=lambda tokens: tokens + 1000.0, replay=float)
        return RunTimes(
            eager=table.eager_base_ms, replay=lambda budget: self.costs.replay_ms(budget) or table.eager_base_ms(budget)
        )

    def _may_capture(self, key: GraphKey) -> bool:
        if key in self.graphs.captured or key in self._refused or key in self._no_room:
            return False
        replay_ms = self.costs.replay_ms(key.budget)
        return replay_ms is None or _RUNS_A_CAPTURE * replay_ms / 1e3 <= _LONGEST_STEP_S

    def _begin(self, key: GraphKey) -> bool:
        """Captures a graph and starts its check. Returns whether there is a graph for `_finish`."""
        needed = self._memory.estimate(key.budget, self.graphs.pool)
        bound = self._config.encoder_cudagraph_memory_bytes
        if self.used_bytes + needed > bound or needed + _RESERVE_BYTES > self.graphs.free_bytes:
            self._no_room.add(key)
            logger.info(
                "no graph of budget %d: it needs about %.2f GiB, %.2f of %.2f GiB are used and %.2f GiB free",
                key.budget, needed / GIB, self.used_bytes / GIB, bound / GIB, self.graphs.free_bytes / GIB,
            )  # fmt: skip
            return False
        try:
            grown = self.graphs.begin(key)
            self._memory.add(key.budget, grown, self.graphs.pool)  # an aborted first try has changed the pool
        except GraphMemoryError as error:
            self._no_room.add(key)
            logger.warning("%s", error)
            return False
        except GraphRefusedError as error:
            self._refuse(key, error)
            return False
        return True

    def _finish(self, key: GraphKey) -> None:
        try:
            captured = self.graphs.finish(key)
        except GraphRefusedError as error:
            self._refuse(key, error)
            return
        self._counts.captures += 1
        if key == whole(key.budget, self._vision):
            self._time(key, captured)

    def _refuse(self, key: GraphKey, error: GraphRefusedError) -> None:
        self._refused.add(key)
        self._counts.refusals += 1
        logger.warning("graph refused: %s", error)

    def _time(self, key: GraphKey, captured: CapturedGraph) -> None:
        self.costs.add_replay(key.budget, captured.replay_ms, attention_work(captured.grids))
        tokens = sum(t * h * w for t, h, w in captured.alike) // self._vision.merge_unit
        if all(not 1 / _EAGER_RATIO < tokens / size < _EAGER_RATIO for size in self._eager_batches):
            alone = self.graphs.eager_ms(captured.alike)
            self._eager_batches[tokens] = captured.alike, alone
            self.costs.add_eager(tokens, alone, attention_work(captured.alike))
        if key.budget <= max(_WORK_BUDGET, min(self.budgets)) and not self.costs.knows_work:
            self._time_work(key, captured)

    def _time_under_load(self) -> None:
        """Times all graphs and eager batches back to back, comparably; an eager run takes at least its time alone."""
        captured = self.graphs.captured
        keys = [key for key in sorted(captured, reverse=True) if key == whole(key.budget, self._vision)]
        if keys:
            batches = list(self._eager_batches.items())
            replays, eager = self.graphs.sustained_ms(keys, [grids for _, (grids, _) in batches])
            for key, milliseconds in zip(keys, replays, strict=True):
                self.costs.add_replay(key.budget, milliseconds, attention_work(captured[key].alike))
            for (tokens, (grids, alone)), milliseconds in zip(batches, eager, strict=True):
                self.costs.add_eager(tokens, max(alone, milliseconds), attention_work(grids))
        self._timed = len(captured)

    def _time_work(self, key: GraphKey, captured: CapturedGraph) -> None:
        """Times a budget's tokens as one image and as many images: the times differ only by attention work."""
        number = min(captured.shape.max_images, key.budget)
        if number == 1:
            return
        one = [compact_grid(key.budget, self._vision)]
        many = [compact_grid(key.budget // number, self._vision)] * number
        self.costs.add_work(
            (self.graphs.replay_ms(key, many), attention_work(many)),
            (self.graphs.replay_ms(key, one), attention_work(one)),
        )
