"""Paces streamed answers: with many streams each sends fewer, larger pieces, so that the event loop has time for new
requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol, TypeVar

PIECE_S = 0.4e-3
"""Time per piece: up to 250 streams of an engine together send about 2,500 pieces a second at most. A piece took 0.15
to 0.24 ms of CPU time in the process of the language model, whose streams share one event loop."""
MAX_PAUSE_S = 0.1


class Output(Protocol):
    """A vLLM RequestOutput, with the tokens since the last one."""

    finished: bool


OutputT = TypeVar("OutputT", bound=Output)


class Pacer:
    """The streams of one engine. Used on its event loop."""

    def __init__(self, piece_s: float | None = None) -> None:
        """`piece_s`: PIECE_S by default; 0 does not pace the streams."""
        self.piece_s = PIECE_S if piece_s is None else piece_s
        self.num_streams = 0
        """Requests that have their first token, and not their last."""

    async def pace(self, outputs: AsyncGenerator[OutputT, None]) -> AsyncGenerator[OutputT, None]:
        """Yields the outputs of a request, each at least `num_streams` times `piece_s` after the one before, at most
        MAX_PAUSE_S; vLLM joins the tokens that come meanwhile. Closes `outputs`."""
        is_stream = False
        try:
            async with aclosing(outputs):  # or a request that is cancelled in a pause would stay in the engine
                async for output in outputs:
                    if not is_stream and not output.finished:
                        is_stream = True
                        self.num_streams += 1
                    sent_s = time.perf_counter()
                    yield output
                    left_s = sent_s + min(MAX_PAUSE_S, self.num_streams * self.piece_s) - time.perf_counter()
                    if left_s > 0 and not output.finished:
                        await asyncio.sleep(left_s)
        finally:
            self.num_streams -= is_stream
