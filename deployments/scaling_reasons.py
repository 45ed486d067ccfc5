"""What a deployment's autoscaler asks for at this moment and why, in a sentence, from what its replicas report.

The numbers go through the very decisions that the policies make (`scaling_policy.py`, `llm_scaling.py`), without what a
policy remembers of the last minute: that shows in the number Serve was asked for last. What waits at Serve's handles
shows there alone too. It must not know how the numbers were come by.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from pydantic import JsonValue

from deployments.llm_scaling import KV_CACHE_USE, RUNNING_REQUESTS, WAITING_REQUESTS, LLMLoad, LLMScaler, LLMTargets
from deployments.proportion import IngressLoad, with_ingress
from deployments.replica_report import Report
from deployments.scaling_policy import (
    ARRIVING_TOKENS_PER_S,
    BACKLOG_TOKENS,
    TOKENS_PER_IMAGE,
    TOKENS_PER_S,
    ScalingTargets,
    VisualLoad,
    VisualScaler,
)

Settings = Mapping[str, Any]
Targets = TypeVar("Targets", ScalingTargets, LLMTargets)


@dataclass(frozen=True)
class Scaled:
    """One deployment's replicas, as Serve has them and as they report."""

    name: str
    running: int
    asked_for: int
    """By Serve's controller, last."""
    autoscaling: Settings | None
    """Serve's `autoscaling_config`; None for a fixed number."""
    reports: Sequence[Report]

    @property
    def bounds(self) -> tuple[int, int]:
        config = self.autoscaling or {}
        least = int(config.get("min_replicas", 1))
        return least, max(least, int(config.get("max_replicas", least)))

    def total(self, name: str) -> float:
        return sum(_numbers(self.reports, name))


@dataclass(frozen=True)
class Wish:
    policy: str
    """Its name, as it is in the configuration."""
    needed: int | None
    """Replicas, by this moment alone; None where this cannot be told."""
    why: str


FIXED = "fixed"
REQUESTS = "requests"


def wish_of(scaled: Scaled, *, application_policy: Settings | None, ingress: IngressLoad, now_s: float = 0.0) -> Wish:
    """`application_policy`: the application's `autoscaling_policy`, which stands above the deployment's; or None."""
    if scaled.autoscaling is None:
        return Wish(FIXED, scaled.asked_for, f"num_replicas is {scaled.asked_for}")
    if application_policy and _policy_name(application_policy) == "Proportion":
        return _proportion(scaled, application_policy.get("policy_kwargs") or {}, ingress, now_s)
    policy = scaled.autoscaling.get("policy") or {}
    name, kwargs = _policy_name(policy), policy.get("policy_kwargs") or {}
    if name == "VisualWork":
        return _visual(name, scaled, _targets(ScalingTargets, kwargs), IngressLoad(), now_s)
    if name == "EngineWork":
        return _engine(name, scaled, _targets(LLMTargets, kwargs), IngressLoad(), now_s)
    target = scaled.autoscaling.get("target_ongoing_requests")
    return Wish(REQUESTS, None, f"a replica for every {_number(target)} requests under way")


def _proportion(scaled: Scaled, kwargs: Settings, ingress: IngressLoad, now_s: float) -> Wish:
    shared = f"; {_number(kwargs['gpus'])} GPUs are shared" if kwargs.get("gpus") else ""
    if scaled.name == "Encoder":
        wish = _visual("Proportion", scaled, _targets(ScalingTargets, kwargs.get("encoder") or {}), ingress, now_s)
    elif scaled.name == "LLM":
        wish = _engine("Proportion", scaled, _targets(LLMTargets, kwargs.get("llm") or {}), ingress, now_s)
    else:
        return Wish("Proportion", None, "by requests")
    return dataclasses.replace(wish, why=wish.why + shared)


def _visual(policy: str, scaled: Scaled, targets: ScalingTargets, ingress: IngressLoad, now_s: float) -> Wish:
    speed = _mean_of_measured(scaled.reports, TOKENS_PER_S)
    load = VisualLoad(
        now_s=now_s,
        running=scaled.running,
        asked_for=scaled.asked_for,
        backlog_tokens=scaled.total(BACKLOG_TOKENS),
        waiting_images=0.0,
        arriving_tokens_per_s=scaled.total(ARRIVING_TOKENS_PER_S),
        tokens_per_s=speed,
        tokens_per_image=_mean_of_measured(scaled.reports, TOKENS_PER_IMAGE),
    )
    load, _ = with_ingress(load, LLMLoad(now_s, 0, 0, 0.0, 0.0, 0.0, 0.0), ingress)
    least, most = scaled.bounds
    needed = VisualScaler(targets).needed(load, least=least, most=most)
    waiting = load.backlog_tokens + load.waiting_tokens
    told = (
        f"{_number(waiting)} visual tokens wait (to be cleared in {_number(targets.target_encode_delay_s)} s), "
        f"{_number(load.arriving_tokens_per_s)}/s arrive, "
    )
    told += f"a replica does {_number(speed)}/s" if speed else "no speed has been measured yet"
    return Wish(policy, needed, told)


def _engine(policy: str, scaled: Scaled, targets: LLMTargets, ingress: IngressLoad, now_s: float) -> Wish:
    load = LLMLoad(
        now_s=now_s,
        running=scaled.running,
        asked_for=scaled.asked_for,
        running_requests=scaled.total(RUNNING_REQUESTS),
        waiting_requests=scaled.total(WAITING_REQUESTS),
        coming_requests=ingress.unaccepted_requests,
        kv_cache_use=scaled.total(KV_CACHE_USE),
    )
    least, most = scaled.bounds
    needed = LLMScaler(targets).needed(load, least=least, most=most)
    told = (
        f"{_number(load.running_requests)} requests run, {_number(load.waiting_requests + load.coming_requests)} wait "
        f"({_number(targets.target_requests)} a replica), KV cache {load.kv_cache_use:.0%} of one "
        f"({targets.kv_cache_share:.0%} a replica)"
    )
    return Wish(policy, needed, told)


def _targets(kind: type[Targets], kwargs: Settings) -> Targets:
    """Of what a policy was given, the fields that are its targets."""
    return kind(**{field.name: kwargs[field.name] for field in fields(kind) if field.name in kwargs})


def _policy_name(policy: Settings) -> str:
    """`deployments.scaling:VisualWork`, or with a dot, as `VisualWork`."""
    return str(policy.get("policy_function") or "").replace(":", ".").rpartition(".")[2]


def _numbers(reports: Sequence[Report], name: str) -> list[float]:
    return [float(value) for report in reports if isinstance(value := report.get(name), int | float)]


def _mean_of_measured(reports: Sequence[Report], name: str) -> float | None:
    """A replica reports 0 until it has measured."""
    measured = [value for value in _numbers(reports, name) if value > 0]
    return sum(measured) / len(measured) if measured else None


def _number(value: JsonValue | float) -> str:
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:g}"
