"""Queues in a virtual clock: servers that take what waits in batches, and servers that work on all they have at once.

Pure Python over numbers; it must not know what the jobs are.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def shared(ready_s: Sequence[float], work_s: Sequence[float], servers: int) -> list[float]:
    """When each job is done where all that are there get an equal part of the servers, none more than one of them.

    Event loops and thread pools under one interpreter's lock behave like that: of requests that come together none is
    done early.

    Args:
        ready_s: when each job comes, ascending.
        work_s: that it takes alone.
        servers: processes, at least 1.
    """
    done = [0.0] * len(ready_s)
    # What every job that is there has got since the beginning; a job ends when it has got its work since it came.
    got, now = 0.0, 0.0
    inside: list[tuple[float, int]] = []

    def until(time_s: float) -> None:
        nonlocal got, now
        while inside:
            rate = min(1.0, servers / len(inside))
            ends = now + max(0.0, inside[0][0] - got) / rate
            if ends > time_s:
                break
            got, job = heapq.heappop(inside)
            now = done[job] = ends
        if inside:
            got += (time_s - now) * min(1.0, servers / len(inside))
        now = max(now, time_s)

    for job, (came, work) in enumerate(zip(ready_s, work_s, strict=True)):
        until(came)
        heapq.heappush(inside, (got + work, job))
    until(float("inf"))
    return done


def played(
    items: Sequence[Item],
    ready_s: Sequence[float],
    servers: int,
    seconds: Callable[[Sequence[Item]], float],
    fits: Callable[[Sequence[Item]], bool],
) -> tuple[list[float], float]:
    """When each is done, and for how long all servers together were busy.

    Args:
        ready_s: when each item comes, ascending.
        seconds: that a batch takes.
        fits: whether so many may be one batch; a single item always may.
    """
    free = [float("-inf")] * servers
    done: list[float] = []
    busy_s = 0.0
    while len(done) < len(items):
        first = len(done)
        begins = max(heapq.heappop(free), ready_s[first])
        idle = 1 + sum(at_s <= begins for at_s in free)
        waiting = bisect_right(ready_s, begins, lo=first) - first
        last = first + 1
        while last < first + math.ceil(waiting / idle) and fits(items[first : last + 1]):
            last += 1
        takes = seconds(items[first:last])
        done += [begins + takes] * (last - first)
        busy_s += takes
        heapq.heappush(free, begins + takes)
    return done, busy_s
