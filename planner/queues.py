"""Queues in virtual time: servers that take waiting items in batches, and processor sharing. Pure Python."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def simulate_processor_sharing(ready_s: Sequence[float], work_s: Sequence[float], servers: int) -> list[float]:
    """Returns each job's completion time under processor sharing: present jobs share the servers equally, each at most
    one server.

    Event loops and thread pools under one interpreter lock behave like this: of requests that arrive together, none is
    done early.

    Args:
        ready_s: arrival times, ascending.
        work_s: service time of each job alone.
        servers: number of processes, at least 1.
    """
    done = [0.0] * len(ready_s)
    # `served_s`: service of a job present from the start. A job ends when `served_s` has grown by its work since its
    # arrival.
    served_s, now_s = 0.0, ready_s[0] if ready_s else 0.0
    active: list[tuple[float, int]] = []

    def advance_to(time_s: float) -> None:
        nonlocal served_s, now_s
        while active:
            rate = min(1.0, servers / len(active))
            end_s = now_s + max(0.0, active[0][0] - served_s) / rate
            if end_s > time_s:
                break
            served_s, job = heapq.heappop(active)
            now_s = done[job] = end_s
        if active:
            served_s += (time_s - now_s) * min(1.0, servers / len(active))
        now_s = max(now_s, time_s)

    for job, (arrival_s, work) in enumerate(zip(ready_s, work_s, strict=True)):
        advance_to(arrival_s)
        heapq.heappush(active, (served_s + work, job))
    advance_to(float("inf"))
    return done


def simulate_batch_queue(
    items: Sequence[Item],
    ready_s: Sequence[float],
    servers: int,
    seconds: Callable[[Sequence[Item]], float],
    fits: Callable[[Sequence[Item]], bool],
) -> tuple[list[float], float]:
    """Returns each item's completion time and the total busy time of all servers, in seconds.

    Args:
        ready_s: arrival times, ascending.
        seconds: service time of a batch.
        fits: whether the items may form one batch; a single item always may.
    """
    free_at_s = [float("-inf")] * servers
    done: list[float] = []
    busy_s = 0.0
    while len(done) < len(items):
        first = len(done)
        begin_s = max(heapq.heappop(free_at_s), ready_s[first])
        idle = 1 + sum(at_s <= begin_s for at_s in free_at_s)
        waiting = bisect_right(ready_s, begin_s, lo=first) - first
        last = first + 1
        while last < first + math.ceil(waiting / idle) and fits(items[first : last + 1]):
            last += 1
        duration_s = seconds(items[first:last])
        done += [begin_s + duration_s] * (last - first)
        busy_s += duration_s
        heapq.heappush(free_at_s, begin_s + duration_s)
    return done, busy_s
