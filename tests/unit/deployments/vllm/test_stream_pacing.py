"""Pauses between the pieces of streams: the more streams, the longer; nothing is lost, nothing stays behind."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import JsonValue

from deployments.vllm import stream_pacing
from deployments.vllm.stream_pacing import Pacer
from tests.unit.deployments.vllm.fake_llm import start_fake_engine

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


def test_many_streams_send_fewer_larger_pieces_and_every_token() -> None:
    async def run() -> None:
        pacer = Pacer(piece_s=PIECE_S)
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
    monkeypatch.setattr(stream_pacing, "MAX_PAUSE_S", 60.0)

    async def run() -> None:
        engine, pacer, first = Engine(), Pacer(piece_s=60.0), asyncio.Event()

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


def test_a_pause_has_a_limit_and_none_comes_after_the_last_output(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)

    async def outputs() -> AsyncGenerator[Output, None]:
        for number in range(3):
            yield Output(1, finished=number == 2)

    async def run(pacer: Pacer) -> None:
        async for _ in pacer.pace(outputs()):
            pass

    monkeypatch.setattr(asyncio, "sleep", sleep)
    crowded = Pacer()
    crowded.num_streams = 10_000
    asyncio.run(run(crowded))
    assert len(pauses) == 2
    assert max(pauses) <= stream_pacing.MAX_PAUSE_S
    asyncio.run(run(Pacer(piece_s=0.0)))
    assert len(pauses) == 2


def test_vllm_joins_tokens_that_come_in_a_pause() -> None:
    """With vLLM's own collector: all text and all token ids of both completions of a request, in order."""
    outputs = pytest.importorskip("vllm.outputs")
    processor = pytest.importorskip("vllm.v1.engine.output_processor")
    kinds = pytest.importorskip("vllm.sampling_params").RequestOutputKind
    collector = processor.RequestOutputCollector(kinds.DELTA, "r")

    def output(index: int, number: int) -> object:
        reason = "stop" if number == 4 else None
        made = outputs.CompletionOutput(index, f"{index}{number} ", [number], None, None, finish_reason=reason)
        return outputs.RequestOutput("r", None, None, None, [made], finished=index == 1 and number == 4)

    async def generate() -> AsyncGenerator[Any, None]:
        finished = False
        while not finished:
            told = await collector.get()
            finished = told.finished
            yield told

    async def run() -> list[Any]:
        async def engine() -> None:
            for number in range(5):
                for index in range(2):
                    collector.put(output(index, number))
                await asyncio.sleep(STEP_S)

        making = asyncio.create_task(engine())
        found = [told async for told in Pacer(piece_s=3 * STEP_S).pace(generate())]
        await making
        return found

    told = asyncio.run(run())
    assert len(told) < 5
    for index in range(2):
        parts = [part for each in told for part in each.outputs if part.index == index]
        assert "".join(part.text for part in parts) == "".join(f"{index}{number} " for number in range(5))
        assert [token for part in parts for token in part.token_ids] == list(range(5))
        assert parts[-1].finish_reason == "stop"


@pytest.mark.parametrize(("server_args", "paced"), [({}, True), ({"reasoning_parser": "qwen3"}, False)])
def test_an_engine_paces_its_streams(
    server_args: dict[str, JsonValue], paced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with a parser of reasoning: vLLM 0.26 loses text behind its end if several tokens come at once."""

    monkeypatch.setattr(stream_pacing, "PIECE_S", 60.0)
    monkeypatch.setattr(stream_pacing, "MAX_PAUSE_S", 60.0)
    engine = Engine()
    llm = start_fake_engine(monkeypatch, lambda *_: engine.generate(100), server_args)

    async def run() -> None:
        async with aclosing(llm.generate("prompt", None, "r")) as answer:
            await anext(answer)
            second = asyncio.ensure_future(anext(answer))
            done, _ = await asyncio.wait([second], timeout=20 * STEP_S if paced else 10.0)
            assert bool(done) is not paced
            second.cancel()
            await asyncio.wait([second])
        assert engine.num_aborted == 1

    asyncio.run(run())
