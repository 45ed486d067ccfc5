"""The answer of `GET /cluster`: replicas, queues, packing, and the number of replicas that the autoscaler targets.

One ingress replica computes it at most once per second, however many browsers poll it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from pydantic import JsonValue
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.common import names
from deployments.common.ray_private import serve_details
from deployments.common.replica_status import REPLICA, Report
from deployments.ingress.admission import Admission

logger = logging.getLogger("ray.serve")

MAX_AGE_S = 1.0
"""Maximum age of an answer."""
REPORT_TIMEOUT_S = 2.0
"""Timeout of the replicas' reports, and of Serve's controller."""
MAX_MESSAGE_CHARACTERS = 300

Details = Mapping[str, Any]
"""Serve's `ApplicationDetails` (`ray.serve.schema`), as JSON."""


class ClusterView:
    """Cached view of the cluster. Each ingress replica has one and uses it on its event loop."""

    def __init__(
        self,
        encoder: DeploymentHandle[Any] | None,
        llm: DeploymentHandle[Any],
        admission: Admission,
        *,
        details: Callable[[], Details | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`encoder`: None if there are no encoders. `details` may block; by default it asks Serve's controller."""
        self._handles = {names.ENCODER: encoder, names.LLM: llm}
        self._admission = admission
        self._details = details or application_details
        self._clock = clock
        self._lock = asyncio.Lock()
        self._view: dict[str, JsonValue] = {}
        self._last_details: Details = {}
        self._built_at = float("-inf")

    async def get(self) -> dict[str, JsonValue]:
        """Returns the view, at most MAX_AGE_S old."""
        async with self._lock:
            if self._clock() - self._built_at >= MAX_AGE_S:
                self._view = await self._build()
                self._built_at = self._clock()
            return self._view

    async def _build(self) -> dict[str, JsonValue]:
        details, encoders, llms = await asyncio.gather(
            asyncio.to_thread(self._details), self._reports(names.ENCODER), self._reports(names.LLM)
        )
        if details is not None:  # the controller may be slow, or its node lost: what it said last is shown
            self._last_details = details
        return view(self._last_details, {names.ENCODER: encoders, names.LLM: llms}, self._admission)

    async def _reports(self, deployment: str) -> list[Report]:
        """Returns the reports of the replicas that answer within REPORT_TIMEOUT_S; empty if no replica is running."""
        if (handle := self._handles[deployment]) is None:
            return []
        try:
            response = handle.broadcast("report")
            answers = await response.results_async(timeout_s=REPORT_TIMEOUT_S, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError):
            logger.debug("%s: no reports", deployment, exc_info=True)
            return []
        return [answer for answer in answers if isinstance(answer, dict)]


def application_details() -> Details | None:
    """Returns this application's details from Serve's controller, None outside of Serve or if the controller does not
    answer within REPORT_TIMEOUT_S. Blocks."""
    try:
        name = serve.get_replica_context().app_name
        details = serve_details(REPORT_TIMEOUT_S)
    except (RayServeException, RayError):
        return None
    return None if details is None else details["applications"].get(name)


def view(details: Details, reports: Mapping[str, Sequence[Report]], admission: Admission) -> dict[str, JsonValue]:
    """Returns the view as JSON values. `admission` is that of the ingress replica that answers."""
    known = details.get("deployments") or {}
    return {
        "deployments": [
            _deployment(name, known[name], reports.get(name, ())) for name in names.DEPLOYMENTS if name in known
        ],
        "queue": {
            "unaccepted_requests": admission.requests,
            "line_tokens": admission.tokens_queued,
            "in_flight_tokens": admission.tokens_in_flight,
            "encoder_tokens": _total(reports.get(names.ENCODER, ()), "backlog_tokens"),
        },
        "packing": _packing(reports.get(names.ENCODER, ())),
    }


def _deployment(name: str, found: Details, reports: Sequence[Report]) -> dict[str, JsonValue]:
    config = found.get("deployment_config") or {}
    replicas = found.get("replicas") or ()
    running = sum(replica["state"] == "RUNNING" for replica in replicas)
    autoscaling = config.get("autoscaling_config")
    target = int(found["target_num_replicas"])
    min_replicas = int(autoscaling.get("min_replicas", 1)) if autoscaling else target
    max_replicas = max(min_replicas, int(autoscaling.get("max_replicas", min_replicas))) if autoscaling else target
    by_name = {report[REPLICA]: report for report in reports}
    return {
        "name": name,
        "status": found["status"],
        "message": _first_line(found.get("message")),
        "running": running,
        "target": target,
        "min_replicas": min_replicas,
        "max_replicas": max_replicas,
        "autoscaling": bool(autoscaling),
        "replicas": [
            {
                "name": replica["replica_id"],
                "state": replica["state"],
                "node": str(replica.get("node_id") or "")[:8],
                "report": by_name.get(replica["replica_id"]),
            }
            for replica in replicas
        ],
    }


def _packing(reports: Sequence[Report]) -> JsonValue:
    """Sums batches since the replicas started. `efficiency` is the share of computed tokens that are not padding."""
    tokens, padding = _total(reports, "encoded_tokens"), _total(reports, "padding_tokens")
    eager_runs: Counter[str] = Counter()
    for report in reports:
        eager_runs.update(cast("dict[str, int]", report.get("eager_runs") or {}))
    return {
        "efficiency": tokens / (tokens + padding) if tokens else None,
        "encoded_tokens": tokens,
        "padding_tokens": padding,
        "replays": _total(reports, "replays"),
        "eager_runs": dict(eager_runs),
    }


def _total(reports: Sequence[Report], name: str) -> float:
    return sum(value for report in reports if isinstance(value := report.get(name), int | float))


def _first_line(message: object) -> str:
    return str(message or "").strip().partition("\n")[0][:MAX_MESSAGE_CHARACTERS]
