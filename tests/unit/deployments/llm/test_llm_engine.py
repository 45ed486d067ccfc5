"""The engine of a language model replica: its start, its loss, and the load that it reports."""

from __future__ import annotations

import asyncio
import pickle
from argparse import Namespace
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from configs.schema import AppConfig
from deployments.common.messages import (
    Accepted,
    ImageRefused,
)
from deployments.common.replica_errors import EngineDeadError, TransferFailedError
from deployments.llm import deployment as llm_module
from deployments.llm import startup_requests
from deployments.llm.embedding_receiver import LinkLostError
from deployments.llm.startup_requests import EngineLoadError
from deployments.routing.affinity import Call
from deployments.routing.prefill_load import CONVERSATIONS, PENDING_TOKENS, RUNNING_TOKENS
from deployments.vllm import compat
from deployments.vllm.compat import AsgiApp
from tests.cluster.stand_in_llm import StandInLLM
from tests.unit.deployments.llm.stand_in_replica import (
    HEADERS,
    WIDTH,
    answered,
    encoded,
    header,
    place,
    replica,
    request,
    run,
)
from tests.unit.deployments.samples import at_once


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
    order: list[str] = []

    def start_engine(*_: object, **__: object) -> tuple[Namespace, Namespace]:
        order.append("engine")
        return engine, Namespace(model="scenes")

    monkeypatch.setattr(compat, "start_engine", start_engine)
    monkeypatch.setattr(compat, "build_application", application)
    monkeypatch.setattr(compat, "embedding_width", lambda _: WIDTH)
    monkeypatch.setattr(compat, "audio_width", lambda _: WIDTH)
    monkeypatch.setattr(compat, "one_token_header", lambda *_: header())
    monkeypatch.setattr(compat, "has_prefix_cache", lambda _: True)
    monkeypatch.setattr(llm_module, "guard_children", lambda: order.append("guard"))
    monkeypatch.setattr(llm_module, "stop_looking", lambda _: order.append("stop looking"))
    monkeypatch.setattr(llm_module, "local_model", lambda model: model)
    monkeypatch.setattr(llm_module, "uses_own_tower", lambda _: True)
    monkeypatch.setattr(llm_module, "expected_tower", lambda _: "")
    monkeypatch.setattr(llm_module, "probe_engine_loads", loads)

    async def start() -> llm_module.LLM:
        llm = llm_module.LLM.__new__(llm_module.LLM)
        await llm.__init__(config)  # type: ignore[misc]
        llm._engine = None  # type: ignore[assignment] # nothing to shut down
        return llm

    llm = asyncio.run(start())
    assert order == ["guard", "engine", "stop looking"]
    return llm, asked


def test_it_warms_up_under_the_name_that_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `served_model_name` set, vLLM knows the model by that name alone: any other is a 404 and warms nothing."""
    _, asked = started(monkeypatch, AppConfig(model="/somewhere"))
    assert {body["model"] for body in asked} == {"scenes"}
    assert [body for body in asked if "logprobs" in body], "vLLM compiles their ranking at the first request for them"


@pytest.mark.parametrize("hybrid", [False, True])
def test_prompts_of_a_hybrid_model_are_not_prefilled_early(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hybrid: bool
) -> None:
    """The connector decides it: tests/unit/deployments/vllm/connector."""
    started(monkeypatch, AppConfig(model="/somewhere"), hybrid=hybrid)
    assert ("early prefill is disabled: some layers keep a recurrent state" in caplog.text) is hybrid


def test_half_of_the_slots_are_kept_for_requests_that_do_not_wait_for_encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_module, "max_ongoing_requests", lambda: 10)
    llm, _ = started(monkeypatch, AppConfig(model="/somewhere"))
    assert llm._requests._max_early_requests == 5


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
        assert llm.record_routing_stats() == {PENDING_TOKENS: 5000, CONVERSATIONS: b""}
        coming.set_result(ImageRefused("truncated"))
        await accepted
        assert (await anext(pieces)).status == 400
        assert llm.record_routing_stats() == {PENDING_TOKENS: 5000, CONVERSATIONS: b""}
        await pieces.aclose()
        assert llm.record_routing_stats() == {PENDING_TOKENS: 0, CONVERSATIONS: b""}
        pieces = cast(AsyncGenerator[Any, None], llm.handle(request(stream=True), [], [], [], call))
        assert isinstance(await anext(pieces), Accepted)
        assert (await anext(pieces)).status == 200
        assert llm.record_routing_stats() == {PENDING_TOKENS: RUNNING_TOKENS, CONVERSATIONS: held}
        await pieces.aclose()
        assert llm.record_routing_stats() == {PENDING_TOKENS: 0, CONVERSATIONS: held}

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
            CONVERSATIONS: bytes.fromhex("ab" * 4),
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


@pytest.mark.parametrize(("known", "running"), [(True, 1.0), (False, 3.0)])
def test_requests_that_wait_for_encoders_count_as_the_engines_only_if_it_has_them(known: bool, running: float) -> None:
    """One whose header comes with its embedding is not at vLLM yet: a busy engine seemed idle, and was scaled down."""
    llm = replica()
    llm._stats.logger(None).record(
        SimpleNamespace(num_running_reqs=3, num_waiting_reqs=0, num_skipped_waiting_reqs=0, kv_cache_usage=0.5)
    )

    async def wait_for_encoders() -> dict[str, float]:
        answer = cast(AsyncGenerator[object], llm.handle(request(), []))
        await anext(answer)
        image = place(0)

        async def ask() -> None:
            encoding = asyncio.get_running_loop().create_future()
            async for _ in llm.handle(request(image), [image], [header() if known else None], [encoding]):
                pass

        asked = [asyncio.create_task(ask()) for _ in range(2)]
        await asyncio.sleep(0.1)
        told = llm.record_autoscaling_stats()
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await answer.aclose()
        return told

    assert asyncio.run(wait_for_encoders())["engine_running_requests"] == running


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


@pytest.mark.parametrize(("reported", "status", "fails"), [(True, 200, False), (False, 200, True), (True, 500, True)])
def test_a_probe_waits_for_the_report_of_its_load(
    monkeypatch: pytest.MonkeyPatch, reported: bool, status: int, fails: bool
) -> None:
    """It comes on the link's thread: an answer was there first now and then, and the replica did not start."""
    monkeypatch.setattr(startup_requests, "REPORT_TIMEOUT_S", 30.0 if reported else 0.05)
    receiver = SimpleNamespace(num_loaded=0, link=SimpleNamespace(wait_for_engine=lambda timeout_s: True))

    async def answer(*_: object) -> int:
        if reported:
            asyncio.get_running_loop().call_later(0.05, vars(receiver).update, {"num_loaded": 1})
        return status

    probe = startup_requests.probe_engine_loads(cast(Any, receiver), answer, "scenes", header(), WIDTH)
    with pytest.raises(EngineLoadError, match=f"with {status}, 0 embedd") if fails else nullcontext():
        asyncio.run(probe)
