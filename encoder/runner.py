"""Runs a tower: plans batches, replays a graph or runs eagerly, whichever is known to be faster, and counts which.

It joins the forward (`forwards`), the grids' numbers on the device (`grid_tables`), the graphs and when they are
captured (`capturing`), and packing. It must not know images' pixels, digests or requests.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from configs.encoder_config import EncoderConfig
from encoder.attention import AttentionBackend
from encoder.budgets import resolved_budgets
from encoder.capture_policy import activation_bytes_per_token
from encoder.capturing import Capturing
from encoder.costs import image_cost
from encoder.forwards import TowerForward, choose_forward
from encoder.geometry import Grid, check_grid
from encoder.graphs import EncoderGraphs
from encoder.grid_tables import GridTables
from encoder.metadata import MetadataBuilder
from encoder.packing import Batch, pack
from encoder.planning import CostTable, plan
from encoder.run_counts import Ran, Reason, RunCounts, Tally
from encoder.weights import VisionTower

logger = logging.getLogger(__name__)


class TowerRunner:
    """One tower on one device, used by one thread."""

    def __init__(
        self,
        forward: TowerForward,
        config: EncoderConfig,
        *,
        tables: GridTables | None,
        capturing: Capturing | None,
        without_graphs: Reason = Reason.SWITCHED_OFF,
        tally: Tally | None = None,
    ) -> None:
        """`tables`: None where attention needs its borders on the host. `without_graphs`: why `capturing` is None."""
        self.forward = forward
        self._config = config
        self._tables = tables
        self._builder = MetadataBuilder(forward.config)
        self._capturing = capturing
        self._without_graphs = without_graphs
        self._tally = tally or Tally()
        self.ran: Ran | None = None
        """The last batch; None before the first."""
        self._budgets = resolved_budgets(config.encoder_cudagraph_token_budgets, graphs=capturing is not None)

    @classmethod
    def build(
        cls, tower: VisionTower, config: EncoderConfig, *, progress: bool = True, fingerprint: str = ""
    ) -> TowerRunner:
        """Chooses the forward and captures what the settings ask for. Let go of `tower` to free what was repacked.

        Raises:
            ValueError, BackendUnavailableError: something is asked for that cannot be had on the tower's device.
        """
        return cls.of(choose_forward(tower, config), config, progress=progress, fingerprint=fingerprint)

    @classmethod
    def of(
        cls, forward: TowerForward, config: EncoderConfig, *, progress: bool = True, fingerprint: str = ""
    ) -> TowerRunner:
        """Captures what the settings ask for.

        Args:
            progress: show a bar on stderr while graphs are captured.
            fingerprint: the encoder's identity, under which what its traffic asks for is kept.

        Raises:
            ValueError: graphs are asked for that cannot be had on the device.
        """
        logger.info("the tower runs %s on %s, attention: %s", forward.name, forward.device, forward.attention)
        reason = _why_no_graphs(forward, config)
        if config.cudagraph_mm_encoder is True and reason is not None:
            raise ValueError(f"cudagraph_mm_encoder is true, and graphs cannot be had here: {reason.value}")
        tables = GridTables(forward.config, forward.device) if forward.reads_borders else None
        if reason is not None or tables is None:
            return cls(forward, config, tables=tables, capturing=None, without_graphs=reason or Reason.ATTENTION)
        tally = Tally()
        folder = config.state_folder
        graphs = EncoderGraphs(
            forward,
            tables,
            largest_budget=max(resolved_budgets(config.encoder_cudagraph_token_budgets, graphs=True)),
            max_images=config.encoder_cudagraph_max_images_per_batch,
        )
        capturing = Capturing(
            graphs,
            config,
            forward.config,
            tally,
            activation_bytes=activation_bytes_per_token(
                forward.config, forward.dtype.itemsize, fused=forward.name in ("fused", "fp8")
            ),
            length_classes=forward.length_classes,
            state_file=None if folder is None else Path(folder) / f"wanted-{fingerprint[:16] or 'any'}.json",
            fingerprint=fingerprint,
        )
        runner = cls(forward, config, tables=tables, capturing=capturing, tally=tally)
        capturing.start(progress=progress)
        return runner

    def warm(self, grids: Sequence[Grid]) -> None:
        """Computes what these grids need, so that their first images do not wait for it."""
        if self._tables is not None:
            self._tables.warm(grids)

    @property
    def worthwhile_tokens(self) -> int | None:
        """So many tokens together run about as fast as any more would; None where that was not measured."""
        table = self._capturing.costs.choosing() if self._capturing is not None else None
        return table.worthwhile_tokens if table is not None and self._config.packing == "cost" else None

    @property
    def largest_budget(self) -> int:
        """In tokens."""
        return max(self._budgets)

    def plan(self, grids: Sequence[Grid]) -> list[Batch]:
        """Which images run together, and in which budget; None is an eager run. Every image once, by its index.

        Raises `ValueError` for a grid that no image can have.
        """
        for grid in grids:
            check_grid(grid, self.forward.config.spatial_merge_size)
        images = [image_cost(grid, self.forward.config.merge_unit) for grid in grids]
        max_images = self._config.encoder_cudagraph_max_images_per_batch
        table = self._capturing.costs.choosing() if self._capturing is not None else None
        if self._config.packing == "cost" and table is not None:
            return plan(images, table=table, max_images=max_images, max_tokens=max(self._budgets))
        # What was not captured at the start may be later, unless all was to be captured then.
        captured = table.budgets if table is not None and self._config.capture == "eager" else ()
        budgets = captured or self._budgets
        return pack([image.num_tokens for image in images], budgets=budgets, max_images=max_images)

    def run(self, patches: Tensor, grids: Sequence[Grid], budget: int | None) -> Tensor:
        """One batch, in the graph of `budget` or a larger one where one holds it, else eagerly.

        `patches`: `[num_patches, patch_dim]` in any float dtype on the runner's device. Returns `[num_tokens, width]`
        in the tower's dtype, which is the caller's to keep.
        """
        device = self.forward.device
        with torch.inference_mode(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return self._run(patches, grids, budget)

    def _run(self, patches: Tensor, grids: Sequence[Grid], budget: int | None) -> Tensor:
        layout = self._tables.layout(grids) if self._tables is not None else None
        tokens = sum(t * h * w for t, h, w in grids) // self.forward.config.merge_unit
        capturing = self._capturing
        if capturing is None:
            reason = self._without_graphs
        elif layout is None:
            reason = Reason.ARENA
        else:
            capturing.wanted.add(layout.num_tokens, layout.max_seqlen)
            key = None if budget is None else capturing.graphs.fitting(layout, budget)
            if key is not None:
                self._tally.replayed(tokens, key.budget)
                self.ran = Ran(key.budget, None, tokens, len(grids))
                # A copy: the next replay writes over the graphs' own output.
                return capturing.graphs.replay(key, patches, layout).clone()
            reason = capturing.reason_against(layout, budget)
        self._tally.ran_eagerly(tokens, reason)
        self.ran = Ran(None, reason, tokens, len(grids))
        if layout is not None and self._tables is not None:
            metadata = self.forward.exact_metadata(self._tables, layout)
        else:
            metadata = self._builder.build(grids, device=self.forward.device, backend=self.forward.backend)
        return self.forward.run(patches, metadata)

    def idle_step(self) -> bool:
        """At most one capture, or one save of what the traffic asks for; whether there was anything to do."""
        return self._capturing is not None and self._capturing.step()

    def close(self) -> None:
        """Keeps what the traffic asked for, where there is a place for it."""
        if self._capturing is not None:
            self._capturing.save()

    @property
    def budgets(self) -> tuple[int, ...]:
        """Those that a batch may be packed for, captured or not."""
        return self._budgets

    @property
    def graph_bytes(self) -> int:
        """Memory of the graphs and their buffers."""
        return 0 if self._capturing is None else self._capturing.used_bytes

    @property
    def cost_table(self) -> CostTable | None:
        """What was measured so far; None without graphs, and before anything was."""
        return None if self._capturing is None else self._capturing.costs.table()

    @property
    def counts(self) -> RunCounts:
        grids = self._builder.images if self._tables is None else self._tables
        return self._tally.counts(grid_hits=grids.hits, grid_misses=grids.misses)


def _why_no_graphs(forward: TowerForward, config: EncoderConfig) -> Reason | None:
    """None where graphs are wanted and can be had."""
    if config.cudagraph_mm_encoder is False:
        return Reason.SWITCHED_OFF
    if forward.device.type != "cuda":
        return Reason.NO_GPU
    if forward.backend is AttentionBackend.SDPA:
        return Reason.ATTENTION
    return None
