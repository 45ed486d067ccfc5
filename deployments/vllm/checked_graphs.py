"""`CheckedGraphs`: vLLM's encoder graphs, compared with the eager forward before their output is used."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from encoder.packing.run_counts import Reason
from encoder.start_check import rows_agree

logger = logging.getLogger(__name__)

MAX_GRAPH_DIFFERENCE = 0.5
"""Largest norm of the difference between a row of a graph and of the eager forward, over the eager one's. The error of
bfloat16 alone is 0.01 with random weights and 0.2 with massive activations; rows of another image differ by about 1."""


class CheckedGraphs:
    """vLLM's encoder graphs. The first batch of each budget is compared with the eager forward."""

    def __init__(self, manager: Any, eager: Callable[..., Sequence[Tensor]]) -> None:  # noqa: ANN401 - vLLM's
        """`manager`: an EncoderCudaGraphManager. `eager`: the model's `embed_multimodal`."""
        self._manager, self._eager = manager, eager
        self._checked: set[tuple[str, int]] = set()

    @property
    def budgets(self) -> tuple[int, ...]:
        """Token budgets, ascending; none once the graphs were refused."""
        return () if self._manager is None else tuple(self._manager.token_budgets)

    def replay(self, modality: str, batch: Mapping[str, object], rows: Sequence[int]) -> list[Tensor] | Reason:
        """Returns the output of graphs, or why there is none. `rows`: of each item's embedding."""
        if self._manager is None:
            return Reason.REFUSED
        if modality == "video" or not self._manager.supports_modality(modality):
            return Reason.NOT_CAPTURED
        budgets = self.budgets
        if max(rows) > budgets[-1]:
            return Reason.OVER_LARGEST
        replayed: list[Tensor] = self._manager.execute(batch)
        # vLLM splits what is over its largest budget, which counts as another one.
        kind = modality, bisect_left(budgets, sum(rows))
        if kind not in self._checked:
            if not rows_agree(replayed, self._eager(**batch), MAX_GRAPH_DIFFERENCE) or self._share_memory(replayed):
                logger.error("vLLM's encoder graphs differ from the eager tower for %s, and are switched off", modality)
                self._manager = None
                return Reason.REFUSED
            self._checked.add(kind)
        return replayed

    def _share_memory(self, outputs: Sequence[Tensor]) -> bool:
        """Whether outputs are views of a graph's buffer, which the next replay overwrites."""
        graphs = [graph for each in self._manager.budget_graphs.values() for graph in each.values()]
        buffers = {graph.output_buffer.untyped_storage().data_ptr() for graph in graphs}
        return any(output.untyped_storage().data_ptr() in buffers for output in outputs)
