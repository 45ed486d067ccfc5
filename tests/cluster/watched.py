"""The application's ingress, watched by tests. As light as that itself: it loads nothing that encodes or generates."""

from __future__ import annotations

import sys
from typing import Any

from ray.serve.handle import DeploymentHandle

from configs.schema import AppConfig
from deployments.common.ray_private import serve_host
from deployments.ingress.deployment import Ingress
from deployments.routing import replica_router, serve_router
from deployments.telemetry.metrics import Counter, Counters

PATIENT_PROBE_S = 5.0
"""Time in which a replica of a busy host answers a probe, so that tests of routing see no late ones."""
PATIENT_ACCEPT_S = 30.0
"""Likewise, in which it accepts a call, so that tests that count calls see none that is made again."""


class RecordedCounts(Counters):
    """Counts as ever, and remembers: Ray exports a metric some time after it was counted."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded = {count.name: 0 for count in Counter}

    def add(self, counter: Counter, number: int = 1, **labels: str) -> None:
        super().add(counter, number, **labels)
        self.recorded[counter.name] += number


class WatchedIngress(Ingress):
    """Remembers what it counted."""

    patient = True

    def __init__(
        self,
        config: AppConfig,
        llm: DeploymentHandle[Any],
        encoder: DeploymentHandle[Any],
        store: DeploymentHandle[Any] | None = None,
    ) -> None:
        serve_router.PROBE_TIMEOUT_S = PATIENT_PROBE_S
        if self.patient:
            replica_router.ACCEPT_S = PATIENT_ACCEPT_S
        super().__init__(config, llm, encoder, store)
        recorded = RecordedCounts()
        self._replicas.counts = self._replicas.failures._counts = recorded

    def listens_on(self) -> str | None:
        return serve_host()

    def in_flight(self) -> tuple[int, int, int]:
        """Requests, and visual tokens in flight and queued."""
        return self._admission.requests, self._admission.tokens_in_flight, self._admission.tokens_queued

    def modules(self) -> list[str]:
        """What is imported in its process."""
        return list(sys.modules)

    def counts(self) -> dict[str, int]:
        counts = self._replicas.counts
        assert isinstance(counts, RecordedCounts)
        return counts.recorded


class ImpatientIngress(WatchedIngress):
    """Gives up calls to silent replicas as the application does."""

    patient = False
