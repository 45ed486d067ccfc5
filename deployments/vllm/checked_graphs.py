"""`CheckedGraphs`: vLLM's encoder graphs, compared with the eager forward before their output is used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from encoder.packing.run_counts import Reason
from encoder.start_check import rows_agree

logger = logging.getLogger(__name__)

MAX_GRAPH_DIFFERENCE = 0.5
"""Largest norm of the difference between a row of a graph and of the eager forward, over the eager one's. The error of
bfloat16 alone is 0.01 with random weights and 0.2 with massive activations; rows of another image differ by about 1."""


class Replay(NamedTuple):
    """Output of replayed graphs."""

    outputs: list[Tensor]
    budgets: tuple[int, ...]
    """Token budgets of the graphs: vLLM may split a batch."""


@dataclass(frozen=True, eq=False)
class RecordedGraph:
    """A CUDA graph of a budget in tokens that adds itself to `replayed`."""

    graph: Any
    budget: int
    replayed: list[RecordedGraph]

    def replay(self) -> None:
        self.graph.replay()
        self.replayed.append(self)


class CheckedGraphs:
    """vLLM's encoder graphs. The first replay of each is compared with the eager forward."""

    def __init__(self, manager: Any, eager: Callable[..., Sequence[Tensor]]) -> None:  # noqa: ANN401 - vLLM's
        """`manager`: an EncoderCudaGraphManager. `eager`: the model's `embed_multimodal`."""
        self._manager, self._eager = manager, eager
        self._replayed: list[RecordedGraph] = []
        """Graphs of the last call of `execute`."""
        self._checked: set[tuple[str, RecordedGraph]] = set()
        for graph in self._captured():
            graph.graph = RecordedGraph(graph.graph, graph.token_budget, self._replayed)

    @property
    def max_items(self) -> int:
        """Most items in a batch of one graph."""
        return 0 if self._manager is None else int(self._manager.max_batch_size)

    @property
    def budgets(self) -> tuple[int, ...]:
        """Token budgets, ascending; none once the graphs were refused."""
        return () if self._manager is None else tuple(self._manager.token_budgets)

    def replay(self, modality: str, batch: Mapping[str, object], rows: Sequence[int]) -> Replay | Reason:
        """Returns the output of graphs, or why there is none. `rows`: of each item's embedding."""
        if self._manager is None:
            return Reason.REFUSED
        if modality == "video" or not self._manager.supports_modality(modality):
            return Reason.NOT_CAPTURED
        if max(rows) > self.budgets[-1]:
            return Reason.OVER_LARGEST
        self._replayed.clear()
        outputs: list[Tensor] = self._manager.execute(batch)
        kinds = {(modality, graph) for graph in self._replayed}
        if not kinds <= self._checked:
            if not rows_agree(outputs, self._eager(**batch), MAX_GRAPH_DIFFERENCE) or self._share_memory(outputs):
                logger.error("vLLM's encoder graphs differ from the eager tower for %s, and are switched off", modality)
                self._manager = None
                self._checked.clear()  # what refers to a graph keeps the memory of all
                self._replayed.clear()
                return Reason.REFUSED
            self._checked |= kinds
        return Replay(outputs, tuple(graph.budget for graph in self._replayed))

    def _share_memory(self, outputs: Sequence[Tensor]) -> bool:
        """Whether outputs are views of a graph's buffer, which the next replay overwrites."""
        buffers = {graph.output_buffer.untyped_storage().data_ptr() for graph in self._captured()}
        return any(output.untyped_storage().data_ptr() in buffers for output in outputs)

    def _captured(self) -> list[Any]:
        return [graph for graphs in self._manager.budget_graphs.values() for graph in graphs.values()]
