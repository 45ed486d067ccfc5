"""Pauses between the pieces of streams: the more streams, the longer; nothing is lost, nothing stays behind."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import pytest

from deployments.vllm import stream_pacing
from deployments.vllm.stream_pacing import Pacer

STEP_S = 0.01
PIECE_S = 0.02


@dataclass
class Output:
    tokens: int
    finished: bool = False


class Engine:
    """Makes a token each STEP_S for every request, and joins those that are not read, as vLLM does."""

    def __init__(self) -> None:
        self.num_aborted = 0

    async def generate(self, tokens: int) -> AsyncGenerator[Output, None]:
        began_s, read = time.perf_counter(), 0
        try:
            while read < tokens:
                await asyncio.sleep(began_s + (read + 1) * STEP_S - time.perf_counter())
                made = min(tokens, int((time.perf_counter() - began_s) / STEP_S))
                if made > read:
                    output, read = Output(made - read, made == tokens), made
                    yield output
        except (asyncio.CancelledError, GeneratorExit):
            self.num_aborted += 1
            raise


async def read(pacer: Pacer, tokens: int) -> tuple[list[Output], list[float]]:
    """Returns the outputs of a request and the seconds between them."""
    outputs, at_s = [], []
    async for output in pacer.pace(Engine().generate(tokens)):
        outputs.append(output)
        at_s.append(time.perf_counter())
    return outputs, [after - before for before, after in itertools.pairwise(at_s)]


@pytest.fixture(autouse=True)
def long_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_pacing, "PIECE_S", PIECE_S)


def test_many_streams_send_fewer_larger_pieces_and_every_token() -> None:
    async def run() -> None:
        pacer = Pacer()
        streams = await asyncio.gather(*(read(pacer, 40) for _ in range(5)))
        for outputs, gaps_s in streams:
            assert sum(output.tokens for output in outputs) == 40
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            assert len(outputs) <= 1 + 40 * STEP_S / (5 * PIECE_S) + 1
            assert outputs[0].tokens < outputs[1].tokens
            assert all(
                gap_s >= 5 * PIECE_S - 1e-3 for gap_s in gaps_s[1:-1]
            )  # the first began before the other streams
        assert pacer.num_streams == 0

    asyncio.run(run())


def test_a_request_that_is_cancelled_in_a_pause_leaves_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_pacing, "PIECE_S", 60.0)

    async def run() -> None:
        engine, pacer, first = Engine(), Pacer(), asyncio.Event()

        async def follow() -> None:
            async with aclosing(pacer.pace(engine.generate(100))) as outputs:
                async for _ in outputs:
                    first.set()

        reading = asyncio.create_task(follow())
        await first.wait()
        await asyncio.sleep(0)
        assert pacer.num_streams == 1
        reading.cancel()
        await asyncio.wait([reading])
        assert (engine.num_aborted, pacer.num_streams) == (1, 0)

    asyncio.run(run())


def test_a_stream_that_is_left_or_fails_is_not_counted_any_more() -> None:
    async def failing() -> AsyncGenerator[Output, None]:
        yield Output(1)
        raise RuntimeError("the engine has ended")

    async def run() -> None:
        engine, pacer = Engine(), Pacer()
        async with aclosing(pacer.pace(engine.generate(100))) as outputs:
            await anext(outputs)
            assert pacer.num_streams == 1
        assert (engine.num_aborted, pacer.num_streams) == (1, 0)
        with pytest.raises(RuntimeError, match="the engine has ended"):
            async for _ in pacer.pace(failing()):
                pass
        assert pacer.num_streams == 0

    asyncio.run(run())


def test_an_answer_in_one_piece_is_no_stream() -> None:
    async def whole() -> AsyncGenerator[Output, None]:
        yield Output(100, finished=True)

    async def run() -> None:
        pacer = Pacer()
        async for _ in pacer.pace(whole()):
            assert pacer.num_streams == 0

    asyncio.run(run())
