"""Serve's autoscaling policy for the encoders: replicas by visual work instead of by requests.

    autoscaling_config:
      policy: {policy_function: "deployments.scaling:VisualWork", policy_kwargs: {target_encode_delay_s: 1.0}}

Serve makes one `VisualWork` a deployment, with `policy_kwargs`, and calls it many times a second in its controller. It
gets the class as bytes, together with the module of the decisions: the controller need not have this code. It must not
decide anything; `scaling_policy.py` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import TYPE_CHECKING

from ray import cloudpickle

from deployments import scaling_policy
from deployments.scaling_policy import (
    ARRIVING_TOKENS_PER_S,
    BACKLOG_TOKENS,
    TOKENS_PER_IMAGE,
    TOKENS_PER_S,
    ScalingTargets,
    VisualLoad,
    VisualScaler,
)

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

# Serve does as much for the module that it was told, and for no other: where the code came to the cluster as a
# `working_dir`, its controller cannot import it.
cloudpickle.register_pickle_by_value(scaling_policy)


class VisualWork:
    """`policy_function` of the deployment `Encoder`. Its arguments are the fields of ScalingTargets.

    The number goes on through Serve's own delays and factors: `upscale_delay_s` and `downscale_delay_s` should be 0,
    since `hold_s` keeps replicas from coming and going. From zero replicas Serve starts the first by itself.
    """

    def __init__(
        self,
        target_encode_delay_s: float = 1.0,
        busy_share: float = 0.5,
        hold_s: float = 30.0,
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


def visual_load(ctx: AutoscalingContext) -> VisualLoad:
    """What the replicas reported last, and what waits at the handles.

    Serve's own aggregates are means over the look-back period; of a backlog only the newest value says what to do.
    """
    reports = {
        name: [series[-1].value for series in replicas.values() if series]
        for name, replicas in (ctx.raw_metrics or {}).items()
    }
    return VisualLoad(
        now_s=ctx.current_time or 0.0,
        running=ctx.current_num_replicas,
        asked_for=ctx.target_num_replicas,
        backlog_tokens=sum(reports.get(BACKLOG_TOKENS, ())),
        waiting_images=ctx.total_queued_requests,
        arriving_tokens_per_s=sum(reports.get(ARRIVING_TOKENS_PER_S, ())),
        tokens_per_s=_mean_of_measured(reports.get(TOKENS_PER_S, ())),
        tokens_per_image=_mean_of_measured(reports.get(TOKENS_PER_IMAGE, ())),
    )


def _mean_of_measured(values: Iterable[float]) -> float | None:
    """A replica reports 0 until it has measured."""
    measured = [value for value in values if value > 0]
    return fmean(measured) if measured else None
