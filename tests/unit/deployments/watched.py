"""The application's ingress, watched by tests. As light as that itself: it loads nothing that encodes or generates."""

from __future__ import annotations

import sys
from typing import Any

from ray.serve.handle import DeploymentHandle

from configs.schema import AppConfig
from deployments.ingress import Ingress
from deployments.listening import serve_host
from deployments.metrics import Count, Counts, Tier
from deployments.wire import EncodedImage


class RecordedCounts(Counts):
    """Counts as ever, and remembers: Ray exports a metric some time after it was counted."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded = {count.name: 0 for count in Count}

    def add(self, count: Count, number: int = 1, *, reason: str | None = None, tier: Tier | None = None) -> None:
        super().add(count, number, reason=reason, tier=tier)
        self.recorded[count.name] += number


def _embedding_came_by(*_: object) -> None:
    raise AssertionError("an embedding was unpacked in the ingress")


class WatchedIngress(Ingress):
    """Cannot hold an embedding: the process fails to unpickle one."""

    def __init__(self, config: AppConfig, encoder: DeploymentHandle[Any], llm: DeploymentHandle[Any]) -> None:
        EncodedImage.__setstate__ = _embedding_came_by  # type: ignore[attr-defined]
        super().__init__(config, encoder, llm)
        recorded = RecordedCounts()
        self._replicas._counts = self._replicas.failures._counts = recorded
        if self._replicas._hedging is not None:
            self._replicas._hedging._counts = recorded

    def listens_on(self) -> str | None:
        return serve_host()

    def modules(self) -> list[str]:
        """What is imported in its process."""
        return list(sys.modules)

    def counts(self) -> dict[str, int]:
        counts = self._replicas._counts
        assert isinstance(counts, RecordedCounts)
        return counts.recorded
