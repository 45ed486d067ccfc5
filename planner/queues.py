"""Queues in virtual time: servers that take waiting items in batches, and processor sharing. Pure Python."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def shared(ready_s: Sequence[float], work_s: Sequence[float], servers: int) -> list[float]:
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
    # `got`: service of a job present from the start; a job ends when `got` has grown by its work since its arrival.
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
    """Returns each item's completion time and the total busy time of all servers, in seconds.

    Args:
        ready_s: arrival times, ascending.
        seconds: service time of a batch.
        fits: whether the items may form one batch; a single item always may.
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
