"""Requests that go to the engine without an embedding, in the hope of its prefix cache: what comes of them where the
engine gets on, where it waits for the embedding, and where it comes to need it later."""

from __future__ import annotations

import asyncio
import dataclasses
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from typing import Any, NoReturn, TypeVar, cast

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from deployments.common.messages import Accepted, Deferred, NotEncoded, ResponseHead
from deployments.common.replica_errors import TransferFailedError
from deployments.llm.prefix_cache_skip import Missing, MissingWatch, stream_unless_lost, unless_lost
from deployments.llm.received import NotEncodedError, ReceivedEmbeddings
from deployments.llm.streams import cancel_and_wait
from deployments.telemetry.metrics import Counter
from deployments.vllm.compat import AsgiApp, FirstTokenClock, first_token_clock
from encoder.item_header import ItemHeader
from tests.cluster.stand_in_llm import StandInLLM
from tests.cycles import assert_freed
from tests.unit.deployments.llm.receivers import FreeAdded, eventually, setting
from tests.unit.deployments.llm.stand_in_replica import digest, encoded, header, place, replica, request, run
from tests.unit.deployments.samples import at_once
from tests.unit.deployments.transfer.stored_embeddings import WIDTH

DIGEST = digest(1.0)
CHAT = "/v1/chat/completions"

T = TypeVar("T")


class Engine:
    """A language model replica whose engine has connectors and prefixes, as far as the test says."""

    def __init__(
        self,
        then: Callable[[], object] = lambda: None,
        *,
        at_chunk: int | None = None,
        whole_takes_long: bool = False,
    ) -> None:
        """`then` is called once the request is there: before its first token, or before one of three chunks."""
        self._whole_takes_long = whole_takes_long
        self.llm: StandInLLM = replica()
        self.receiver = self.llm._receiver
        self.receiver._counts = self.llm._requests._counts = self.counts = FreeAdded()
        self.came: list[str] = []
        self.left = asyncio.Event()
        self._then, self._at_chunk = then, at_chunk
        self._token = ""
        app = Starlette(routes=[Route(CHAT, self._chat, methods=["POST"])])
        self.llm._frontend.app = cast(AsgiApp, app)

    async def _chat(self, given: Request) -> Response:
        clock = first_token_clock.get()
        assert clock is not None
        self._token = clock.token
        for part in (await given.json())["messages"][0]["content"]:
            self.came.append(self.llm._frontend.references.header(part["image_url"]["url"]).digest)
        if self._at_chunk is not None:
            return StreamingResponse(self._chunks(), media_type="text/event-stream")
        self._then()
        clock.tick()
        if self._whole_takes_long:
            await given.receive()  # until the client leaves
            self.left.set()
        return JSONResponse({})

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        clock = first_token_clock.get()
        assert clock is not None
        try:
            for number in range(3):
                if number == self._at_chunk:
                    self._then()
                    await asyncio.Event().wait()
                clock.tick()
                yield b"data: %d\n\n" % number
                await asyncio.sleep(0)
        finally:
            self.left.set()

    def misses(self, *digests: str, token: str | None = None) -> None:
        """The first of several answers, as vLLM names it. `token`: of the request; None: of the last one."""
        self.receiver.missing.report(f"0_chat-1-{token or self._token}-abcdef01", digests)

    async def answer(self, *given: Any, headers: Sequence[ItemHeader | None] = ()) -> list[object]:
        places = [place(number) for number in range(len(given))]
        headers = headers or [header(float(1 + number)) for number in range(len(given))]
        return [piece async for piece in self.llm.handle(request(*places), places, headers, given)]


async def put(told: list[T], pieces: AsyncIterable[T]) -> None:
    """One by one, so that those before an error are there."""
    async for piece in pieces:
        told.append(piece)


def test_what_the_engine_has_no_need_of_is_not_fetched() -> None:
    async def scenario() -> None:
        engine = Engine()
        accepted, head = await engine.answer(Deferred(), Deferred())
        assert accepted == Accepted((None, None))
        assert isinstance(head, ResponseHead)
        assert b'cache;desc="0/0", path;desc="prefix_cache"' in dict(head.headers)[b"server-timing"]
        assert engine.came == [digest(1.0), digest(2.0)]
        assert engine.counts.added[Counter.EMBEDDINGS_SKIPPED, None] == 2
        assert not any(count is Counter.EMBEDDINGS_RECEIVED for count, _ in engine.counts.added)
        assert (len(engine.receiver.missing._watched), engine.llm.state()["keys"]) == (0, 0)

    run(scenario())


def test_what_an_encoder_has_described_goes_to_the_engine_at_once() -> None:
    """The header of its last known location is that of the prompt; what is received comes with its own."""

    async def scenario() -> None:
        there = dataclasses.replace(encoded(1.0), server="somewhere")
        engine = Engine()
        deferred = Deferred(dataclasses.replace(there, header=header()))
        accepted, *_ = await engine.answer(deferred, headers=[None])
        assert accepted == Accepted((None,))
        coming = dataclasses.replace(encoded(2.0), header=header(2.0))
        await engine.answer(deferred, *at_once(coming), headers=[None, None])
        assert engine.came == [DIGEST, DIGEST, digest(2.0)]
        engine = Engine(lambda: engine.misses(DIGEST), at_chunk=0)
        assert await engine.answer(deferred, headers=[None]) == [NotEncoded((0,))]

    run(scenario())


def test_what_the_engine_waits_for_is_to_be_encoded() -> None:
    """The ingress is told once the engine has given the request up, since it comes again with the same keys."""

    async def scenario() -> None:
        engine = Engine(lambda: engine.misses(digest(3.0), digest(2.0)), at_chunk=0)
        assert await engine.answer(Deferred(), Deferred(), Deferred()) == [NotEncoded((1, 2))]
        assert engine.left.is_set()
        assert (len(engine.receiver.missing._watched), engine.llm.state()["keys"]) == (0, 0)
        assert not {count for count, _ in engine.counts.added} & {
            Counter.EMBEDDINGS_SKIPPED,
            Counter.EMBEDDINGS_RECEIVED,
        }

    run(scenario())


def test_what_another_request_waits_for_is_its_own() -> None:
    """Two conversations about one image: the engine has the prefix of one of them. The other's question for the image
    used to end the answer of both."""

    async def scenario() -> None:
        engine = Engine(lambda: engine.misses(DIGEST, token=FirstTokenClock().token))
        assert isinstance((await engine.answer(Deferred()))[0], Accepted)

    run(scenario())


def test_a_prefix_that_leaves_the_cache_in_mid_answer_ends_the_answer() -> None:
    """vLLM puts requests back where its KV cache is full, and may need the image when it takes them up again."""

    async def scenario() -> None:
        engine = Engine(lambda: engine.misses(DIGEST), at_chunk=2)
        places, pieces = [place(0)], list[object]()
        with pytest.raises(TransferFailedError):
            await put(pieces, engine.llm.handle(request(*places), places, [header()], [Deferred()]))
        accepted, head, *chunks = pieces
        assert isinstance(accepted, Accepted)
        assert isinstance(head, ResponseHead)
        assert head.body + b"".join(cast(list[bytes], chunks)) == b"data: 0\n\ndata: 1\n\n"
        assert engine.left.is_set()

    run(scenario())


def test_what_is_missed_is_told_before_the_others_are_encoded() -> None:
    """So that encoders work on all of them at once."""

    async def scenario() -> None:
        engine = Engine(lambda: engine.misses(digest(1.0), digest(2.0)), at_chunk=0)
        never: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        assert await engine.answer(never, Deferred()) == [NotEncoded((1,))]
        assert (len(engine.receiver.missing._watched), engine.llm.state()["keys"]) == (0, 0)

    run(scenario())


@pytest.mark.parametrize("missed", [False, True])
def test_embeddings_that_are_skipped_and_others_mix_in_a_request(missed: bool) -> None:
    """The engine reports what it misses before the others have come; of what is being received that means nothing."""

    async def scenario() -> None:
        def then() -> None:
            engine.misses(digest(1.0), *([digest(2.0)] if missed else []))

        engine = Engine(then, at_chunk=0 if missed else None)
        image = encoded(1.0)
        pieces = await engine.answer(*at_once(image), Deferred())
        assert pieces[0] == (NotEncoded((1,)) if missed else Accepted((image, None)))
        assert (len(engine.receiver.missing._watched), engine.llm.state()["keys"]) == (0, 0)

    run(scenario())


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_leaves_nothing_behind(streamed: bool) -> None:
    async def scenario() -> None:
        engine = Engine(at_chunk=1) if streamed else Engine(whole_takes_long=True)
        places = [place(0)]
        handled = engine.llm.handle(request(*places), places, [header()], [Deferred()])
        answer = cast(AsyncGenerator[object], handled)
        assert isinstance(await anext(answer), Accepted), "with the first token, not with the answer's end"
        if streamed:
            assert isinstance(await anext(answer), ResponseHead)
        await answer.aclose()
        assert (len(engine.receiver.missing._watched), engine.llm.state()["keys"], engine.left.is_set()) == (0, 0, True)

    run(scenario())


def test_only_the_request_that_misses_them_is_told() -> None:
    """A request was known by the client's `X-Request-Id`, which another request may have, or contain."""

    async def scenario() -> None:
        watch = MissingWatch()
        with watch.watch(FirstTokenClock()) as one, watch.watch(FirstTokenClock()) as other:
            watch.report("chatcmpl-1-0123", ["a"])
            await asyncio.to_thread(watch.report, f"chatcmpl-1-{one.clock.token}-0123", ["a", "b"])
            await eventually(one.changed.is_set)
            assert (one.digests, other.digests) == ({"a", "b"}, set())
            watch.report(f"1_chatcmpl-1-{other.clock.token}-0123", ["c"])
            await eventually(other.changed.is_set)
            assert (one.digests, other.digests) == ({"a", "b"}, {"c"})
        assert len(watch._watched) == 0

    run(scenario())


@pytest.mark.parametrize("first", ["report", "skip"])
def test_what_is_missed_is_read_where_it_was_last_seen(first: str) -> None:
    """vLLM may report an embedding, once, before it is known that it is skipped. What is received, and what nobody
    misses, is left alone; what is gone is told with all others that are."""

    async def scenario() -> None:
        async with setting() as given:
            there, unasked, gone = given.offered(1), given.offered(2), Deferred()
            known = [Deferred(there), Deferred(unasked), gone, gone]
            digests = [there.digest, unasked.digest, "gone", "gone too"]
            missing, received = Missing(FirstTokenClock()), ReceivedEmbeddings()
            shapes = [(6, WIDTH)] * 4
            lost = asyncio.ensure_future(given.receiver.receive_missing(missing, digests, shapes, received))

            def report(*names: str) -> None:
                missing.digests.update(names)
                missing.changed.set()

            if first == "report":
                report(there.digest)
                await asyncio.sleep(0)
            await given.receiver.receive(known, shapes, received)
            assert received.num_skipped == 4
            if first == "skip":
                report(there.digest)
            missing.changed.set()
            await eventually(lambda: received.num_skipped == 3)
            await eventually(lambda: given.scheduler.table.has(there.digest))
            assert not given.scheduler.table.has(unasked.digest)
            assert received.locations == (there, None, None, None)
            report("gone", "gone too")
            with pytest.raises(NotEncodedError) as raised:
                await lost
            assert raised.value.images == (2, 3)
            given.receiver.close(received)

    run(scenario())


def test_a_request_that_has_ended_is_not_kept_by_a_cycle() -> None:
    """Until Python collected cycles, it was."""

    async def scenario() -> weakref.ref[ReceivedEmbeddings]:
        async with setting() as given:
            missing, received = Missing(FirstTokenClock()), ReceivedEmbeddings()
            lost = asyncio.ensure_future(given.receiver.receive_missing(missing, [], [], received))
            missing.changed.set()
            await eventually(lambda: not missing.changed.is_set())
            await cancel_and_wait(lost)
            return weakref.ref(received)

    assert_freed(scenario)


def test_a_request_that_has_failed_is_not_kept_by_a_cycle() -> None:
    class File(bytearray):
        pass

    async def scenario() -> weakref.ref[File]:
        async def fail(file: File) -> None:
            raise ValueError(len(file))

        file = File(b"1")
        lost = asyncio.get_running_loop().create_future()
        with pytest.raises(ValueError, match="1"):
            await unless_lost(fail(file), lost)
        await asyncio.sleep(0)
        return weakref.ref(file)

    assert_freed(scenario)


@pytest.mark.parametrize("shape", [(6, WIDTH), (5, WIDTH)])
def test_what_is_no_longer_there_or_another_is_encoded(shape: tuple[int, int]) -> None:
    async def scenario() -> None:
        async with setting() as given:
            image = given.offered()
            if shape == (6, WIDTH):
                given.store._offers.clear()
            missing, received = Missing(FirstTokenClock()), ReceivedEmbeddings()
            await given.receiver.receive([Deferred(image)], [shape], received)
            missing.digests.add(image.digest)
            missing.changed.set()
            with pytest.raises(NotEncodedError):
                await given.receiver.receive_missing(missing, [image.digest], [shape], received)
            assert len(given.receiver._granted) == 0

    run(scenario())


def test_an_event_stream_that_begins_before_its_first_token_is_held_back() -> None:
    """vLLM's streams of responses begin with an event before the request is scheduled. It was sent at once, so that an
    image of an earlier turn that the prefix cache had lost ended the stream with an error."""

    async def begun() -> AsyncGenerator[str, None]:
        yield "created"
        await first_token.wait()
        yield "token"

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        told: list[str] = []
        lost: asyncio.Future[NoReturn] = loop.create_future()
        loop.call_later(0.05, lost.set_exception, NotEncodedError(1))
        with pytest.raises(NotEncodedError):
            await put(told, stream_unless_lost(begun(), lost, first_token, "first"))
        assert told == []
        loop.call_later(0.05, first_token.set)
        await put(told, stream_unless_lost(begun(), loop.create_future(), first_token, "first"))
        assert told == ["first", "created", "token"]

    first_token = asyncio.Event()
    run(scenario())


def test_an_answer_that_fails_fails_as_it_does() -> None:
    async def broken() -> AsyncGenerator[str, None]:
        yield "one"
        raise LookupError("broken")

    async def scenario() -> None:
        lost: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()
        told: list[str] = []
        scheduled = asyncio.Event()
        for expected in ([], ["first", "one"]):
            with pytest.raises(LookupError, match="broken"):
                await put(told, stream_unless_lost(broken(), lost, scheduled, "first"))
            assert told == expected
            scheduled.set()
        lost.set_exception(NotEncodedError(1))
        with pytest.raises(NotEncodedError):
            await put(told, stream_unless_lost(silent(), lost, asyncio.Event(), "first"))
        assert told == ["first", "one"]

    async def silent() -> AsyncGenerator[str, None]:
        await asyncio.Event().wait()
        yield "never"

    run(scenario())
