"""A second call for an image that the first is slow with: the first of the two that is ready counts, the other ends.

One second call an image, never more. Embeddings are not fetched to find out whether they are there. It must not know of
HTTP requests, nor how calls are routed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Generic, TypeVar

import ray
from ray.serve.handle import DeploymentResponse

from deployments.metrics import Count, Counts
from deployments.shared_calls import SharedCall

POLL_S = 0.005
"""Between two looks at calls of which one is slow already."""

T = TypeVar("T")


class Begun(Generic[T]):
    """An answer whose first piece is being waited for; iterated and cancelled like the answer itself."""

    def __init__(self, answer: Any) -> None:  # noqa: ANN401 - Serve's DeploymentResponseGenerator[T], which is not typed
        self._answer = answer
        self._first: asyncio.Future[T] | None = asyncio.ensure_future(anext(answer))

    async def first_is_there(self, within_s: float) -> bool:
        """Waits for the first piece, or an error in its place; it is left where it is."""
        assert self._first is not None
        done, _ = await asyncio.wait({self._first}, timeout=within_s)
        return bool(done)

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        if self._first is not None:
            first, self._first = self._first, None
            return await first
        piece: T = await anext(self._answer)
        return piece

    def cancel(self) -> None:
        if self._first is not None:
            self._first.cancel()
        self._answer.cancel()


async def object_ref(response: DeploymentResponse[Any]) -> ray.ObjectRef[Any]:
    """Of the result that is to come, once a replica has taken the call. Who stops waiting leaves the call alone."""
    return await asyncio.shield(_taken(response))


def _taken(response: DeploymentResponse[Any]) -> asyncio.Task[ray.ObjectRef[Any]]:
    task = asyncio.ensure_future(response._to_object_ref())
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # told to those who wait
    return task


async def ready(response: DeploymentResponse[Any]) -> bool | None:
    """Whether there is a result or an error; None where no replica has taken the call yet."""
    taken = _taken(response)
    done, _ = await asyncio.wait({taken}, timeout=POLL_S)
    if not done:  # not cancelled: that would cancel the call
        return None
    if taken.exception() is not None:
        return True
    return bool(ray.wait([taken.result()], timeout=0, fetch_local=False)[0])


class Hedging:
    """The calls of one ingress replica."""

    def __init__(self, after_s: float, counts: Counts) -> None:
        self._after_s = after_s
        self._counts = counts

    async def hurried(
        self,
        answer: Begun[Any],
        calls: Sequence[SharedCall[Any]],
        spares: Sequence[Callable[[], Any]],
    ) -> bool:
        """Whether a call was slow and is decided now, so that the answer has to be asked for anew, with what is there.

        Returns at once when the answer has begun. `spares` begin the second calls.
        """
        if await answer.first_is_there(self._after_s):
            return False
        states = await asyncio.gather(*(ready(call.response) for call in calls))
        slow = [number for number, state in enumerate(states) if state is False]
        if not slow:  # it waits for a language model, or for any encoder at all
            return False
        answer.cancel()
        for number in slow:
            call = calls[number]
            if call.race is None:
                call.spare = spares[number]()
                self._counts.add(Count.HEDGES)
                call.race = asyncio.ensure_future(self._decide(call, call.response, call.spare))
        await asyncio.gather(*(asyncio.shield(race) for number in slow if (race := calls[number].race)))
        return True

    async def _decide(
        self, call: SharedCall[Any], first: DeploymentResponse[Any], spare: DeploymentResponse[Any]
    ) -> None:
        while True:
            for response, other in ((first, spare), (spare, first)):
                if await ready(response):
                    call.response, call.spare = response, None
                    if response is spare:
                        self._counts.add(Count.HEDGES_WON)
                    with contextlib.suppress(Exception):  # of a call that has failed already
                        other.cancel()
                    return
            await asyncio.sleep(POLL_S)
