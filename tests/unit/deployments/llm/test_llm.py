"""The language model replica around a stand-in for vLLM: embeddings are checked before it, keys withdrawn after it."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import pickle
from argparse import Namespace
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from ray.exceptions import ActorUnavailableError, OwnerDiedError, RayActorError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from configs.schema import AppConfig
from deployments.common.messages import (
    Accepted,
    EncodedImage,
    EncodeTimings,
    HttpRequest,
    ImageRefused,
    ItemReference,
    NotEncoded,
    ResponseHead,
    TooEarly,
    new_key,
)
from deployments.common.replica_errors import EngineDeadError, TransferFailedError
from deployments.llm import asgi_client
from deployments.llm import deployment as llm_module
from deployments.llm.dropped_images import find_dropped_images
from deployments.llm.startup_requests import EngineLoadError
from deployments.routing.affinity import PUBLISHED_DIGESTS, Call
from deployments.routing.prefill_load import PENDING_TOKENS, RUNNING_TOKENS
from deployments.vllm import compat
from deployments.vllm.compat import AsgiApp
from deployments.vllm.connector.replica_link import LinkLostError
from encoder.item_header import ItemHeader, PromptRun, PromptUpdate
from tests.cluster.controlled import StandInLLM
from tests.unit.deployments.samples import at_once

WIDTH = 6
TIMINGS = EncodeTimings(1.0, 2.0, 3.0, 4.0, cached=False)


def replica() -> StandInLLM:
    return StandInLLM(AppConfig(), WIDTH)


def digest(value: float) -> str:
    return hashlib.sha256(str(value).encode()).hexdigest()


def encoded(value: float = 1.0, width: int = WIDTH, rows: int = 6) -> EncodedImage:
    return EncodedImage.pack(torch.full((rows, width), value), digest(value), TIMINGS)


def header(value: float = 1.0, grid: tuple[int, int, int] = (1, 4, 6)) -> ItemHeader:
    """Of `encoded`."""
    update = PromptUpdate("replace", (7,), (PromptRun(7, 6, True),))
    return ItemHeader(digest(value), "image", 6, (update,), grid)


HEADERS = [header()]


def place(item: int, label: str = "image 1 of 1") -> ItemReference:
    return ItemReference(new_key(), item, label)


def request(*places: ItemReference, roles: Sequence[str] = (), joined: bool = False, **fields: object) -> HttpRequest:
    """All images in one message of a user, or each in one of its role."""
    parts = [{"type": "image_url", "image_url": {"url": place.key}} for place in places]
    messages = [{"role": role, "content": [part]} for role, part in zip(roles, parts, strict=bool(roles))]
    body = {"messages": messages or [{"role": "user", "content": parts}], **fields}
    headers = [(b"content-type", b"application/json")]
    return HttpRequest("POST", "/v1/chat/completions", b"", headers, json.dumps(body).encode(), body_in_head=joined)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def answered(
    llm: StandInLLM,
    places: list[ItemReference],
    images: list[Any],
    headers: Sequence[ItemHeader] | None = None,
    **asked: Any,
) -> tuple[ResponseHead, Any]:
    """`headers`: by default those of embeddings of 1.0, 2.0 and so on."""
    headers = headers or [header(float(1 + number)) for number in range(len(images))]

    async def ask() -> list[Any]:
        return [piece async for piece in llm.handle(request(*places, **asked), places, headers, at_once(*images))]

    accepted, head, *chunks = asyncio.run(ask())
    assert isinstance(accepted, Accepted)
    return head, json.loads(b"".join([head.body, *chunks]))


def test_embeddings_are_there_under_their_keys_and_gone_afterwards() -> None:
    llm, places = replica(), [place(1, "image 1 of 3"), place(0, "image 2 of 3"), place(1, "image 3 of 3")]
    head, body = answered(llm, places, [encoded(1.0), encoded(2.0)], [header(1.0), header(2.0, (1, 6, 4))])
    assert head.status == 200
    assert [image["norm"] for image in body["images"]] == [12.0, 6.0, 12.0]
    assert [image["grid"] for image in body["images"]] == [[1, 6, 4], [1, 4, 6], [1, 6, 4]]
    assert "encode;dur=3.0" in dict(head.headers)[b"server-timing"].decode()
    assert llm.state()["keys"] == 0


@pytest.mark.parametrize("image", [encoded(2.0, width=WIDTH - 1), encoded(2.0, rows=5), encoded(2.0, rows=7)])
def test_an_embedding_that_does_not_fit_never_reaches_the_engine(image: EncodedImage) -> None:
    """It would kill the engine. The client is told which image, and nothing of the inside."""
    llm = replica()
    granted: list[str] = []
    grant = llm.engine.scheduler.table.grant
    llm.engine.scheduler.table.grant = lambda lease: (granted.append(lease.header.digest), grant(lease))[1]  # type: ignore[method-assign,func-returns-value]
    head, body = answered(llm, [place(0), place(1, "image 2 of 2")], [encoded(), image])
    assert head.status == 500
    assert body["error"]["code"] == "embedding_mismatch"
    assert body["error"]["message"] == "image 2 of 2: its embedding does not fit the model"
    assert image.digest not in granted
    assert llm.state()["keys"] == 0


def test_a_refused_image_is_a_400_that_names_it() -> None:
    llm = replica()
    head, body = answered(llm, [place(0), place(1, "image 2 of 2")], [encoded(), ImageRefused("truncated")])
    assert (head.status, body["error"]["message"]) == (400, "image 2 of 2: truncated")
    assert body["error"]["type"] == "invalid_request_error"
    assert llm.state()["keys"] == 0


@pytest.mark.parametrize("error", [RayActorError(), ActorUnavailableError("the node has gone", None)])
def test_where_an_encoder_failed_the_ingress_is_told_at_once_and_nothing_else(error: Exception) -> None:
    async def scenario() -> None:
        llm, places = replica(), [place(0), place(1)]
        never: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        encodings: list[Awaitable[Any]] = [never, *at_once(error)]
        pieces = llm.handle(request(*places), places, [header(1.0), header(2.0)], encodings)
        assert [piece async for piece in pieces] == [NotEncoded((1,))]
        assert (never.cancelled(), llm.state()["keys"]) == (True, 0)

    run(scenario())


def test_requests_that_wait_for_encoders_leave_places_to_others() -> None:
    """Each ingress bounded its own: those of several could fill a language model, before text and encoded images."""

    async def scenario() -> None:
        llm, places = replica(), [place(0)]
        llm._requests._max_early_requests = 1
        early = dataclasses.replace(request(*places), early_prefill=True)
        coming: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        waits = cast(AsyncGenerator[Any, None], llm.handle(early, places, HEADERS, [coming]))
        first = asyncio.ensure_future(anext(waits))
        await asyncio.sleep(0)
        never: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        assert [piece async for piece in llm.handle(early, places, HEADERS, [never])] == [TooEarly()]
        others = [(request(), []), (request(*places), at_once(encoded()))]
        for other, encodings in others:
            pieces = cast(
                AsyncGenerator[Any, None],
                llm.handle(other, places[: len(encodings)], HEADERS[: len(encodings)], encodings),
            )
            assert isinstance(await anext(pieces), Accepted)
            await pieces.aclose()
        coming.set_result(encoded())
        assert isinstance(await first, Accepted)
        pieces = cast(AsyncGenerator[Any, None], llm.handle(early, places, HEADERS, at_once(encoded())))
        assert isinstance(await anext(pieces), Accepted), "the other one does not wait any more"
        await pieces.aclose()
        await waits.aclose()

    run(scenario())


def test_half_of_the_slots_are_kept_for_requests_that_do_not_wait_for_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_module, "max_ongoing_requests", lambda: 10)
    llm, _ = started(monkeypatch, AppConfig(model="/somewhere"))
    assert llm._requests._max_early_requests == 5


def test_an_embedding_that_was_lost_on_the_way_is_told_from_one_that_was_not_made() -> None:
    with pytest.raises(TransferFailedError):
        answered(replica(), [place(0)], [OwnerDiedError("1" * 56, None, "")])


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("roles", [["system"], ["user", "system", "user"], ["user", "user", "developer", "tool"]])
def test_an_image_that_the_template_drops_is_a_400_that_names_its_message(roles: list[str], joined: bool) -> None:
    """vLLM finds fewer placeholders than images then, and fails with status 500 at the last image, whichever it was."""
    taken = ("user", "tool")
    llm = with_template(taken)
    places = [place(number) for number in range(len(roles))]
    head, body = answered(llm, places, [encoded(float(1 + n)) for n in range(len(roles))], roles=roles, joined=joined)
    first = next(number for number, role in enumerate(roles) if role not in taken)
    assert (head.status, body["error"]["type"]) == (400, "invalid_request_error")
    assert body["error"]["message"].startswith(f"messages[{first}]: ")
    assert repr(roles[first]) in body["error"]["message"]
    assert llm.state()["keys"] == 0


def test_another_failure_of_vllm_stays_what_it_is() -> None:
    head, body = answered(with_template(("user",), status=500), [place(0)], [encoded()])
    assert (head.status, body["error"]) == (500, "another")


def test_a_dropped_image_of_a_response_is_named_by_its_item() -> None:
    """Its body has no `messages`; looking for them was status 500."""
    llm = with_template(("user",))
    references = [place(number) for number in range(2)]
    images = [{"type": "input_image", "image_url": reference.key, "detail": "auto"} for reference in references]
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    words = {"type": "input_text", "text": "x"}
    output = {"type": "function_call_output", "call_id": "a", "output": [words, images[1]]}
    items = [{"role": "user", "content": [images[0]]}, call, output]
    sent = dataclasses.replace(request(), path="/v1/responses", body=json.dumps({"input": items}).encode())
    error = asyncio.run(find_dropped_images(with_references(llm, references), sent))
    assert error is not None
    assert (error.status, error.param) == (400, "input")
    assert error.message.startswith("input[2]: the model's chat template takes no images from messages of role 'tool'")


def with_references(llm: StandInLLM, references: Sequence[ItemReference]) -> AsgiApp:
    """Its application, while these references are valid."""
    for reference in references:
        llm._frontend.references.add(HEADERS[0], reference.key)
    return llm._frontend.app


def with_template(taken: Sequence[str], status: int = 200) -> StandInLLM:
    """vLLM as far as it finds images in prompts: of messages of roles in `taken`. `status`: of its other answers."""
    llm = replica()

    async def tell(asked: Request) -> Response:
        missing = []
        for message in (await asked.json())["messages"]:
            for part in message["content"]:
                if isinstance(part, dict) and part["type"] == "image_url":
                    llm._frontend.references.header(part["image_url"]["url"])
                    missing += [part] * (message["role"] not in taken)
        if missing:
            return JSONResponse({"error": "Failed to apply prompt replacement"}, 500)
        return JSONResponse({"error": "another"}, status if asked.url.path.startswith("/v1") else 200)

    routes = [Route(path, tell, methods=["POST"]) for path in ("/v1/chat/completions", "/tokenize")]
    llm._frontend.app = cast(AsgiApp, Starlette(routes=routes))
    return llm


def test_keys_that_nobody_took_are_withdrawn() -> None:
    """vLLM may refuse the request before it looks at its images."""

    async def refuse(_: Request) -> Response:
        return JSONResponse({"error": "too long"}, 400)

    llm = replica()
    llm._frontend.app = cast(AsgiApp, Starlette(routes=[Route("/v1/chat/completions", refuse, methods=["POST"])]))
    head, _ = answered(llm, [place(0)], [encoded()])
    assert head.status == 400
    assert llm.state()["keys"] == 0


def test_keys_are_withdrawn_when_the_application_fails() -> None:
    async def fail(*_: object) -> None:
        raise LookupError("broken")

    llm = replica()
    llm._frontend.app = cast(AsgiApp, fail)
    with pytest.raises(LookupError, match="broken"):
        answered(llm, [place(0)], [encoded()])
    assert llm.state()["keys"] == 0


def test_closing_a_stream_disconnects_and_withdraws() -> None:
    async def scenario() -> None:
        llm, places = replica(), [place(0)]
        stream = llm.handle(request(*places, stream=True), places, HEADERS, at_once(encoded()))
        assert isinstance(await anext(stream), Accepted)
        assert isinstance(await anext(stream), ResponseHead)
        assert cast(bytes, await anext(stream)).startswith(b"data: ")
        await stream.aclose()  # type: ignore[attr-defined]
        assert (llm.state()["disconnects"], llm.state()["keys"]) == (1, 0)

    run(scenario())


def test_the_head_waits_for_the_first_chunk_and_tells_the_time_to_the_first_token() -> None:
    async def slow(scope: object, receive: object, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]})
        clock = compat.first_token_clock.get()
        assert clock is not None
        clock.first_token_at_s = 1e9
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        await send({"type": "http.response.body", "body": b"two"})

    async def scenario() -> None:
        llm = replica()
        llm._frontend.app = cast(AsgiApp, slow)
        _, head, *chunks = [piece async for piece in llm.handle(request(), [])]
        assert isinstance(head, ResponseHead)
        assert head.headers[0] == (b"x", b"y")
        assert b"first-token;dur=" in dict(head.headers)[b"server-timing"]
        assert b"".join(cast(list[bytes], chunks)) == b"onetwo"
        assert b"" not in chunks

    run(scenario())


def test_an_ingress_that_asks_gets_head_and_body_in_one_piece() -> None:
    """Each piece is a message to another process. One of a version before does not ask, and would lose the body."""

    async def scenario() -> None:
        llm = replica()
        joined = dataclasses.replace(request(), body_in_head=True)
        accepted, head = [piece async for piece in llm.handle(joined, [])]
        assert isinstance(accepted, Accepted)
        assert isinstance(head, ResponseHead)
        assert head.complete
        assert json.loads(head.body)["images"] == []
        _, alone, *chunks = [piece async for piece in llm.handle(request(), [])]
        assert isinstance(alone, ResponseHead)
        assert (alone.body, alone.complete) == (b"", False)
        assert json.loads(b"".join(cast(list[bytes], chunks)))["images"] == []

    run(scenario())


def test_a_stream_begins_with_its_head() -> None:
    async def scenario() -> None:
        llm = replica()
        stream = llm.handle(dataclasses.replace(request(stream=True), body_in_head=True), [])
        _, head, following = await anext(stream), await anext(stream), await anext(stream)
        assert isinstance(head, ResponseHead)
        assert head.body.startswith(b"data: ")
        assert not head.complete
        assert cast(bytes, following).startswith(b"data: ")
        await stream.aclose()  # type: ignore[attr-defined]

    run(scenario())


def test_the_engine_has_the_request_while_it_is_told_that_it_is_there() -> None:
    async def scenario() -> None:
        begun = asyncio.Event()

        async def slow(scope: object, receive: object, send: object) -> None:
            begun.set()
            await asyncio.Event().wait()

        llm, places = replica(), [place(0)]
        llm._frontend.app = cast(AsgiApp, slow)
        stream = llm.handle(request(*places), places, HEADERS, at_once(encoded()))
        assert isinstance(await anext(stream), Accepted)
        await asyncio.wait_for(begun.wait(), 10)
        with mock.patch.object(asgi_client, "DISCONNECT_GRACE_S", 0.05):
            await stream.aclose()  # type: ignore[attr-defined]
        assert llm.state()["keys"] == 0
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(scenario())


def test_requests_at_the_same_time_do_not_see_each_others_embeddings() -> None:
    async def scenario() -> None:
        llm = replica()

        async def ask(value: float) -> float:
            places = [place(0)]
            _, _, *chunks = [
                piece async for piece in llm.handle(request(*places), places, [header(value)], at_once(encoded(value)))
            ]
            norm: float = json.loads(b"".join(cast(list[bytes], chunks)))["images"][0]["norm"]
            return norm

        values = [float(number) for number in range(1, 20)]
        assert await asyncio.gather(*map(ask, values)) == [6 * value for value in values]
        assert llm.state()["keys"] == 0

    run(scenario())


def test_a_replica_whose_link_to_the_engine_is_lost_fails_its_health_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """It went on as a replica whose leases never end and that maps no encoder's memory."""

    async def healthy() -> None: ...

    llm = replica()
    monkeypatch.setattr(llm, "_engine", SimpleNamespace(check_health=healthy, shutdown=lambda: None))
    asyncio.run(llm_module.LLM.check_health(llm))
    monkeypatch.setattr(llm._receiver.link._listener._thread, "is_alive", lambda: False)
    with pytest.raises(LinkLostError):
        asyncio.run(llm_module.LLM.check_health(llm))


async def no_application(*_: object) -> None:
    raise AssertionError("the engine is asked")


def failing(status: int, content_type: bytes, llm: StandInLLM) -> AsgiApp:
    """What vLLM makes of an engine that ends while it has a request."""

    async def app(scope: object, receive: object, send: Any) -> None:
        llm.engine.errored = True
        head = {"type": "http.response.start", "status": status, "headers": [(b"content-type", content_type)]}
        await send(head)
        await send(
            {"type": "http.response.body", "body": b'{"error": {"message": "EngineCore encountered an issue."}}'}
        )

    return cast(AsgiApp, app)


@pytest.mark.parametrize(("status", "content_type"), [(500, b"application/json"), (200, b"text/event-stream")])
def test_an_error_of_a_dead_engine_is_no_answer(status: int, content_type: bytes) -> None:
    """It was passed on as one, and the replica took more requests until its health checks had failed."""

    async def scenario() -> None:
        llm, places = replica(), [place(0)]
        llm._frontend.app = failing(status, content_type, llm)
        pieces = llm.handle(request(*places), places, HEADERS, at_once(encoded()))
        assert isinstance(await anext(pieces), Accepted)
        with pytest.raises(EngineDeadError) as ended:
            await anext(pieces)
        assert pickle.loads(pickle.dumps(ended.value)).had_request
        llm._frontend.app = cast(AsgiApp, no_application)
        with pytest.raises(EngineDeadError) as refused:
            await anext(llm.handle(request(), []))
        assert not refused.value.had_request
        with pytest.raises(EngineDeadError):
            llm.record_routing_stats()
        assert llm.state()["keys"] == 0

    run(scenario())


def test_an_answer_that_was_whole_when_the_engine_ended_is_told() -> None:
    llm = replica()
    head, _ = answered(llm, [], [])

    async def answer(scope: object, receive: object, send: Any) -> None:
        clock = compat.first_token_clock.get()
        assert clock is not None
        clock.tick()
        await failing(200, b"application/json", llm)(cast(Any, scope), cast(Any, receive), send)

    llm._frontend.app = cast(AsgiApp, answer)
    head, _ = answered(llm, [], [])
    assert head.status == 200


def test_a_failure_that_comes_of_a_lost_engine_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link to the engine may break before vLLM knows that it has ended. A request was then tried five times."""

    async def fail(*_: object) -> None:
        monkeypatch.setattr(llm._receiver.link._listener._thread, "is_alive", lambda: False)
        raise TransferFailedError("the engine has gone")

    llm = replica()
    llm._frontend.app = cast(AsgiApp, fail)
    with pytest.raises(EngineDeadError):
        answered(llm, [], [])


def started(
    monkeypatch: pytest.MonkeyPatch, config: AppConfig, *, hybrid: bool = False
) -> tuple[llm_module.LLM, list[dict[str, Any]]]:
    """A replica without an engine, and the bodies of its warm-up requests."""
    asked: list[dict[str, Any]] = []

    async def chat(given: Request) -> Response:
        asked.append(await given.json())
        return JSONResponse({}, 400 if "response_format" in asked[-1] else 200)  # a refusal does not end the start

    async def application(*_: object) -> Starlette:
        return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])

    async def loads(*_: object) -> None:
        return None

    engine = Namespace(model_config=Namespace(is_hybrid=hybrid))
    monkeypatch.setattr(compat, "start_engine", lambda *_, **__: (engine, Namespace(model="scenes")))
    monkeypatch.setattr(compat, "build_application", application)
    monkeypatch.setattr(compat, "embedding_width", lambda _: WIDTH)
    monkeypatch.setattr(compat, "one_token_header", lambda *_: header())
    monkeypatch.setattr(compat, "has_prefix_cache", lambda _: True)
    monkeypatch.setattr(llm_module, "guard_children", lambda: None)
    monkeypatch.setattr(llm_module, "local_model", lambda model: model)
    monkeypatch.setattr(llm_module, "resolve_checkpoint", lambda model: model)
    monkeypatch.setattr(llm_module, "tower_identity", lambda folder: "")
    monkeypatch.setattr(llm_module, "probe_engine_loads", loads)

    async def start() -> llm_module.LLM:
        llm = llm_module.LLM.__new__(llm_module.LLM)
        await llm.__init__(config)  # type: ignore[misc]
        llm._engine = None  # type: ignore[assignment] # nothing to shut down
        return llm

    return asyncio.run(start()), asked


def test_it_warms_up_under_the_name_that_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `served_model_name` set, vLLM knows the model by that name alone: any other is a 404 and warms nothing."""
    _, asked = started(monkeypatch, AppConfig(model="/somewhere", transfer="object_store"))
    assert {body["model"] for body in asked} == {"scenes"}
    assert [body for body in asked if "logprobs" in body], "vLLM compiles their ranking at the first request for them"


@pytest.mark.parametrize("hybrid", [False, True])
def test_prompts_of_a_hybrid_model_are_not_prefilled_early(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hybrid: bool
) -> None:
    """The connector decides it: tests/unit/deployments/vllm/connector."""
    started(monkeypatch, AppConfig(model="/somewhere"), hybrid=hybrid)
    assert ("early prefill is disabled: some layers keep a recurrent state" in caplog.text) is hybrid


def test_an_engine_that_cannot_load_embeddings_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no other way for an image into it."""
    config = AppConfig.model_validate({"model": "/somewhere", "llm": {"engine_args": {"pipeline_parallel_size": 2}}})
    with pytest.raises(EngineLoadError, match="only the first stage of a pipeline"):
        started(monkeypatch, config)


def test_a_prompt_is_to_be_read_from_its_arrival_to_its_first_token() -> None:
    """The wait for its encoders included; what is refused is not remembered."""
    llm, call = replica(), Call("ab" * 32, cost=5000)
    held = bytes.fromhex("ab" * 4)

    async def scenario() -> None:
        coming: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        pieces = cast(AsyncGenerator[Any, None], llm.handle(request(place(0)), [place(0)], HEADERS, [coming], call))
        accepted = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0)
        assert llm.record_routing_stats() == {PENDING_TOKENS: 5000, PUBLISHED_DIGESTS: b""}
        coming.set_result(ImageRefused("truncated"))
        await accepted
        assert (await anext(pieces)).status == 400
        assert llm.record_routing_stats() == {PENDING_TOKENS: 5000, PUBLISHED_DIGESTS: b""}
        await pieces.aclose()
        assert llm.record_routing_stats() == {PENDING_TOKENS: 0, PUBLISHED_DIGESTS: b""}
        pieces = cast(AsyncGenerator[Any, None], llm.handle(request(stream=True), [], [], [], call))
        assert isinstance(await anext(pieces), Accepted)
        assert (await anext(pieces)).status == 200
        assert llm.record_routing_stats() == {PENDING_TOKENS: RUNNING_TOKENS, PUBLISHED_DIGESTS: held}
        await pieces.aclose()
        assert llm.record_routing_stats() == {PENDING_TOKENS: 0, PUBLISHED_DIGESTS: held}

    run(scenario())


def test_a_prompt_is_read_at_its_first_token_though_its_answer_is_not_streamed() -> None:
    """The head of such an answer comes at its end: a long answer's prompt counted as unread all the while."""

    async def scenario() -> None:
        llm, call = replica(), Call("ab" * 32, cost=5000)
        first_token, end = asyncio.Event(), asyncio.Event()

        async def app(scope: object, receive: object, send: Any) -> None:
            await first_token.wait()
            clock = compat.first_token_clock.get()
            assert clock is not None
            clock.tick()
            await end.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})

        llm._frontend.app = cast(AsgiApp, app)
        pieces = cast(AsyncGenerator[Any, None], llm.handle(request(), [], [], [], call))
        assert isinstance(await anext(pieces), Accepted)
        head = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0)
        assert llm.record_routing_stats()[PENDING_TOKENS] == 5000
        first_token.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert llm.record_routing_stats() == {
            PENDING_TOKENS: RUNNING_TOKENS,
            PUBLISHED_DIGESTS: bytes.fromhex("ab" * 4),
        }
        assert not head.done()
        end.set()
        assert (await head).status == 200
        await pieces.aclose()
        assert llm.record_routing_stats()[PENDING_TOKENS] == 0

    run(scenario())


def test_what_the_engine_said_last_is_reported_while_there_is_a_request() -> None:
    """An engine whose last request was given up says no more: it would seem busy for ever, and never scale down."""
    llm = replica()
    engine = llm._stats.logger(None)
    engine.record(
        SimpleNamespace(num_running_reqs=3, num_waiting_reqs=2, num_skipped_waiting_reqs=1, kv_cache_usage=0.5)
    )
    idle = {"engine_running_requests": 0.0, "engine_waiting_requests": 0.0, "kv_cache_use": 0.0}
    assert llm.record_autoscaling_stats() == idle

    async def leave_early() -> dict[str, float]:
        answer = cast(AsyncGenerator[object], llm.handle(request(), []))
        await anext(answer)
        told = llm.record_autoscaling_stats()
        await answer.aclose()
        return told

    told = asyncio.run(leave_early())
    assert told == {"engine_running_requests": 3.0, "engine_waiting_requests": 3.0, "kv_cache_use": 0.5}
    assert llm.record_autoscaling_stats() == idle
