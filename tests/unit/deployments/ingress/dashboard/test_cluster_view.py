"""The view of the cluster: put together from Serve's word and the replicas', and made once for all who ask at once."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest
from ray.serve._private.common import DeploymentStatus, ReplicaState
from ray.serve.exceptions import DeploymentUnavailableError

from configs.schema import IngressConfig
from deployments.common.replica_status import encoder_report, llm_report
from deployments.ingress.admission import Admission
from deployments.ingress.dashboard.cluster_view import ClusterView, view
from deployments.scaling import encoder_scaler
from deployments.scaling.llm_scaler import KV_CACHE_USE, RUNNING_REQUESTS, WAITING_REQUESTS
from deployments.telemetry.metrics import AdmissionMetrics
from encoder.packing.run_counts import Fallback, RunCounts

QUIET = Admission(IngressConfig(), AdmissionMetrics())
STATS = {
    encoder_scaler.BACKLOG_TOKENS: 9000.0,
    encoder_scaler.ARRIVING_TOKENS_PER_S: 1000.0,
    encoder_scaler.TOKENS_PER_S: 2000.0,
    encoder_scaler.TOKENS_PER_IMAGE: 100.0,
    encoder_scaler.CACHE_BYTES: 5e6,
}
RUNS = RunCounts(
    replays=3, eager_runs={"over_largest_budget": 2}, tokens=900, replayed_tokens=800, padding_tokens=100,
    fusion_fallback=Fallback.KERNELS,
)  # fmt: skip
ENGINE = {RUNNING_REQUESTS: 10.0, WAITING_REQUESTS: 6.0, KV_CACHE_USE: 0.25}


def deployment(name: str, *replicas: str, autoscaling: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "name": name,
        "status": DeploymentStatus.HEALTHY,
        "message": "",
        "target_num_replicas": len(replicas),
        "deployment_config": {} if autoscaling is None else {"autoscaling_config": autoscaling},
        "replicas": [{"replica_id": each, "state": ReplicaState.RUNNING, "node_id": "0123456789"} for each in replicas],
    }


def test_all_of_it_is_json() -> None:
    details = {"deployments": {"Encoder": deployment("Encoder", "a", "b"), "LLM": deployment("LLM", "l"), "Other": {}}}
    reports = {"Encoder": [encoder_report("a", STATS, RUNS, cached=7)], "LLM": [llm_report("l", ENGINE)]}
    admission = Admission(IngressConfig(), AdmissionMetrics())
    admission.tokens_queued, admission.tokens_in_flight, admission.requests = 5, 4, 3
    made = json.loads(json.dumps(view(details, reports, admission)))
    encoder, llm = made["deployments"]
    assert (encoder["name"], encoder["running"], encoder["target"], encoder["autoscaling"]) == ("Encoder", 2, 2, False)
    assert [replica["name"] for replica in encoder["replicas"]] == ["a", "b"]
    assert encoder["replicas"][0]["report"]["cached_images"] == 7
    assert encoder["replicas"][0]["report"]["fusion_fallback"] == "kernels_failed"
    assert encoder["replicas"][1]["report"] is None, "one that has not answered is shown all the same"
    assert (encoder["status"], encoder["replicas"][0]["state"]) == ("HEALTHY", "RUNNING")
    assert llm["replicas"][0]["report"]["engine_running_requests"] == 10
    assert made["queue"] == {
        "unaccepted_requests": 3,
        "line_tokens": 5,
        "in_flight_tokens": 4,
        "encoder_tokens": 9000,
    }
    assert made["packing"]["efficiency"] == pytest.approx(0.9)
    assert made["packing"]["eager_runs"] == {"over_largest_budget": 2}


def test_nothing_is_known_outside_of_serve() -> None:
    made = view({}, {}, QUIET)
    assert made["deployments"] == []
    assert made["packing"]["efficiency"] is None  # type: ignore[index,call-overload]


def test_a_message_is_cut_to_a_line() -> None:
    found = deployment("LLM", "l") | {"status": "UNHEALTHY", "message": "it died\nTraceback: /home/somebody"}
    (shown,) = cast(list[dict[str, Any]], view({"deployments": {"LLM": found}}, {}, QUIET)["deployments"])
    assert shown["message"] == "it died"


def test_bounds_of_the_autoscaler_stand_beside_its_target() -> None:
    found = deployment("Encoder", "a", autoscaling={"min_replicas": 0, "max_replicas": 8})
    (shown,) = cast(list[dict[str, Any]], view({"deployments": {"Encoder": found}}, {}, QUIET)["deployments"])
    assert {name: shown[name] for name in ("autoscaling", "target", "min_replicas", "max_replicas")} == {
        "autoscaling": True,
        "target": 1,
        "min_replicas": 0,
        "max_replicas": 8,
    }


class Handle:
    """Answers as a broadcast does; `answers` may be an exception."""

    def __init__(self, *answers: object) -> None:
        self.answers = answers
        self.calls = 0

    def broadcast(self, method_name: str) -> Handle:
        assert method_name == "report"
        self.calls += 1
        return self

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[object]:
        assert timeout_s > 0
        assert return_exceptions
        await asyncio.sleep(0)
        for answer in self.answers:
            if isinstance(answer, DeploymentUnavailableError | TimeoutError):
                raise answer
        return list(self.answers)


def test_many_who_ask_at_once_cost_one_question() -> None:
    encoder, llm = Handle(encoder_report("a", STATS, RUNS, cached=0), RuntimeError("gone")), Handle(TimeoutError())
    time_s = [100.0]
    asked: list[int] = []

    def details() -> dict[str, Any]:
        asked.append(1)
        return {"deployments": {"Encoder": deployment("Encoder", "a")}}

    async def scenario() -> None:
        cluster = ClusterView(cast(Any, encoder), cast(Any, llm), QUIET, details=details, clock=lambda: time_s[0])
        views = await asyncio.gather(*(cluster.get() for _ in range(20)))
        assert len({id(each) for each in views}) == 1
        assert (encoder.calls, llm.calls, len(asked)) == (1, 1, 1)
        time_s[0] += 0.9
        assert await cluster.get() is views[0]
        time_s[0] += 0.2
        assert await cluster.get() is not views[0]
        assert (encoder.calls, llm.calls, len(asked)) == (2, 2, 2)

    asyncio.run(scenario())


def test_no_replica_is_up() -> None:
    none = Handle(DeploymentUnavailableError("Encoder"))  # type: ignore[arg-type]

    async def scenario() -> None:
        cluster = ClusterView(cast(Any, none), cast(Any, none), QUIET, details=lambda: None)
        assert (await cluster.get())["deployments"] == []

    asyncio.run(scenario())
