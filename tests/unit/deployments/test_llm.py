"""The language model replica around a stand-in for vLLM: embeddings are checked before it, keys withdrawn after it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from argparse import Namespace
from collections.abc import AsyncGenerator, Coroutine
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
from deployments import asgi, vllm_compat
from deployments import llm as llm_module
from deployments.affinity import HELD, Call
from deployments.media_keys import new_key
from deployments.prompt_work import RUNNING_TOKENS, WORK
from deployments.replica_errors import TransferFailedError
from deployments.vllm_compat import AsgiApp
from deployments.wire import (
    Accepted,
    EncodedImage,
    EncodeTimings,
    HttpRequest,
    ImagePlace,
    ImageRefused,
    NotEncoded,
    ResponseHead,
)
from tests.unit.deployments.controlled import StandInLLM
from tests.unit.deployments.samples import at_once

WIDTH, MERGE = 6, 2
TIMINGS = EncodeTimings(1.0, 2.0, 3.0, 4.0, cached=False)


def replica() -> StandInLLM:
    return StandInLLM(AppConfig(), WIDTH, MERGE)


def encoded(value: float = 1.0, width: int = WIDTH, grid: tuple[int, int, int] = (1, 4, 6)) -> EncodedImage:
    return EncodedImage.pack(torch.full((6, width), value), grid, f"digest {value}", TIMINGS)


def place(image: int, label: str = "image 1 of 1") -> ImagePlace:
    return ImagePlace(new_key(), new_key(), image, label)


def request(*places: ImagePlace, **fields: object) -> HttpRequest:
    parts = [
        {
            "type": "image_embeds",
            "image_embeds": {"image_embeds": place.tokens_key, "image_grid_thw": place.grid_key},
            "uuid": "u",
        }
        for place in places
    ]
    body = {"messages": [{"role": "user", "content": parts}], **fields}
    headers = [(b"content-type", b"application/json")]
    return HttpRequest("POST", "/v1/chat/completions", b"", headers, json.dumps(body).encode())


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def answered(llm: StandInLLM, places: list[ImagePlace], images: list[Any]) -> tuple[ResponseHead, Any]:
    async def ask() -> list[Any]:
        return [piece async for piece in llm.handle(request(*places), places, at_once(*images))]

    accepted, head, *chunks = asyncio.run(ask())
    assert isinstance(accepted, Accepted)
    return head, json.loads(b"".join(chunks))


def test_embeddings_are_there_under_their_keys_and_gone_afterwards() -> None:
    llm, places = replica(), [place(1, "image 1 of 3"), place(0, "image 2 of 3"), place(1, "image 3 of 3")]
    head, body = answered(llm, places, [encoded(1.0), encoded(2.0, grid=(1, 6, 4))])
    assert head.status == 200
    assert [image["norm"] for image in body["images"]] == [12.0, 6.0, 12.0]
    assert [image["grid"] for image in body["images"]] == [[1, 6, 4], [1, 4, 6], [1, 6, 4]]
    assert "encode;dur=3.0" in dict(head.headers)[b"server-timing"].decode()
    assert llm.state()["keys"] == 0


@pytest.mark.parametrize(
    "image", [encoded(width=WIDTH - 1), encoded(grid=(1, 4, 8)), encoded(grid=(1, 3, 8)), encoded(grid=(0, 4, 6))]
)
def test_an_embedding_that_does_not_fit_never_reaches_the_engine(image: EncodedImage) -> None:
    """It would kill the engine. The client is told which image, and nothing of the inside."""
    llm = replica()
    called: list[object] = []
    llm._answers.app = cast(AsgiApp, lambda *_: called.append(1))
    head, body = answered(llm, [place(0), place(1, "image 2 of 2")], [encoded(), image])
    assert head.status == 500
    assert body["error"]["code"] == "embedding_mismatch"
    assert body["error"]["message"] == "image 2 of 2: its embedding does not fit the model"
    assert called == []
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
        pieces = llm.handle(request(*places), places, [never, *at_once(error)])
        assert [piece async for piece in pieces] == [NotEncoded(1)]
        assert (never.cancelled(), llm.seen.calls, llm.state()["keys"]) == (True, 0, 0)

    run(scenario())


def test_an_embedding_that_was_lost_on_the_way_is_told_from_one_that_was_not_made() -> None:
    with pytest.raises(TransferFailedError):
        answered(replica(), [place(0)], [OwnerDiedError("1" * 56, None, "")])


def test_keys_that_nobody_took_are_withdrawn() -> None:
    """vLLM may refuse the request before it looks at its images."""

    async def refuse(_: Request) -> Response:
        return JSONResponse({"error": "too long"}, 400)

    llm = replica()
    llm._answers.app = cast(AsgiApp, Starlette(routes=[Route("/v1/chat/completions", refuse, methods=["POST"])]))
    head, _ = answered(llm, [place(0)], [encoded()])
    assert head.status == 400
    assert llm.state()["keys"] == 0


def test_keys_are_withdrawn_when_the_application_fails() -> None:
    async def fail(*_: object) -> None:
        raise LookupError("broken")

    llm = replica()
    llm._answers.app = cast(AsgiApp, fail)
    with pytest.raises(LookupError, match="broken"):
        answered(llm, [place(0)], [encoded()])
    assert llm.state()["keys"] == 0


def test_closing_a_stream_disconnects_and_withdraws() -> None:
    async def scenario() -> None:
        llm, places = replica(), [place(0)]
        stream = llm.handle(request(*places, stream=True), places, at_once(encoded()))
        assert isinstance(await anext(stream), Accepted)
        assert isinstance(await anext(stream), ResponseHead)
        assert cast(bytes, await anext(stream)).startswith(b"data: ")
        await stream.aclose()  # type: ignore[attr-defined]
        assert (llm.state()["disconnects"], llm.state()["keys"]) == (1, 0)

    run(scenario())


def test_the_head_waits_for_the_first_chunk_and_tells_the_time_to_the_first_token() -> None:
    async def slow(scope: object, receive: object, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]})
        clock = vllm_compat.first_token_clock.get()
        assert clock is not None
        clock.first_token_at_s = 1e9
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        await send({"type": "http.response.body", "body": b"two"})

    async def scenario() -> None:
        llm = replica()
        llm._answers.app = cast(AsgiApp, slow)
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
        joined = dataclasses.replace(request(), joined=True)
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
        stream = llm.handle(dataclasses.replace(request(stream=True), joined=True), [])
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
        llm._answers.app = cast(AsgiApp, slow)
        stream = llm.handle(request(*places), places, at_once(encoded()))
        assert isinstance(await anext(stream), Accepted)
        await asyncio.wait_for(begun.wait(), 10)
        with mock.patch.object(asgi, "DISCONNECT_GRACE_S", 0.05):
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
            _, _, *chunks = [piece async for piece in llm.handle(request(*places), places, at_once(encoded(value)))]
            norm: float = json.loads(b"".join(cast(list[bytes], chunks)))["images"][0]["norm"]
            return norm

        values = [float(number) for number in range(1, 20)]
        assert await asyncio.gather(*map(ask, values)) == [6 * value for value in values]
        assert llm.state()["keys"] == 0

    run(scenario())


def test_it_warms_up_under_the_name_that_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `served_model_name` set, vLLM knows the model by that name alone: any other is a 404 and warms nothing."""
    asked: list[str] = []

    async def chat(given: Request) -> Response:
        asked.append((await given.json())["model"])
        return JSONResponse({})

    async def application(*_: object) -> Starlette:
        return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])

    monkeypatch.setattr(vllm_compat, "start_engine", lambda *_, **__: (None, Namespace(model="scenes")))
    monkeypatch.setattr(vllm_compat, "build_application", application)
    monkeypatch.setattr(vllm_compat, "embedding_shape", lambda _: vllm_compat.EmbeddingShape(WIDTH, MERGE))
    monkeypatch.setattr(vllm_compat, "caches_prefixes", lambda _: True)
    monkeypatch.setattr(llm_module, "guard_children", lambda: None)
    monkeypatch.setattr(llm_module, "local_model", lambda model: model)

    async def start() -> None:
        llm = llm_module.LLM.__new__(llm_module.LLM)
        await llm.__init__(AppConfig(model="/somewhere", transfer="object_store"))  # type: ignore[misc]
        llm._engine = None  # type: ignore[assignment] # nothing to shut down

    asyncio.run(start())
    assert asked == ["scenes"]


def test_a_prompt_is_to_be_read_from_its_arrival_to_its_first_token() -> None:
    """The wait for its encoders included; what is refused is not remembered."""
    llm, call = replica(), Call("ab" * 32, cost=5000)
    held = bytes.fromhex("ab" * 4)

    async def scenario() -> None:
        coming: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        pieces = cast(AsyncGenerator[Any, None], llm.handle(request(place(0)), [place(0)], [coming], call))
        accepted = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0)
        assert llm.record_routing_stats() == {WORK: 5000, HELD: b""}
        coming.set_result(ImageRefused("truncated"))
        await accepted
        assert (await anext(pieces)).status == 400
        assert llm.record_routing_stats() == {WORK: 5000, HELD: b""}
        await pieces.aclose()
        assert llm.record_routing_stats() == {WORK: 0, HELD: b""}
        pieces = cast(AsyncGenerator[Any, None], llm.handle(request(stream=True), [], [], call))
        assert isinstance(await anext(pieces), Accepted)
        assert (await anext(pieces)).status == 200
        assert llm.record_routing_stats() == {WORK: RUNNING_TOKENS, HELD: held}
        await pieces.aclose()
        assert llm.record_routing_stats() == {WORK: 0, HELD: held}

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
