"""The front door when replicas fail or clients leave: what is tried again, what is told, and what is cancelled."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any, cast

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ObjectStoreFullError,
    OutOfDiskError,
    RayActorError,
)
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.requests import Request

from deployments.common.api_error import ApiError, OverloadedError
from deployments.common.messages import Accepted, NotEncoded, TooEarly
from deployments.common.replica_errors import (
    EngineDeadError,
    IdentityGoneError,
    OtherIdentityError,
    QueueFullError,
    TransferFailedError,
    WorkerEndedError,
)
from deployments.ingress import attempt
from deployments.ingress.failures import MAX_ATTEMPTS
from deployments.routing.affinity import Call
from deployments.telemetry.metrics import Counter, Counters
from tests.unit.deployments.samples import IDENTITY
from tests.unit.deployments.stand_ins import (
    IMAGE,
    JSON_HEAD,
    RETRY_AFTER_S,
    SSE_HEAD,
    Pieces,
    StandIns,
    always,
    chat,
    ingress_of,
    told,
)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is gained here by waiting before a request is tried again."""
    monkeypatch.setattr(attempt, "FIRST_RETRY_DELAY_S", 0)


@pytest.mark.parametrize("error", [RayActorError(), ActorDiedError()])
def test_a_request_at_which_replicas_end_is_given_to_two_of_them(error: Exception) -> None:
    stand_ins = StandIns(*always(Accepted(), error))
    assert told(chat(stand_ins, "text"), 503)["code"] == "replica_lost"
    assert len(stand_ins.requests) == 2


@pytest.mark.parametrize(("ended", "status", "tries"), [(1, 200, 2), (2, 503, 2)])
def test_a_request_at_which_engines_end_is_given_to_two_of_them(ended: int, status: int, tries: int) -> None:
    """It was answered with the first one's error; what ends engines would otherwise end five."""
    stand_ins = StandIns(*(Pieces(Accepted(), EngineDeadError(name, True)) for name in "ab"[:ended]))
    assert chat(stand_ins, "text").status_code == status
    assert (len(stand_ins.requests), stand_ins.failed) == (tries, ["a", "b"][:ended])


@pytest.mark.parametrize(
    ("answer", "encoding", "encoder_attempts", "llm_attempt"),
    [
        (Pieces(Accepted(), RayActorError()), None, [0, 0], 1),
        (Pieces(Accepted(), EngineDeadError("a", True)), None, [0, 0], 1),
        (Pieces(RayActorError()), None, [0], 1),
        (Pieces(NotEncoded((0,))), Pieces(RayActorError()), [0, 1], 0),
        (Pieces(TransferFailedError("gone")), None, [0, 1], 1),
    ],
)
def test_only_what_was_lost_is_avoided(
    answer: Pieces, encoding: Pieces | None, encoder_attempts: list[int], llm_attempt: int
) -> None:
    """After the loss of a language model, the encoder that had the embedding was avoided, and another one encoded. What
    the lost one had not accepted is passed on."""
    stand_ins = StandIns(answer, encodings=[encoding] if encoding else [])
    assert chat(stand_ins, IMAGE).status_code == 200
    attempts = {
        name: [Call.from_session_id(label).attempt for label in found] for name, found in stand_ins.labels.items()
    }
    assert attempts == {"encode": encoder_attempts, "plan": [], "handle": [0, llm_attempt]}


def test_what_a_dead_engine_has_not_had_goes_on_to_the_next() -> None:
    stand_ins = StandIns(*(Pieces(EngineDeadError(name, False)) for name in "abc"))
    assert (chat(stand_ins, "text").status_code, stand_ins.failed) == (200, ["a", "b", "c"])


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (QueueFullError("12 tokens wait"), 503, "overloaded"),
        (BackPressureError(num_queued_requests=3, max_queued_requests=2), 503, "overloaded"),
        (RayActorError(), 503, "replica_lost"),
        (ActorDiedError(), 503, "replica_lost"),
        (WorkerEndedError("ended"), 503, "replica_lost"),
        (ObjectStoreFullError(), 503, "overloaded"),
        (OutOfDiskError(), 503, "overloaded"),
        (DeploymentUnavailableError(cast(Any, "LLM")), 503, "unavailable"),
        (RuntimeError("secret: /path 0x7f"), 500, "internal_error"),
        (TimeoutError(), 504, "timeout"),
        (ApiError(418, "short and stout", code="teapot"), 418, "teapot"),
        (OverloadedError("the queue is full", retry_after_s=RETRY_AFTER_S), 503, "overloaded"),
    ],
)
def test_what_clients_are_told_when_a_replica_fails(error: Exception, status: int, code: str) -> None:
    """At whichever call it fails: for the answer to images, for the answer to text."""
    failing = [StandIns(*always(error)), StandIns(*always(error))]
    responses = [chat(failing[0], IMAGE), chat(failing[1], "text")]
    for response in responses:
        assert told(response, status)["code"] == code
        assert "secret" not in response.text
        assert response.headers.get("retry-after") == (str(RETRY_AFTER_S) if status == 503 else None)
    assert all(encoding.cancelled for encoding in failing[0].encodings)


def test_the_death_of_an_encoder_inside_another_error_is_a_503() -> None:
    wrapped = RuntimeError("the arguments could not be resolved")
    wrapped.__cause__ = RayActorError()
    assert told(chat(StandIns(*always(wrapped)), IMAGE), 503)["code"] == "replica_lost"


def test_a_request_that_takes_too_long_is_a_504_and_is_cancelled() -> None:
    answer = Pieces(asyncio.Event())
    response = chat(StandIns(answer), IMAGE, limits={"request_timeout_s": 2.0})
    assert "longer than 2 s" in told(response, 504)["message"]
    assert answer.cancelled


def test_what_a_lost_replica_worked_on_is_done_again() -> None:
    """The encoder goes on for the second try, the one that has the image is asked again for the third, and another
    language model is called with all of it."""
    stand_ins = StandIns(Pieces(RayActorError()), Pieces(JSON_HEAD, b'{"half":', RayActorError()))
    response = chat(stand_ins, {"type": "text", "text": "x"}, IMAGE)
    assert (response.status_code, response.json()) == (200, {})
    first, second, third = stand_ins.requests
    assert first == second == third
    assert [Call.from_session_id(label).attempt for label in stand_ins.labels["encode"]] == [0, 0]
    assert [Call.from_session_id(label).attempt for label in stand_ins.labels["handle"]] == [0, 1, 2]
    assert len({Call.from_session_id(label).key for label in stand_ins.labels["encode"]}) == 1
    assert not any(encoding.cancelled for encoding in stand_ins.encodings)


def test_a_request_that_ends_replicas_does_not_end_them_all() -> None:
    stand_ins = StandIns(*always(RayActorError()), *always(RayActorError()))
    assert told(chat(stand_ins, IMAGE), 503)["code"] == "replica_lost"
    assert (len(stand_ins.requests), len(stand_ins.encodings)) == (MAX_ATTEMPTS, 1)
    assert stand_ins.encodings[0].cancelled


def test_a_stream_that_has_begun_is_not_begun_again() -> None:
    stand_ins = StandIns(Pieces(SSE_HEAD, b"data: 1\n\n", RayActorError()))
    chat(stand_ins, "text")
    assert len(stand_ins.requests) == 1


@pytest.mark.parametrize("error", [QueueFullError("12 tokens wait"), RuntimeError("x"), ApiError(500, "y")])
def test_what_did_not_lose_a_replica_is_not_tried_again(error: Exception) -> None:
    stand_ins = StandIns(Pieces(error))
    assert chat(stand_ins, IMAGE).status_code >= 500
    assert len(stand_ins.requests) == 1


@pytest.mark.parametrize("error", [RayActorError(), ActorUnavailableError("the node has gone", None)])
def test_an_image_that_a_lost_encoder_had_is_encoded_again(error: Exception) -> None:
    """The language model finds that it failed; the reference tells the ingress why."""
    stand_ins = StandIns(Pieces(NotEncoded((0,))), encodings=[Pieces(error)])
    assert (chat(stand_ins, IMAGE).status_code, len(stand_ins.encodings)) == (200, 2)


@pytest.mark.parametrize(("error", "status"), [(QueueFullError("12 tokens wait"), 503), (RuntimeError("secret"), 500)])
def test_what_an_encoder_failed_with_is_told(error: Exception, status: int) -> None:
    stand_ins = StandIns(Pieces(NotEncoded((0,))), encodings=[Pieces(error)])
    response = chat(stand_ins, IMAGE)
    told(response, status)
    assert "secret" not in response.text
    assert (len(stand_ins.requests), [encoding.cancelled for encoding in stand_ins.encodings]) == (1, [True])


def test_a_refusal_by_an_encoder_of_another_identity_is_tried_elsewhere() -> None:
    """The retry had the same attempt, went to the same replica and was refused again: 503."""
    stand_ins = StandIns(Pieces(NotEncoded((0,))), encodings=[Pieces(OtherIdentityError("other weights"))])
    assert chat(stand_ins, IMAGE).status_code == 200
    calls = [Call.from_session_id(label) for label in stand_ins.labels["encode"]]
    assert [(call.attempt, call.identity) for call in calls] == [(0, IDENTITY.fingerprint), (1, IDENTITY.fingerprint)]


def test_jobs_are_made_anew_where_the_last_encoder_of_their_identity_has_gone() -> None:
    updated = dataclasses.replace(IDENTITY, forward="fused")

    class Updated(StandIns):
        def _handle(self, *arguments: Any) -> Pieces:
            self.run(updated)
            return super()._handle(*arguments)

    stand_ins = Updated(Pieces(IdentityGoneError("none")))
    assert chat(stand_ins, IMAGE).status_code == 200
    calls = [Call.from_session_id(label) for label in stand_ins.labels["encode"]]
    assert [call.identity for call in calls] == [IDENTITY.fingerprint, updated.fingerprint]
    assert calls[0].key != calls[1].key


def test_an_encoder_deployment_that_has_failed_is_a_503() -> None:
    stand_ins = StandIns()
    stand_ins.run(available=False)
    assert told(chat(stand_ins, IMAGE), 503)["code"] == "unavailable"


def test_no_language_model_is_called_before_an_encoder_has_each_image() -> None:
    """Its call takes references, which there are from then on. Whoever leaves before leaves nothing behind."""
    never = Pieces()
    never.taken = asyncio.Event()
    stand_ins = StandIns(encodings=[never])
    told(chat(stand_ins, IMAGE, limits={"request_timeout_s": 2.0}), 504)
    assert (stand_ins.requests, never.cancelled) == ([], True)


def test_what_comes_too_early_for_a_language_model_comes_again_once_it_is_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[Counter] = []
    monkeypatch.setattr(Counters, "add", lambda _, counter, *more, **labels: counted.append(counter))
    slow = Pieces()
    slow.there = asyncio.Event()
    stand_ins = StandIns(Pieces(TooEarly()), encodings=[slow])
    told(chat(stand_ins, IMAGE, limits={"request_timeout_s": 2.0}), 504)
    assert ([request.early_prefill for request in stand_ins.requests], slow.cancelled) == ([True], True)
    stand_ins = StandIns(Pieces(TooEarly()))
    assert chat(stand_ins, IMAGE).status_code == 200
    assert [request.early_prefill for request in stand_ins.requests] == [True, False]
    assert counted.count(Counter.EARLY_PREFILLS_DEFERRED) == 2, "once each"
    assert len(stand_ins.encodings) == 1


def two_at_once(stand_ins: StandIns, leaves: bool) -> tuple[int, int]:
    """Two requests with one image, the second while the first waits; `leaves`: the first client does not wait."""

    async def ask() -> tuple[int, int]:
        ingress = ingress_of(stand_ins)
        body = json.dumps({"messages": [{"role": "user", "content": [IMAGE]}]}).encode()
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": []}

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        tasks = []
        for _ in range(2):
            tasks.append(asyncio.create_task(ingress(Request(scope, receive))))
            while len(stand_ins.requests) < len(tasks):  # noqa: ASYNC110  # a stand-in has no event for it
                await asyncio.sleep(0)
        if leaves:
            tasks[0].cancel()
            await asyncio.wait([tasks[0]])
            assert not stand_ins.encodings[0].cancelled
            if not tasks[0].cancelled():
                raise AssertionError("it went on")
        gate.set()
        codes = [0 if task.cancelled() else task.result().status_code for task in (await asyncio.wait(tasks))[0]]
        return min(codes), max(codes)

    gate = asyncio.Event()
    stand_ins.answers = [Pieces(gate, JSON_HEAD, b"{}"), Pieces(gate, JSON_HEAD, b"{}")]
    return asyncio.run(ask())


def test_two_who_ask_for_an_image_at_once_share_its_encoding() -> None:
    stand_ins = StandIns()
    assert two_at_once(stand_ins, leaves=False) == (200, 200)
    assert len(stand_ins.encodings) == 1
    assert stand_ins.labels["encode"] != []


def test_one_who_leaves_does_not_take_anothers_encoding_away() -> None:
    stand_ins = StandIns()
    assert two_at_once(stand_ins, leaves=True) == (0, 200)
    assert len(stand_ins.encodings) == 1
    assert not stand_ins.encodings[0].cancelled


def test_a_stream_that_breaks_off_says_so_in_the_stream() -> None:
    answer = Pieces(SSE_HEAD, b"data: 1\n\n", RayActorError())
    response = chat(StandIns(answer), "text")
    first, error, _ = response.text.split("\n\n")
    assert first == "data: 1"
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert answer.cancelled


def test_a_stream_over_its_time_says_so_in_the_stream() -> None:
    answer = Pieces(SSE_HEAD, b"data: 1\n\n", asyncio.Event())
    response = chat(StandIns(answer), "text", limits={"request_timeout_s": 2.0})
    assert json.loads(response.text.split("data: ")[2])["error"]["code"] == "timeout"
    assert answer.cancelled


def test_an_answer_that_breaks_off_does_not_end_as_if_it_were_whole() -> None:
    answers = always(JSON_HEAD, b'{"half":', RayActorError())
    assert told(chat(StandIns(*answers), "text"), 503)["code"] == "replica_lost"
    assert [answer.cancelled for answer in answers] == [True, True, False, False, False], "two language models had it"
