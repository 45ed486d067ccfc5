"""Runs a tower: plans batches, replays a graph or runs eagerly, whichever measured faster, and counts both.

It combines the forward (`encoder.forwards`), grid metadata on the device (`encoder.metadata.device_tables`), graphs and
their capture (`encoder.graphs.capture`), and packing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from configs.encoder_config import EncoderConfig
from encoder.forwards import TowerForward
from encoder.graphs.budgets import resolve_budgets
from encoder.graphs.capture import GraphCapturer
from encoder.graphs.capture_policy import activation_bytes_per_token
from encoder.graphs.captured import EncoderGraphs
from encoder.metadata.device_tables import GridTables
from encoder.metadata.geometry import Grid, check_grid
from encoder.metadata.segments import AttentionBackend
from encoder.packing.cost_based import CostTable, plan_batches
from encoder.packing.costs import image_cost
from encoder.packing.greedy import Batch, pack
from encoder.packing.run_counts import Reason, RunCounts, RunRecord

logger = logging.getLogger(__name__)

CPU_WORTHWHILE_TOKENS = 256
"""Tokens per batch beyond which a CPU is hardly faster: a core takes 0.15 ms a token for 256, 0.12 for 1,024."""


class TowerRunner:
    """One tower on one device, used by one thread."""

    def __init__(
        self,
        forward: TowerForward,
        config: EncoderConfig,
        *,
        tables: GridTables,
        capturer: GraphCapturer | None,
        no_graphs_reason: Reason = Reason.SWITCHED_OFF,
        counts: RunCounts | None = None,
    ) -> None:
        """`no_graphs_reason`: why `capturer` is None."""
        self.forward = forward
        self._config = config
        self._tables = tables
        self._capturer = capturer
        self._no_graphs_reason = no_graphs_reason
        self._counts = counts or RunCounts()
        self.last_run: RunRecord | None = None
        """Record of the last batch; None before the first."""
        self.budgets = resolve_budgets(config.encoder_cudagraph_token_budgets, graphs=capturer is not None)
        """Budgets in tokens that batches may be packed for, captured or not."""

    @classmethod
    def build(cls, forward: TowerForward, config: EncoderConfig) -> TowerRunner:
        """Makes a runner and captures the graphs that the settings require at start-up.

        Raises:
            ValueError: the settings require graphs that the device or attention backend does not support.
        """
        logger.info("the tower runs %s on %s, attention: %s", forward.name, forward.device, forward.attention)
        reason = _no_graphs_reason(forward, config)
        if config.cudagraph_mm_encoder is True and reason is not None:
            raise ValueError(f"cudagraph_mm_encoder is true, and CUDA graphs are not available: {reason.value}")
        tables = GridTables(forward.config, forward.device)
        if reason is not None:
            return cls(forward, config, tables=tables, capturer=None, no_graphs_reason=reason)
        counts = RunCounts()
        graphs = EncoderGraphs(
            forward,
            tables,
            largest_budget=max(resolve_budgets(config.encoder_cudagraph_token_budgets, graphs=True)),
            max_images=config.encoder_cudagraph_max_images_per_batch,
        )
        capturer = GraphCapturer(
            graphs,
            config,
            forward.config,
            counts,
            activation_bytes=activation_bytes_per_token(
                forward.config, forward.dtype.itemsize, fused=forward.name in ("fused", "fp8")
            ),
            length_classes=forward.length_classes,
        )
        runner = cls(forward, config, tables=tables, capturer=capturer, counts=counts)
        capturer.start()
        if config.cudagraph_mm_encoder is True and config.graph_capture == "startup" and not graphs.captured:
            raise ValueError("cudagraph_mm_encoder is true, and no graph could be captured; the log has the reason")
        return runner

    def warm(self, grids: Sequence[Grid]) -> None:
        """Computes the metadata of these grids, so that their first images do not wait for it."""
        self._tables.warm(grids)

    @property
    def worthwhile_tokens(self) -> int | None:
        """Tokens per batch beyond which throughput hardly grows; on a GPU, None without measurements or cost-based
        packing."""
        if self.forward.device.type == "cpu":
            return CPU_WORTHWHILE_TOKENS
        table = self._capturer.costs.packing_table() if self._capturer is not None else None
        return table.worthwhile_tokens if table is not None and self._config.packing == "cost" else None

    @property
    def largest_budget(self) -> int:
        """The largest budget in tokens."""
        return max(self.budgets)

    def plan_batches(self, grids: Sequence[Grid]) -> list[Batch]:
        """Packs every image into exactly one batch with a budget; None is an eager run.

        Raises ValueError for an invalid grid.
        """
        for grid in grids:
            check_grid(grid, self.forward.config.spatial_merge_size)
        images = [image_cost(grid, self.forward.config.merge_unit) for grid in grids]
        max_images = self._config.encoder_cudagraph_max_images_per_batch
        table = self._capturer.costs.packing_table() if self._capturer is not None else None
        if self._config.packing == "cost" and table is not None:
            return plan_batches(images, table=table, max_images=max_images, max_tokens=self.largest_budget)
        # With "startup" no graph is captured later, so only captured budgets are useful.
        captured = table.budgets if table is not None and self._config.graph_capture == "startup" else ()
        budgets = captured or self.budgets
        segments = [image.num_segments for image in images]
        tokens = [image.num_tokens for image in images]
        return pack(tokens, budgets=budgets, max_images=max_images, segments=segments)

    def run(self, patches: Tensor, grids: Sequence[Grid], budget: int | None) -> Tensor:
        """Replays one batch in a captured graph of at least `budget` tokens that holds it, else runs it eagerly.

        `patches`: `[num_patches, patch_dim]`, any float dtype, on the runner's device. Returns `[num_tokens, width]`
        in the tower's dtype; the caller owns it.
        """
        with torch.inference_mode(), self.forward.on_device():
            return self._run(patches, grids, budget)

    def _run(self, patches: Tensor, grids: Sequence[Grid], budget: int | None) -> Tensor:
        layout = self._tables.layout(grids)
        tokens = sum(t * h * w for t, h, w in grids) // self.forward.config.merge_unit
        capturer = self._capturer
        if capturer is None:
            reason = self._no_graphs_reason
        elif layout is None:
            reason = Reason.ARENA
        else:
            capturer.wanted.add(layout.num_tokens, layout.max_seqlen)
            key = None if budget is None else capturer.graphs.find_graph(layout, budget)
            if key is not None:
                self._counts.add_replay(tokens, key.budget)
                self.last_run = RunRecord(key.budget, None, tokens, len(grids))
                # A copy: the next replay overwrites the static output buffer.
                return capturer.graphs.replay(key, patches, layout).clone()
            reason = capturer.eager_reason(layout, budget)
        self._counts.add_eager_run(tokens, reason)
        self.last_run = RunRecord(None, reason, tokens, len(grids))
        if layout is None:
            return self.forward.run_grids(patches, grids)
        return self.forward.run(patches, self.forward.exact_metadata(self._tables, layout))

    def idle_step(self) -> bool:
        """Captures at most one graph or times the captured ones. Returns False if there was nothing to do."""
        return self._capturer is not None and self._capturer.step()

    @property
    def graph_bytes(self) -> int:
        """Device memory in bytes of the graphs and their buffers."""
        return 0 if self._capturer is None else self._capturer.used_bytes

    @property
    def cost_table(self) -> CostTable | None:
        """Table of all measurements; None without graphs or before the first eager measurement."""
        return None if self._capturer is None else self._capturer.costs.table()

    @property
    def counts(self) -> RunCounts:
        """Counts since start-up; a copy that other threads may read."""
        return replace(
            self._counts.copy(),
            grid_hits=self._tables.hits,
            grid_misses=self._tables.misses,
            fusion_fallback=self.forward.fallback,
        )


def _no_graphs_reason(forward: TowerForward, config: EncoderConfig) -> Reason | None:
    """Returns why graphs cannot be used; None if they are enabled and supported."""
    if config.cudagraph_mm_encoder is False:
        return Reason.SWITCHED_OFF
    if forward.device.type != "cuda":
        return Reason.NO_GPU
    if forward.backend is AttentionBackend.SDPA:
        return Reason.ATTENTION
    return None
