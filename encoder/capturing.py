"""Captures graphs, at the start or one at a time in idle moments, times them, and keeps the table of costs.

It must not know batches' images or where patches come from.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm

from configs.encoder_config import EncoderConfig
from encoder.budgets import resolved_budgets, tight_keys, whole_keys
from encoder.capture_policy import (
    LEARN_FROM_BATCHES,
    MemoryModel,
    Prices,
    best_tight,
    best_whole,
    learnt_budgets,
)
from encoder.costs import Costs, work
from encoder.geometry import Grid
from encoder.graph_inputs import Captured, GraphKey, Graphs, whole
from encoder.graph_trials import compact_grid
from encoder.graphs import GraphRefusedError, NoRoomError
from encoder.grid_tables import Layout
from encoder.run_counts import Reason, Tally
from encoder.vision_config import VisionConfig
from encoder.wanted import Wanted

logger = logging.getLogger(__name__)

GIB = 2**30
# What the device keeps free for eager runs and everybody else's needs.
_RESERVE_BYTES = 256 * 2**20
# An eager run is timed at about every second budget; its time is linear in between.
_EAGER_RATIO = 1.9
# Attention's share is measured in a graph of about this size: long enough to be seen, soon done.
_WORK_BUDGET = 2048
# "hybrid" captures so few of the budgets at the start: every third, the largest among them.
_HYBRID_EVERY = 3
_GIVE_UP_AFTER = 3
# A capture runs the forward about so often; what would take longer than this is for the start alone.
_RUNS_A_CAPTURE, _LONGEST_STEP_S = 5, 1.0
_SAVE_EVERY_S = 30.0


class Capturing:
    """Decides, captures and times. For the thread that owns the device."""

    def __init__(
        self,
        graphs: Graphs,
        config: EncoderConfig,
        vision: VisionConfig,
        tally: Tally,
        *,
        activation_bytes: int,
        length_classes: Sequence[int] = (),
        state_file: Path | None = None,
        fingerprint: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`activation_bytes`: of a token, at most. `state_file`: where what is wanted outlives a restart."""
        self.graphs = graphs
        self.costs = Costs()
        self.budgets = resolved_budgets(config.encoder_cudagraph_token_budgets, graphs=True)
        self.wanted = Wanted() if state_file is None else Wanted.load(state_file, fingerprint)
        self._config, self._vision, self._tally, self._clock = config, vision, tally, clock
        self._state_file, self._fingerprint = state_file, fingerprint
        self._length_classes = length_classes
        self._memory = MemoryModel(activation_bytes)
        self._refused: set[GraphKey] = set()
        self._no_room: set[GraphKey] = set()
        self._eager_batches: dict[int, tuple[tuple[Grid, ...], float]] = {}
        self._timed = 0
        self._learnt: tuple[int, ...] = ()
        self._learnt_from = 0
        self._looked_at = self._look_again_at = 0
        self._saved_at, self._saved_total = clock(), self.wanted.total

    @property
    def used_bytes(self) -> int:
        """Of the graphs and what they share."""
        return self.graphs.buffer_bytes + self._memory.pool_bytes

    def start(self, *, progress: bool = True) -> None:
        """Captures what is to be there before the first request, with a progress bar on stderr."""
        keys = self._start_keys()
        if not keys:
            return
        started = self._clock()
        begun: list[GraphKey] = []
        for key in tqdm(keys, desc="Capturing encoder graphs", unit="graph", disable=not progress):
            if not begun and len(self._refused) >= _GIVE_UP_AFTER:
                logger.warning("%d encoder graphs were refused and none captured: running without", len(self._refused))
                break
            if self._begin(key):
                begun.append(key)
        # The device is still at the first of them, while the last were captured.
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
        """One capture, or one save of what is wanted, where there is a need for it; False where there is none."""
        total = self.wanted.total
        if self._config.capture != "eager" and not self._looked_at <= total < self._look_again_at:
            key = self._next()
            if key is not None:
                self._capture(key)
                return True
            # Looking takes a while itself: not again before the traffic has grown by a tenth (or was halved).
            self._looked_at, self._look_again_at = total, int(1.1 * total) + 1
            if self._timed != len(self.graphs.captured):
                self._time_under_load()
                return True
        if self.wanted.total != self._saved_total and self._clock() - self._saved_at >= _SAVE_EVERY_S:
            self.save()
            return self._state_file is not None
        return False

    def save(self) -> None:
        """Writes down what is wanted, where there is a place for it; a place that fails is logged and passed over."""
        self._saved_at, self._saved_total = self._clock(), self.wanted.total
        if self._state_file is not None:
            try:
                self.wanted.save(self._state_file, self._fingerprint)
            except OSError as error:
                logger.warning("what the traffic asks for is not kept: %s", error)

    def reason_against(self, layout: Layout, budget: int | None) -> Reason:
        """Why a batch that no captured graph was found for, or that is to run eagerly, has none."""
        if layout.num_tokens > max(self.budgets):
            return Reason.OVER_LARGEST
        wanted = layout.num_tokens if budget is None else budget
        reachable = [graph.shape for key, graph in self.graphs.captured.items() if key.budget >= wanted]
        if any(shape.holds(layout) for shape in reachable):
            return Reason.CHEAPER
        if any(not shape.holds_segments(layout) for shape in reachable):
            return Reason.SEGMENTS
        for keys, reason in ((self._refused, Reason.REFUSED), (self._no_room, Reason.MEMORY)):
            if any(key.budget >= wanted for key in keys):
                return reason
        return Reason.NOT_CAPTURED

    def _start_keys(self) -> list[GraphKey]:
        keys = whole_keys(self.budgets, self._vision.merge_unit)
        if self._config.capture == "lazy":
            return []
        if self._config.capture == "hybrid":
            return keys[::_HYBRID_EVERY]
        return keys + self._tight_keys(self.budgets)

    def _tight_keys(self, budgets: Sequence[int]) -> list[GraphKey]:
        config = self._config
        return tight_keys(
            budgets, self._length_classes, self._vision.merge_unit, config.encoder_cudagraph_max_images_per_batch
        )

    def _next(self) -> GraphKey | None:
        self._learn()
        captured = self.graphs.captured
        there = {key for key in captured if key == whole(key.budget, self._vision)}
        budgets = sorted({*self.budgets, *self._learnt})
        open_ = [key for key in whole_keys(budgets, self._vision.merge_unit) if self._may_capture(key)]
        best = best_whole(self.wanted, there, open_, self._prices())
        if best is None:
            tight = self._tight_keys([key.budget for key in there])
            best = best_tight(self.wanted, there, [key for key in tight if self._may_capture(key)])
        if best is None and self._config.capture == "hybrid":
            best = next((key for key in open_ if key.budget in self.budgets), None)
        return best

    def _learn(self) -> None:
        """Fits budgets again when the traffic has grown by a quarter."""
        total = self.wanted.total
        if total >= max(LEARN_FROM_BATCHES, 1.25 * self._learnt_from) or total < self._learnt_from:
            self._learnt = learnt_budgets(self.wanted, len(self.budgets), max(self.budgets))
            self._learnt_from = total

    def _prices(self) -> Prices:
        table = self.costs.choosing()
        if table is None:
            # Nothing was timed yet: a graph saves the launches, which cost as much as about a thousand tokens.
            return Prices(eager=lambda tokens: tokens + 1000.0, replay=float)
        return Prices(eager=table.eager, replay=lambda budget: self.costs.replay_ms(budget) or table.eager(budget))

    def _may_capture(self, key: GraphKey) -> bool:
        if key in self.graphs.captured or key in self._refused or key in self._no_room:
            return False
        replay_ms = self.costs.replay_ms(key.budget)
        return replay_ms is None or _RUNS_A_CAPTURE * replay_ms / 1e3 <= _LONGEST_STEP_S

    def _capture(self, key: GraphKey) -> None:
        if self._begin(key):
            self._finish(key)

    def _begin(self, key: GraphKey) -> bool:
        """Whether there is a graph to be judged."""
        needed = self._memory.estimate(key.budget)
        bound = self._config.encoder_cudagraph_memory_bytes
        if self.used_bytes + needed > bound or needed + _RESERVE_BYTES > self.graphs.free_bytes:
            self._no_room.add(key)
            logger.info(
                "no graph of budget %d: it needs about %.2f GiB, %.2f of %.2f GiB are used and %.2f GiB free",
                key.budget, needed / GIB, self.used_bytes / GIB, bound / GIB, self.graphs.free_bytes / GIB,
            )  # fmt: skip
            return False
        try:
            self._memory.add(key.budget, self.graphs.begin(key))
        except NoRoomError as error:
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
        self._tally.captures += 1
        if key == whole(key.budget, self._vision):
            self._time(key, captured)

    def _refuse(self, key: GraphKey, error: GraphRefusedError) -> None:
        self._refused.add(key)
        self._tally.refusals += 1
        logger.warning("a graph is not used: %s", error)

    def _time(self, key: GraphKey, captured: Captured) -> None:
        self.costs.add_replay(key.budget, captured.replay_ms, work(captured.grids))
        tokens = sum(t * h * w for t, h, w in captured.alike) // self._vision.merge_unit
        if all(not 1 / _EAGER_RATIO < tokens / size < _EAGER_RATIO for size in self._eager_batches):
            alone = self.graphs.eager_ms(captured.alike)
            self._eager_batches[tokens] = captured.alike, alone
            self.costs.add_eager(tokens, alone, work(captured.alike))
        if key.budget <= max(_WORK_BUDGET, min(self.budgets)) and not self.costs.knows_work:
            self._time_work(key, captured)

    def _time_under_load(self) -> None:
        """All once more, one after the other, so that they can be compared; an eager run takes its launches too."""
        captured = self.graphs.captured
        keys = [key for key in sorted(captured, reverse=True) if key == whole(key.budget, self._vision)]
        if keys:
            batches = list(self._eager_batches.items())
            replays, eager = self.graphs.sustained_ms(keys, [grids for _, (grids, _) in batches])
            for key, milliseconds in zip(keys, replays, strict=True):
                self.costs.add_replay(key.budget, milliseconds, work(captured[key].alike))
            for (tokens, (grids, alone)), milliseconds in zip(batches, eager, strict=True):
                self.costs.add_eager(tokens, max(alone, milliseconds), work(grids))
        self._timed = len(captured)

    def _time_work(self, key: GraphKey, captured: Captured) -> None:
        """The same tokens as one image and as many: what differs is attention."""
        number = min(captured.shape.max_images, key.budget)
        one = [compact_grid(key.budget, self._vision)]
        many = [compact_grid(key.budget // number, self._vision)] * number
        self.costs.add_work(
            (self.graphs.replay_ms(key, many), work(many)), (self.graphs.replay_ms(key, one), work(one))
        )
