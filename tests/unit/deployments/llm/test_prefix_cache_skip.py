"""Requests that go to the engine without an embedding, in the hope of its prefix cache: what comes of them where the
engine gets on, where it waits for the embedding, and where it comes to need it later."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from typing import Any, TypeVar, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from deployments.common.messages import PREFIX_CACHE_ONLY, Accepted, ImageJob, NotEncoded, ResponseHead, SharedEmbedding
from deployments.common.replica_errors import TransferFailedError
from deployments.llm.prefix_cache_skip import EmbeddingNeededError, MissingWatch, stream_unless_missing
from deployments.telemetry.metrics import Counter
from deployments.vllm.compat import AsgiApp, first_token_clock
from tests.cluster.controlled import StandInLLM
from tests.unit.deployments.ingress.test_embedding_directory import HOST, seen
from tests.unit.deployments.llm.test_embedding_receiver import FreeAdded, eventually
from tests.unit.deployments.llm.test_llm import digest, encoded, header, place, replica, request, run
from tests.unit.deployments.samples import at_once, png
from tests.unit.deployments.stand_ins import JSON_HEAD, Accepting, Pieces, ingress_of

DIGEST = digest(1.0)
CHAT = "/v1/chat/completions"
TEXT = {"type": "text", "text": "And now?"}

T = TypeVar("T")


def nowhere(value: float = 1.0) -> SharedEmbedding:
    """An embedding that an engine has had."""
    return encoded(value).to_shared(PREFIX_CACHE_ONLY)


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
        self.receiver._counts = self.counts = FreeAdded()
        self.receiver.has_prefix_cache = True
        self.came: list[str] = []
        self.left = asyncio.Event()
        self._then, self._at_chunk = then, at_chunk
        app = Starlette(routes=[Route(CHAT, self._chat, methods=["POST"])])
        self.llm._frontend.app = cast(AsgiApp, app)

    async def _chat(self, given: Request) -> Response:
        for part in (await given.json())["messages"][0]["content"]:
            self.came.append(self.llm._frontend.references.header(part["image_url"]["url"]).digest)
        if self._at_chunk is not None:
            return StreamingResponse(self._chunks(), media_type="text/event-stream")
        self._then()
        clock = first_token_clock.get()
        assert clock is not None
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

    def misses(self, *digests: str) -> None:
        self.receiver.missing.report(digests)

    async def answer(self, *given: Any) -> list[object]:
        places = [place(number) for number in range(len(given))]
        headers = [header(float(1 + number)) for number in range(len(given))]
        return [piece async for piece in self.llm.handle(request(*places), places, headers, given)]


async def put(told: list[T], pieces: AsyncIterable[T]) -> None:
    """One by one, so that those before an error are there."""
    async for piece in pieces:
        told.append(piece)


def test_what_the_engine_has_no_need_of_is_not_fetched() -> None:
    async def scenario() -> None:
        engine = Engine()
        accepted, head, _ = await engine.answer(nowhere(), nowhere(2.0))
        assert accepted == Accepted(engine.llm._requests.shm_host, (nowhere(), nowhere(2.0)))
        assert isinstance(head, ResponseHead)
        assert b'path;desc="prefix_cache"' in dict(head.headers)[b"server-timing"]
        assert engine.came == [digest(1.0), digest(2.0)]
        assert engine.counts.added[Counter.EMBEDDINGS_SKIPPED, None] == 2
        assert not any(count is Counter.EMBEDDINGS_RECEIVED for count, _ in engine.counts.added)
        assert (len(engine.receiver.missing), engine.llm.state()["keys"]) == (0, 0)

    run(scenario())


def test_what_the_engine_waits_for_is_to_be_encoded() -> None:
    """The ingress is told once the engine has given the request up, since it comes again with the same keys."""

    async def scenario() -> None:
        engine = Engine(lambda: engine.misses(digest(2.0)), at_chunk=0)
        assert await engine.answer(nowhere(), nowhere(2.0)) == [NotEncoded(1)]
        assert engine.left.is_set()
        assert (len(engine.receiver.missing), engine.llm.state()["keys"]) == (0, 0)
        assert not {count for count, _ in engine.counts.added} & {
            Counter.EMBEDDINGS_SKIPPED,
            Counter.EMBEDDINGS_RECEIVED,
        }

    run(scenario())


def test_what_another_request_waits_for_is_its_own() -> None:
    async def scenario() -> None:
        engine = Engine(lambda: engine.misses(digest(2.0)))
        assert isinstance((await engine.answer(nowhere()))[0], Accepted)

    run(scenario())


def test_a_prefix_that_leaves_the_cache_in_mid_answer_ends_the_answer() -> None:
    """vLLM puts requests back where its KV cache is full, and may need the image when it takes them up again."""

    async def scenario() -> None:
        engine = Engine(lambda: engine.misses(DIGEST), at_chunk=2)
        places, pieces = [place(0)], list[object]()
        with pytest.raises(TransferFailedError):
            await put(pieces, engine.llm.handle(request(*places), places, [header()], [nowhere()]))
        assert [type(piece) for piece in pieces[:2]] == [Accepted, ResponseHead]
        assert b"".join(cast(list[bytes], pieces[2:])) == b"data: 0\n\ndata: 1\n\n"
        assert engine.left.is_set()

    run(scenario())


def test_where_the_engine_keeps_no_prefixes_encoders_are_asked() -> None:
    async def scenario() -> None:
        engine = Engine()
        engine.receiver.has_prefix_cache = False
        assert await engine.answer(nowhere()) == [NotEncoded(0)]

    run(scenario())


@pytest.mark.parametrize("missed", [False, True])
def test_embeddings_that_are_skipped_and_others_mix_in_a_request(missed: bool) -> None:
    """The engine reports what it misses before the others have come; of what is being received that means nothing."""

    async def scenario() -> None:
        def then() -> None:
            engine.misses(digest(1.0), *([digest(2.0)] if missed else []))

        engine = Engine(then, at_chunk=0 if missed else None)
        pieces = await engine.answer(*at_once(encoded(1.0)), nowhere(2.0))
        assert pieces[0] == (
            NotEncoded(1) if missed else Accepted(engine.llm._requests.shm_host, (nowhere(1.0), nowhere(2.0)))
        )
        assert (len(engine.receiver.missing), engine.llm.state()["keys"]) == (0, 0)

    run(scenario())


def test_what_came_with_a_request_may_be_spared_the_next_one() -> None:
    """Where it is not in shared memory of this host: then that is the way."""

    async def scenario() -> None:
        engine = Engine()
        first = (await engine.answer(*at_once(encoded())))[0]
        assert isinstance(first, Accepted)
        assert first.locations == (nowhere(),)
        engine.receiver.has_prefix_cache = False
        assert (await engine.answer(*at_once(encoded())))[0] == Accepted(engine.llm._requests.shm_host, (None,))

    run(scenario())


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_leaves_nothing_behind(streamed: bool) -> None:
    async def scenario() -> None:
        engine = Engine(at_chunk=1) if streamed else Engine(whole_takes_long=True)
        places = [place(0)]
        handled = engine.llm.handle(request(*places), places, [header()], [nowhere()])
        answer = cast(AsyncGenerator[object], handled)
        assert isinstance(await anext(answer), Accepted), "with the first token, not with the answer's end"
        if streamed:
            assert isinstance(await anext(answer), ResponseHead)
        await answer.aclose()
        assert (len(engine.receiver.missing), engine.llm.state()["keys"], engine.left.is_set()) == (0, 0, True)

    run(scenario())


def test_only_those_who_watch_are_told() -> None:
    async def scenario() -> None:
        watch = MissingWatch()
        with watch.watch(["a", "a", "b"]) as one, watch.watch(["b"]) as other:
            one.skip(["a"])
            other.skip(["b"])
            watch.report(["c"])
            await asyncio.to_thread(watch.report, ["a"])
            watch.report(["a"])
            await eventually(one.needed.done)
            assert (one.needed.result(), other.needed.done()) == ("a", False)
        assert (len(watch), other.needed.cancelled()) == (0, True)

    run(scenario())


@given(st.permutations(["report a", "report b", "skip", "report c"]))
def test_what_is_missed_and_skipped_is_needed_whichever_comes_first(order: Sequence[str]) -> None:
    """vLLM has the request before it is known that `a` is skipped, and reports an embedding once; `b` is received."""

    async def scenario() -> None:
        watch = MissingWatch()
        with watch.watch(["a", "b"]) as missing:
            for each in order:
                if each == "skip":
                    missing.skip(["a"])
                else:
                    watch.report([each[-1]])
                await asyncio.sleep(0)
                done = order.index(each)
                expected = done >= max(order.index("skip"), order.index("report a"))
                assert missing.needed.done() == expected
            assert missing.needed.result() == "a"

    run(scenario())


def test_an_answer_that_fails_fails_as_it_does() -> None:
    async def broken() -> AsyncGenerator[str, None]:
        yield "one"
        raise LookupError("broken")

    async def scenario() -> None:
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        told: list[str] = []
        with pytest.raises(LookupError, match="broken"):
            await put(told, stream_unless_missing(broken(), never, asyncio.Event(), "first"))
        assert told == ["first", "one"]
        never.set_result("digest")
        with pytest.raises(EmbeddingNeededError, match="digest"):
            await put(told, stream_unless_missing(silent(), never, asyncio.Event(), "first"))
        assert told == ["first", "one"]

    async def silent() -> AsyncGenerator[str, None]:
        await asyncio.Event().wait()
        yield "never"

    run(scenario())


class Remembers(Accepting):
    """Language models of other hosts than the encoders': nothing is read from memory, engines keep prefixes."""

    def accepted(self) -> Accepted:
        digests = [one.digest if isinstance(one, SharedEmbedding) else self._job(one).digest for one in self.given[-1]]
        return Accepted(HOST, tuple(seen(digest, server=PREFIX_CACHE_ONLY) for digest in digests))

    def _job(self, call: object) -> ImageJob:
        return next(job for job, made in zip(self.jobs, self.encodings, strict=True) if made is call)

    @property
    def sent(self) -> list[list[type]]:
        """What each call of a language model came with."""
        return [[type(one) for one in given] for given in self.given]


def picture(colour: int) -> dict[str, object]:
    file = base64.b64encode(png(colour=(colour, 0, 0))).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{file}"}}


def asked_in_turn(stand_ins: Remembers, *conversations: Sequence[Sequence[object]], **limits: Any) -> list[int]:
    """The status of each request to one ingress; a request is what its user says, turn by turn."""

    async def ask() -> list[int]:
        ingress = ingress_of(stand_ins, **limits)
        statuses = []
        for said in conversations:
            messages = [{"role": "user", "content": content} for content in said]
            body = json.dumps({"messages": messages}).encode()
            scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": []}

            async def receive(body: bytes = body) -> dict[str, Any]:
                return {"type": "http.request", "body": body}

            statuses.append((await ingress(Request(scope, receive))).status_code)
        return statuses

    return asyncio.run(ask())


def test_a_later_turn_asks_the_engine_before_an_encoder() -> None:
    remembers, first = Remembers(), [picture(1)]
    assert asked_in_turn(remembers, [first], [first, [TEXT]], [first, [TEXT], [TEXT]]) == [200] * 3
    assert remembers.sent == [[Pieces], [SharedEmbedding], [SharedEmbedding]]
    known = remembers.given[-1][0]
    assert isinstance(known, SharedEmbedding)
    assert (known.server, known.timings.cached, len(remembers.jobs)) == (PREFIX_CACHE_ONLY, True, 1)


def test_a_wrong_guess_is_made_once_for_a_conversation() -> None:
    """Its prompt may end in the image's block, or the KV cache hold too little."""
    gone = Pieces(NotEncoded(0))
    remembers, turn = Remembers(Pieces(JSON_HEAD, b"{}"), gone), [[picture(1)]]
    other = [[TEXT, picture(1)]]
    assert asked_in_turn(remembers, turn, turn, turn, turn, other, other) == [200] * 6
    assert remembers.sent == [[Pieces], [SharedEmbedding], *[[Pieces]] * 4, [SharedEmbedding]]
    assert not any(encoding.cancelled for encoding in remembers.encodings)


@pytest.mark.parametrize("limits", [{}, {"embedding_directory_entries": 0}])
def test_another_conversation_has_another_prefix(limits: dict[str, int]) -> None:
    remembers, image = Remembers(), picture(1)
    said: list[list[list[object]]] = [[[image]], [[TEXT, image]]] if not limits else [[[image]], [[image]]]
    assert asked_in_turn(remembers, *said, **limits) == [200] * 2
    assert remembers.sent == [[Pieces], [Pieces]]


def test_a_turn_with_a_new_image_asks_encoders_for_all() -> None:
    """vLLM takes a request's embeddings with it, or none of them."""
    remembers, first, second = Remembers(), [picture(1)], [picture(2)]
    assert asked_in_turn(remembers, [first], [first, second], [first, second]) == [200] * 3
    assert remembers.sent == [[Pieces], [Pieces] * 2, [SharedEmbedding] * 2]


def test_a_client_sees_nothing_of_a_prefix_that_left_in_mid_answer() -> None:
    broken = Pieces(Accepted(HOST), TransferFailedError("the prefix has gone"))
    remembers, turn = Remembers(Pieces(JSON_HEAD, b"{}"), broken), [[picture(1)]]
    assert asked_in_turn(remembers, turn, turn) == [200] * 2
    assert remembers.sent == [[Pieces], [SharedEmbedding], [Pieces]]
