"""When an encoder refuses an image: too much work is ahead of it in the fair queue, and another encoder can be asked.

Only the replica knows its backlog: each ingress knows the images that it sent, which are few of them.
"""

from __future__ import annotations

from deployments.common.fair_queue import virtual_arrival_s
from deployments.common.throughput import InFlightTokens
from deployments.routing.affinity import Call

MAX_BACKLOG_S = 0.06
"""Chosen in benchmarks/log/2026-11-25-many-hosts.md: with less, too many images leave their host."""


def is_too_busy(
    call: Call, in_flight: InFlightTokens, *, tokens_per_s: float, max_backlog_s: float = MAX_BACKLOG_S, now_s: float
) -> bool:
    """Returns whether the images before this one would be encoded for more than `max_backlog_s`, and for longer than
    this one itself.

    Args:
        call: of an image that is neither cached nor being encoded; its `weight` is the image's visual tokens, its
            `cost` includes those of the images before it in its request.
        in_flight: jobs of the replica with their places, on the clock of `now_s`.
        tokens_per_s: measured speed of the replica; 0 while it is unknown, which refuses nothing.
    """
    if tokens_per_s <= 0:
        return False
    place = virtual_arrival_s(now_s, tokens=call.cost, tokens_before=0, tokens_per_s=tokens_per_s)
    return in_flight.tokens_before(place) > max(max_backlog_s * tokens_per_s, call.weight)
