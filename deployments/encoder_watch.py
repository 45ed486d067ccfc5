"""Whether there are encoders at all, as one ingress replica finds out: by a call that waits for one.

A call to a deployment without replicas waits until there is one. So a call that is answered tells that encoders are
there, and one that is not asks further. It must not know what encoders do, nor what is done without them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from ray.serve.exceptions import DeploymentUnavailableError

logger = logging.getLogger("ray.serve")

PROMPT_S = 0.25
"""A call that an encoder has by then needs no watch."""
AGAIN_S = 1.0
"""After a call that failed."""

T = TypeVar("T")


class NoEncoderError(RuntimeError):
    """No encoder is there, and none has been for a while."""


class EncoderWatch:
    """Used on one event loop. It asks nothing while encoders take calls promptly."""

    def __init__(
        self, ask: Callable[[], Awaitable[object]], any_there: Callable[[], Awaitable[bool]], *, after_s: float
    ) -> None:
        """`ask`: a call that any encoder answers. `any_there`: whether one runs, however busy it is. `after_s`: how
        long there may be none."""
        self._ask = ask
        self._any_there = any_there
        self._after_s = after_s
        self._found_none = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    @property
    def none_there(self) -> bool:
        """Whether there was none for `after_s`, and has been none since."""
        return self._found_none.is_set()

    async def unless_none(self, taken: Awaitable[T]) -> T:
        """What `taken` gives, which waits for encoders.

        Raises:
            NoEncoderError: none was there for `after_s`, or Serve has given up starting one. `taken` is cancelled.
        """
        waiting = asyncio.ensure_future(taken)
        none: asyncio.Future[Any] = asyncio.ensure_future(self._found_none.wait())
        either: set[asyncio.Future[Any]] = {waiting, none}
        try:
            if not (await asyncio.wait({waiting}, timeout=PROMPT_S))[0]:
                self._begin()
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
        except DeploymentUnavailableError as error:
            self._find_none()
            self._begin()
            raise NoEncoderError from error
        finally:
            waiting.cancel()
            none.cancel()
        raise NoEncoderError

    def _begin(self) -> None:
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Until an encoder has answered."""
        try:
            answered = await self._answered()
            while not answered:
                await asyncio.sleep(AGAIN_S)
                answered = await self._answered()
        finally:
            if self.none_there:
                logger.warning("an encoder is there again")
            self._found_none.clear()
            self._watching = None

    async def _answered(self) -> bool:
        asked = asyncio.ensure_future(self._ask())
        try:
            while not (await asyncio.wait({asked}, timeout=None if self.none_there else self._after_s))[0]:
                if not await self._any_there():
                    self._find_none()
            await asked
        except DeploymentUnavailableError:
            self._find_none()
            return False
        except Exception:
            logger.debug("an encoder did not say that it is there", exc_info=True)  # lost as it was asked
            return False
        finally:
            asked.cancel()
        return True

    def _find_none(self) -> None:
        if not self.none_there:
            logger.warning("no encoder is there: language models encode by themselves until one is")
            self._found_none.set()
