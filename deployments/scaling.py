"""Serve's autoscaling policies: replicas by what there is to do instead of by requests.

For one deployment, below its `autoscaling_config`, `VisualWork` for the encoders and `EngineWork` for language models:

    policy: {policy_function: "deployments.scaling:VisualWork", policy_kwargs: {target_encode_delay_s: 1.0}}

Or for both together, beside the application's `import_path`; it sees the line at the ingress too:

    autoscaling_policy: {policy_function: "deployments.scaling:Proportion", policy_kwargs: {gpus: 8}}

Serve makes one policy a deployment or application, with `policy_kwargs`, and calls it many times a second in its
controller. It gets the class as bytes, together with the modules of the decisions: the controller need not have this
code. This module must not decide anything; `scaling_policy.py`, `llm_scaling.py` and `proportion.py` do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import TYPE_CHECKING

from ray import cloudpickle

from deployments import busy_share as learnt_share
from deployments import llm_scaling, proportion, scaling_hold, scaling_policy
from deployments.llm_scaling import KV_CACHE_USE, RUNNING_REQUESTS, WAITING_REQUESTS, LLMLoad, LLMScaler, LLMTargets
from deployments.proportion import (
    IN_FLIGHT_TOKENS,
    LINE_TOKENS,
    UNACCEPTED_REQUESTS,
    Bounds,
    IngressLoad,
    Pool,
    ProportionScaler,
)
from deployments.scaling_policy import (
    ARRIVING_TOKENS_PER_S,
    BACKLOG_TOKENS,
    GIVEN_TOKENS,
    TOKENS_PER_IMAGE,
    TOKENS_PER_S,
    ScalingTargets,
    VisualLoad,
    VisualScaler,
)

if TYPE_CHECKING:
    from ray.serve._private.common import DeploymentID
    from ray.serve.config import AutoscalingContext

# Serve does as much for the module that it was told, and for no other: where the code came to the cluster as a
# `working_dir`, its controller cannot import it.
for _module in (learnt_share, scaling_hold, scaling_policy, llm_scaling, proportion):
    cloudpickle.register_pickle_by_value(_module)

# As deployments/app.py names them.
ENCODER = "Encoder"
LLM = "LLM"
INGRESS = "Ingress"


class VisualWork:
    """`policy_function` of the deployment `Encoder`. Its arguments are the fields of ScalingTargets.

    The number goes on through Serve's own delays and factors: `upscale_delay_s` and `downscale_delay_s` should be 0,
    since `hold_s` keeps replicas from coming and going, or what is learnt in its place. From zero replicas Serve starts
    the first by itself. `look_back_period_s` should be longer than Serve's time between two reports, 10 s: otherwise
    bursts are seen blurred where learning has to go by them.
    """

    def __init__(
        self,
        target_encode_delay_s: float = 1.0,
        busy_share: float | None = None,
        hold_s: float = 120.0,
        start_s: float = 0.0,
        growth: float = 2.0,
        tolerance: float = 0.1,
    ) -> None:
        self._scaler = VisualScaler(
            ScalingTargets(target_encode_delay_s, busy_share, hold_s, start_s, growth, tolerance)
        )

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, object]]:
        least, most = ctx.capacity_adjusted_min_replicas, ctx.capacity_adjusted_max_replicas
        return self._scaler.replicas(visual_load(ctx), least=least, most=most), {}


class EngineWork:
    """`policy_function` of the deployment `LLM`. Its arguments are the fields of LLMTargets."""

    def __init__(
        self,
        target_requests: float = 64.0,
        kv_cache_share: float = 0.8,
        hold_s: float = 60.0,
        growth: float = 2.0,
        tolerance: float = 0.1,
    ) -> None:
        self._scaler = LLMScaler(LLMTargets(target_requests, kv_cache_share, hold_s, growth, tolerance))

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, object]]:
        least, most = ctx.capacity_adjusted_min_replicas, ctx.capacity_adjusted_max_replicas
        return self._scaler.replicas(llm_load(ctx), least=least, most=most), {}


class Proportion:
    """`policy_function` of the application: encoders and language models together.

    `encoder` holds the fields of ScalingTargets, `llm` those of LLMTargets, the others are the fields of Pool. Both
    deployments need an `autoscaling_config`, and so does the ingress if what waits there is to be counted. Other
    deployments scale by Serve's own rule, on requests.
    """

    def __init__(
        self,
        encoder: Mapping[str, float] | None = None,
        llm: Mapping[str, float] | None = None,
        gpus: float | None = None,
        encoder_gpus: float = 1.0,
        llm_gpus: float = 1.0,
        shift_gain: float = 0.2,
        shift_hold_s: float = 60.0,
        use_all: bool = False,
    ) -> None:
        pool = Pool(math.inf if gpus is None else gpus, encoder_gpus, llm_gpus, shift_gain, shift_hold_s, use_all)
        self._scaler = ProportionScaler(ScalingTargets(**(encoder or {})), LLMTargets(**(llm or {})), pool)

    def __call__(
        self, contexts: dict[DeploymentID, AutoscalingContext]
    ) -> tuple[dict[DeploymentID, float], dict[DeploymentID, dict[str, object]]]:
        named = {ctx.deployment_name: ctx for ctx in contexts.values()}
        wanted: dict[DeploymentID, float] = {
            of: _by_requests(ctx) for of, ctx in contexts.items() if ctx.deployment_name not in (ENCODER, LLM)
        }
        if ENCODER in named and LLM in named:
            encoder, llm = named[ENCODER], named[LLM]
            ingress = ingress_load(named[INGRESS]) if INGRESS in named else IngressLoad()
            wanted[encoder.deployment_id], wanted[llm.deployment_id] = self._scaler.replicas(
                visual_load(encoder), llm_load(llm), ingress, bounds=(_bounds(encoder), _bounds(llm))
            )
        return wanted, {}


def _by_requests(ctx: AutoscalingContext) -> float:
    """Serve's own rule."""
    if ctx.current_num_replicas == 0 or ctx.config is None:
        return ctx.target_num_replicas
    return float(ctx.total_num_requests / ctx.config.get_target_ongoing_requests())


def _bounds(ctx: AutoscalingContext) -> Bounds:
    return Bounds(ctx.capacity_adjusted_min_replicas, ctx.capacity_adjusted_max_replicas)


def visual_load(ctx: AutoscalingContext) -> VisualLoad:
    """What the replicas reported last, and what waits at the handles."""
    reports = _newest(ctx)
    return VisualLoad(
        now_s=ctx.current_time or 0.0,
        running=ctx.current_num_replicas,
        asked_for=ctx.target_num_replicas,
        backlog_tokens=sum(reports.get(BACKLOG_TOKENS, ())),
        waiting_images=ctx.total_queued_requests,
        arriving_tokens_per_s=sum(reports.get(ARRIVING_TOKENS_PER_S, ())),
        tokens_per_s=_mean_of_measured(reports.get(TOKENS_PER_S, ())),
        tokens_per_image=_mean_of_measured(reports.get(TOKENS_PER_IMAGE, ())),
        given=(ctx.raw_metrics or {}).get(GIVEN_TOKENS, {}),
    )


def llm_load(ctx: AutoscalingContext) -> LLMLoad:
    """What the engines reported last, and what waits at the handles."""
    reports = _newest(ctx)
    return LLMLoad(
        now_s=ctx.current_time or 0.0,
        running=ctx.current_num_replicas,
        asked_for=ctx.target_num_replicas,
        running_requests=sum(reports.get(RUNNING_REQUESTS, ())),
        waiting_requests=sum(reports.get(WAITING_REQUESTS, ())),
        coming_requests=ctx.total_queued_requests,
        kv_cache_use=sum(reports.get(KV_CACHE_USE, ())),
    )


def ingress_load(ctx: AutoscalingContext) -> IngressLoad:
    """What the ingress replicas reported last."""
    reports = _newest(ctx)
    return IngressLoad(
        line_tokens=sum(reports.get(LINE_TOKENS, ())),
        in_flight_tokens=sum(reports.get(IN_FLIGHT_TOKENS, ())),
        unaccepted_requests=sum(reports.get(UNACCEPTED_REQUESTS, ())),
    )


def _newest(ctx: AutoscalingContext) -> dict[str, list[float]]:
    """Of each replica the newest value, by its name.

    Serve's own aggregates are means over the look-back period; of a backlog only the newest value says what to do.
    """
    return {
        name: [series[-1].value for series in replicas.values() if series]
        for name, replicas in (ctx.raw_metrics or {}).items()
    }


def _mean_of_measured(values: Iterable[float]) -> float | None:
    """A replica reports 0 until it has measured."""
    measured = [value for value in values if value > 0]
    return fmean(measured) if measured else None
