"""Autoscaling policies of Ray Serve that scale by pending work instead of by requests.

Set in a deployment's `autoscaling_config`: `VisualTokenPolicy` for encoders, `EngineLoadPolicy` for language models.

    policy: {policy_function: "deployments.scaling:VisualTokenPolicy", policy_kwargs: {target_encode_delay_s: 1.0}}

Serve creates one policy per deployment, with `policy_kwargs`, and calls it many times a second in its controller. The
class is sent as bytes with the modules that it uses, so the controller need not have this code. Decisions belong in
`encoder_scaler.py` and `llm_scaler.py`, not here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ray import cloudpickle

from deployments.scaling import encoder_scaler, llm_scaler, stabilization, utilization_target
from deployments.scaling.encoder_scaler import ScalingTargets, VisualLoad, VisualScaler
from deployments.scaling.llm_scaler import LLMLoad, LLMScaler, LLMTargets

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

# Serve pickles by value only the package named in `policy_function`. If the code was deployed as a `working_dir`, the
# controller cannot import it.
for _module in (utilization_target, stabilization, encoder_scaler, llm_scaler, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(_module)


class VisualTokenPolicy:
    """`policy_function` of the deployment `Encoder`. Its arguments are the fields of ScalingTargets.

    Serve applies its own delays and factors to the result: `upscale_delay_s` and `downscale_delay_s` should be 0, since
    `scale_down_stabilization_s` or the learned window prevents flapping. Serve itself scales up from zero replicas.
    `look_back_period_s` should exceed Serve's report interval of 10 s, or the learned utilization sees bursts smoothed.
    """

    def __init__(self, **targets: Any) -> None:  # noqa: ANN401 # policy_kwargs, checked by ScalingTargets
        self._scaler = VisualScaler(ScalingTargets(**targets))

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, object]]:
        low, high = ctx.capacity_adjusted_min_replicas, ctx.capacity_adjusted_max_replicas
        return self._scaler.choose_replicas(visual_load(ctx), min_replicas=low, max_replicas=high), {}


class EngineLoadPolicy:
    """`policy_function` of the deployment `LLM`. Its arguments are the fields of LLMTargets."""

    def __init__(self, **targets: Any) -> None:  # noqa: ANN401 # policy_kwargs, checked by LLMTargets
        self._scaler = LLMScaler(LLMTargets(**targets))

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, object]]:
        low, high = ctx.capacity_adjusted_min_replicas, ctx.capacity_adjusted_max_replicas
        return self._scaler.choose_replicas(llm_load(ctx), min_replicas=low, max_replicas=high), {}


def visual_load(ctx: AutoscalingContext) -> VisualLoad:
    """Returns the load from the replicas' last reports and the queues at the handles."""
    reports = _newest(ctx)
    return VisualLoad(
        now_s=ctx.current_time or 0.0,
        running_replicas=ctx.current_num_replicas,
        target_replicas=ctx.target_num_replicas,
        backlog_tokens=sum(reports.get(encoder_scaler.BACKLOG_TOKENS, ())),
        waiting_images=ctx.total_queued_requests,
        arriving_tokens_per_s=sum(reports.get(encoder_scaler.ARRIVING_TOKENS_PER_S, ())),
        tokens_per_s=_mean_of_measured(reports.get(encoder_scaler.TOKENS_PER_S, ())),
        tokens_per_image=_mean_of_measured(reports.get(encoder_scaler.TOKENS_PER_IMAGE, ())),
        received_tokens=(ctx.raw_metrics or {}).get(encoder_scaler.RECEIVED_TOKENS, {}),
    )


def llm_load(ctx: AutoscalingContext) -> LLMLoad:
    """Returns the load from the engines' last reports and the queues at the handles."""
    reports = _newest(ctx)
    return LLMLoad(
        now_s=ctx.current_time or 0.0,
        running_replicas=ctx.current_num_replicas,
        target_replicas=ctx.target_num_replicas,
        running_requests=sum(reports.get(llm_scaler.RUNNING_REQUESTS, ())),
        waiting_requests=sum(reports.get(llm_scaler.WAITING_REQUESTS, ())),
        queued_requests=ctx.total_queued_requests,
        kv_cache_use=sum(reports.get(llm_scaler.KV_CACHE_USE, ())),
    )


def _newest(ctx: AutoscalingContext) -> dict[str, list[float]]:
    """Returns each replica's newest value, by metric name.

    Serve's own aggregates are means over the look-back period, and an old backlog says nothing about the present one.
    """
    return {
        name: [series[-1].value for series in replicas.values() if series]
        for name, replicas in (ctx.raw_metrics or {}).items()
    }


def _mean_of_measured(values: Iterable[float]) -> float | None:
    """Returns the mean without the 0 that a replica reports before its first measurement, or None."""
    measured = [value for value in values if value > 0]
    return fmean(measured) if measured else None
