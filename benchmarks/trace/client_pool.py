"""Client processes that share the requests of an open loop, since a single event loop reads some thousand chunks of
streams a second on time."""

from __future__ import annotations

import asyncio
import multiprocessing
import multiprocessing.synchronize
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from threading import BrokenBarrierError
from typing import Self

from benchmarks.trace.bodies import Bodies
from benchmarks.trace.client import Run, open_loop, session

READY_S = 120.0
"""Time in which all processes have made the bodies that are made before the clock starts."""

_barriers: list[multiprocessing.synchronize.Barrier] = []
"""In a client process: its only member is passed by all processes at once when all are ready."""


class ClientPool:
    """`number` client processes; request i is sent by process i modulo `number`.

    All start their clocks together. Use as a context manager.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._other_children = set(multiprocessing.active_children())
        context = multiprocessing.get_context("spawn")
        self._executor = ProcessPoolExecutor(
            number, mp_context=context, initializer=_keep, initargs=(context.Barrier(number),)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is not None:  # the processes would send the rest of their requests first
            for process in set(multiprocessing.active_children()) - self._other_children:
                process.terminate()
        self._executor.shutdown(cancel_futures=True)

    async def open_loop(
        self, url: str, key: str | None, timeout_s: float, due_s: Sequence[float], bodies: Bodies,
        piece: Sequence[int], *, prepared: bool,
    ) -> Run:  # fmt: skip
        """Sends the requests `piece` of a trace at `due_s`, as `client.open_loop` does.

        Raises OSError if a picture cannot be read, threading.BrokenBarrierError if a process is not ready in time.
        """
        loop = asyncio.get_running_loop()
        shares = [slice(first, None, self.number) for first in range(self.number)]
        sending = [
            loop.run_in_executor(
                self._executor, _send, url, key, timeout_s, due_s[share], due_s[0], bodies, piece[share], prepared
            )
            for share in shares
        ]
        try:
            _, pending = await asyncio.wait(sending, return_when=asyncio.FIRST_EXCEPTION)
            if pending and all(isinstance(error, BrokenBarrierError) for error in _errors(sending)):
                await asyncio.wait(pending)  # the process that broke the barrier tells why
            if errors := _errors(sending):
                raise min(errors, key=lambda error: isinstance(error, BrokenBarrierError))
            runs = [each.result() for each in sending]
        finally:
            for each in sending:
                each.cancel()
        sent = [one for run in runs for one in run.sent]
        for first, run in enumerate(runs):
            for one in run.sent:
                one.index = first + self.number * one.index
        return Run(
            sorted(sent, key=lambda one: one.index),
            max(run.duration_s for run in runs),
            [lag for run in runs for lag in run.loop_lags_s],
        )


def _errors(sending: Sequence[asyncio.Future[Run]]) -> list[BaseException]:
    return [error for each in sending if each.done() and (error := each.exception()) is not None]


def piece_bodies(bodies: Bodies, piece: Sequence[int], *, prepared: bool) -> Callable[[int], bytes]:
    """Returns a function of a place in `piece` that returns its body. `prepared`: all are made now."""
    if prepared:
        return [bodies.of(index) for index in piece].__getitem__
    return lambda place: bodies.of(piece[place])


def _keep(barrier: multiprocessing.synchronize.Barrier) -> None:
    _barriers.append(barrier)


def _send(
    url: str, key: str | None, timeout_s: float, due_s: Sequence[float], begin_s: float, bodies: Bodies,
    piece: Sequence[int], prepared: bool,
) -> Run:  # fmt: skip
    """Runs in a client process."""
    waited = False

    def ready() -> None:
        nonlocal waited
        _barriers[0].wait(READY_S)
        waited = True

    async def send() -> Run:
        async with session(key, timeout_s) as http:
            return await open_loop(http, url, due_s, make, begin_s, ready)

    try:
        make = piece_bodies(bodies, piece, prepared=prepared)
        return asyncio.run(send())
    except BaseException:
        if not waited:  # the other processes would wait for this one
            _barriers[0].abort()
        raise
