"""The view of the cluster: put together from Serve's word and the replicas', and made once for all who ask at once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from ray.serve.exceptions import DeploymentUnavailableError

from deployments import scaling, scaling_policy
from deployments.cluster_view import ClusterView, view
from deployments.llm_scaling import KV_CACHE_USE, RUNNING_REQUESTS, WAITING_REQUESTS
from deployments.proportion import IngressLoad
from deployments.replica_report import encoder_report, llm_report
from deployments.scaling_reasons import Scaled, wish_of
from encoder.run_counts import RunCounts

QUIET = IngressLoad()
STATS = {
    scaling_policy.BACKLOG_TOKENS: 9000.0,
    scaling_policy.ARRIVING_TOKENS_PER_S: 1000.0,
    scaling_policy.TOKENS_PER_S: 2000.0,
    scaling_policy.TOKENS_PER_IMAGE: 100.0,
    scaling_policy.CACHE_BYTES: 5e6,
}
RUNS = RunCounts(replays=3, eager_runs={"over_largest_budget": 2}, tokens=900, replayed_tokens=800, padding_tokens=100)
ENGINE = {RUNNING_REQUESTS: 10.0, WAITING_REQUESTS: 6.0, KV_CACHE_USE: 0.25}


def deployment(name: str, *replicas: str, autoscaling: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "name": name,
        "status": "HEALTHY",
        "message": "",
        "target_num_replicas": len(replicas),
        "deployment_config": {} if autoscaling is None else {"autoscaling_config": autoscaling},
        "replicas": [{"replica_id": each, "state": "RUNNING", "node_id": "0123456789"} for each in replicas],
    }


def policy(kind: type, **kwargs: object) -> dict[str, Any]:
    """As Serve gives it back."""
    return {"policy_function": f"{kind.__module__}:{kind.__name__}", "policy_kwargs": kwargs}


def scaled(name: str, **config: Any) -> Scaled:
    reports = [encoder_report("e", STATS, RUNS, cached=0)] if name == "Encoder" else [llm_report("l", ENGINE)]
    autoscaling = {"min_replicas": 1, "max_replicas": 8, "target_ongoing_requests": 64, **config}
    return Scaled(name, running=4, asked_for=4, autoscaling=autoscaling, reports=reports)


def test_all_of_it_is_json() -> None:
    details = {"deployments": {"Encoder": deployment("Encoder", "a", "b"), "LLM": deployment("LLM", "l"), "Other": {}}}
    reports = {"Encoder": [encoder_report("a", STATS, RUNS, cached=7)], "LLM": [llm_report("l", ENGINE)]}
    made = json.loads(json.dumps(view(details, reports, IngressLoad(5.0, 4.0, 3.0))))
    encoder, llm = made["deployments"]
    assert (encoder["name"], encoder["running"], encoder["asked_for"], encoder["policy"]) == ("Encoder", 2, 2, "fixed")
    assert [replica["name"] for replica in encoder["replicas"]] == ["a", "b"]
    assert encoder["replicas"][0]["report"]["cached_images"] == 7
    assert encoder["replicas"][1]["report"] is None, "one that has not answered is shown all the same"
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
    (shown,) = view({"deployments": {"LLM": found}}, {}, QUIET)["deployments"]  # type: ignore[misc,union-attr]
    assert shown["message"] == "it died"  # type: ignore[index,call-overload]


def test_visual_work_says_what_it_goes_by() -> None:
    wish = wish_of(scaled("Encoder", policy=policy(scaling.VisualWork)), application_policy=None, ingress=QUIET)
    # 1000/s at half of the time, 9000 within a second: 11,000/s by replicas of 2000/s
    assert (wish.policy, wish.needed) == ("VisualWork", 6)
    assert "9,000 visual tokens wait" in wish.why
    assert "a replica does 2,000/s" in wish.why


def test_a_policys_own_settings_count() -> None:
    slower = policy(scaling.VisualWork, target_encode_delay_s=9.0)
    wish = wish_of(scaled("Encoder", policy=slower), application_policy=None, ingress=QUIET)
    assert wish.needed == 2  # 1000/s at half of the time and 9000 within nine seconds


def test_engine_work_says_what_it_goes_by() -> None:
    few = policy(scaling.EngineWork, target_requests=4)
    wish = wish_of(scaled("LLM", policy=few), application_policy=None, ingress=QUIET)
    assert (wish.policy, wish.needed) == ("EngineWork", 4)
    assert "10 requests run, 6 wait" in wish.why


def test_the_applications_policy_stands_above_a_deployments() -> None:
    both = policy(scaling.Proportion, gpus=8, encoder={"target_encode_delay_s": 9.0})
    wish = wish_of(
        scaled("Encoder", policy=policy(scaling.VisualWork)),
        application_policy=both,
        ingress=IngressLoad(line_tokens=9000.0, in_flight_tokens=9000.0),
    )
    assert (wish.policy, wish.needed) == ("Proportion", 2)
    assert "18,000 visual tokens wait" in wish.why, "those in line at the ingress too"
    assert "8 GPUs are shared" in wish.why
    llm = wish_of(scaled("LLM"), application_policy=both, ingress=QUIET)
    assert (llm.policy, llm.needed) == ("Proportion", 1)


def test_serves_own_rule_and_a_fixed_number() -> None:
    wish = wish_of(scaled("Encoder"), application_policy=None, ingress=QUIET)
    assert (wish.policy, wish.needed) == ("requests", None)
    assert "every 64 requests" in wish.why
    fixed = wish_of(Scaled("LLM", 2, 2, None, []), application_policy=None, ingress=QUIET)
    assert (fixed.policy, fixed.needed) == ("fixed", 2)


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
        cluster = ClusterView(encoder, llm, lambda: QUIET, details=details, clock=lambda: time_s[0])
        views = await asyncio.gather(*(cluster.now() for _ in range(20)))
        assert len({id(each) for each in views}) == 1
        assert (encoder.calls, llm.calls, len(asked)) == (1, 1, 1)
        time_s[0] += 0.9
        assert await cluster.now() is views[0]
        time_s[0] += 0.2
        assert await cluster.now() is not views[0]
        assert (encoder.calls, llm.calls, len(asked)) == (2, 2, 2)

    asyncio.run(scenario())


def test_no_replica_is_up() -> None:
    none = Handle(DeploymentUnavailableError("Encoder"))  # type: ignore[arg-type]

    async def scenario() -> None:
        cluster = ClusterView(none, none, lambda: QUIET, details=lambda: None)
        assert (await cluster.now())["deployments"] == []

    asyncio.run(scenario())
