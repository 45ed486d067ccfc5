"""The cluster as the page shows it: replicas, what waits, how full the graphs are, what the autoscaler asks for.

Asked for by any number of browsers, it is made once a second at most, by one of them. It must not know how it is shown.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

from pydantic import JsonValue
from ray import serve
from ray.exceptions import RayError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from deployments.proportion import IngressLoad
from deployments.replica_report import REPLICA, Report
from deployments.scaling_reasons import Scaled, wish_of

logger = logging.getLogger("ray.serve")

FRESH_S = 1.0
"""How old an answer may be."""
PATIENCE_S = 2.0
"""With a replica that does not answer."""
MAX_MESSAGE_CHARACTERS = 300

DEPLOYMENTS = ("Ingress", "Encoder", "LLM")
Details = Mapping[str, Any]
"""Serve's `ApplicationDetails` (`ray.serve.schema`), as JSON."""


class Broadcasting(Protocol):
    """What is used of a DeploymentHandle."""

    def broadcast(self, method_name: str) -> Any: ...  # noqa: ANN401 - Serve's own is not typed


class ClusterView:
    """One for each ingress replica, used on its event loop."""

    def __init__(
        self,
        encoder: Broadcasting,
        llm: Broadcasting,
        load: Callable[[], IngressLoad],
        *,
        details: Callable[[], Details | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`load`: what this ingress replica has under way. `details`: blocks; by default asks Serve's controller."""
        self._handles = {"Encoder": encoder, "LLM": llm}
        self._load = load
        self._details = details or application_details
        self._clock = clock
        self._lock = asyncio.Lock()
        self._made: dict[str, JsonValue] = {}
        self._made_at = float("-inf")

    async def now(self) -> dict[str, JsonValue]:
        """The view, at most FRESH_S old."""
        async with self._lock:
            if self._clock() - self._made_at >= FRESH_S:
                self._made = await self._make()
                self._made_at = self._clock()
            return self._made

    async def _make(self) -> dict[str, JsonValue]:
        details, encoders, llms = await asyncio.gather(
            asyncio.to_thread(self._details), self._reports("Encoder"), self._reports("LLM")
        )
        return view(details or {}, {"Encoder": encoders, "LLM": llms}, self._load())

    async def _reports(self, deployment: str) -> list[Report]:
        """Of the replicas that answer in time; none where none is up."""
        try:
            response = self._handles[deployment].broadcast("report")
            answers = await response.results_async(timeout_s=PATIENCE_S, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError):
            logger.debug("%s: no reports", deployment, exc_info=True)
            return []
        return [answer for answer in answers if isinstance(answer, dict)]


def application_details() -> Details | None:
    """What Serve's controller tells of this application; None outside of Serve. Blocks."""
    try:
        name = serve.get_replica_context().app_name
        client = _get_global_client(raise_if_no_controller_running=False)
        found = None if client is None else client.get_serve_details()["applications"].get(name)
    except (RayServeException, RayError):
        return None
    return found


def view(details: Details, reports: Mapping[str, Sequence[Report]], ingress: IngressLoad) -> dict[str, JsonValue]:
    """All of it, as JSON values. `ingress`: of the replica that tells."""
    known = details.get("deployments") or {}
    policy = (details.get("deployed_app_config") or {}).get("autoscaling_policy")
    return {
        "deployments": [
            _deployment(name, known[name], reports.get(name, ()), policy, ingress)
            for name in DEPLOYMENTS
            if name in known
        ],
        "queue": {
            "unaccepted_requests": ingress.unaccepted_requests,
            "line_tokens": ingress.line_tokens,
            "in_flight_tokens": ingress.in_flight_tokens,
            "encoder_tokens": _total(reports.get("Encoder", ()), "backlog_tokens"),
        },
        "packing": _packing(reports.get("Encoder", ())),
    }


def _deployment(
    name: str, found: Details, reports: Sequence[Report], policy: Details | None, ingress: IngressLoad
) -> dict[str, JsonValue]:
    config = found.get("deployment_config") or {}
    replicas = found.get("replicas") or ()
    running = sum(replica["state"] == "RUNNING" for replica in replicas)
    least_to_most = config.get("autoscaling_config")
    scaled = Scaled(name, running, int(found["target_num_replicas"]), least_to_most, reports)
    wish = wish_of(scaled, application_policy=policy, ingress=ingress)
    by_name = {report[REPLICA]: report for report in reports}
    least, most = scaled.bounds if least_to_most else (scaled.asked_for, scaled.asked_for)
    return {
        "name": name,
        "status": _word(found["status"]),
        "message": _first_line(found.get("message")),
        "running": running,
        "asked_for": scaled.asked_for,
        "least": least,
        "most": most,
        "policy": wish.policy,
        "needed": wish.needed,
        "why": wish.why,
        "replicas": [
            {
                "name": replica["replica_id"],
                "state": _word(replica["state"]),
                "node": str(replica.get("node_id") or "")[:8],
                "report": by_name.get(replica["replica_id"]),
            }
            for replica in replicas
        ],
    }


def _packing(reports: Sequence[Report]) -> JsonValue:
    """Of all batches since the replicas' start: the share of computed tokens that are not padding."""
    tokens, padding = _total(reports, "encoded_tokens"), _total(reports, "padding_tokens")
    reasons: dict[str, JsonValue] = {}
    for report in reports:
        runs = report.get("eager_runs")
        for reason, number in runs.items() if isinstance(runs, dict) else ():
            reasons[reason] = _whole(reasons.get(reason)) + _whole(number)
    return {
        "efficiency": tokens / (tokens + padding) if tokens else None,
        "encoded_tokens": tokens,
        "padding_tokens": padding,
        "replays": _total(reports, "replays"),
        "eager_runs": reasons,
    }


def _total(reports: Sequence[Report], name: str) -> float:
    return sum(value for report in reports if isinstance(value := report.get(name), int | float))


def _whole(value: JsonValue) -> int:
    return int(value) if isinstance(value, int | float) else 0


def _word(state: object) -> str:
    return str(state.value if isinstance(state, Enum) else state)


def _first_line(message: object) -> str:
    return str(message or "").strip().partition("\n")[0][:MAX_MESSAGE_CHARACTERS]
