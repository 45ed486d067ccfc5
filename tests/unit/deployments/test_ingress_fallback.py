"""The front door while no encoder is there: the language model is asked to encode, or the client is told why not."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import pytest
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import DeploymentUnavailableError

from deployments import encoder_watch
from deployments import ingress as ingress_module
from deployments.affinity import Call
from deployments.replica_errors import IdentityChangedError
from deployments.wire import HttpRequest, ImageJob, ImagePlace, NotEncoded
from tests.unit.deployments.samples import IDENTITY
from tests.unit.deployments.stand_ins import IMAGE, RETRY_AFTER_S, Method, Pieces, StandIns, always, chat, told

LOCAL = {"llm": {"fallback": "local", "fallback_after_s": 0.01}}
UNAVAILABLE = DeploymentUnavailableError(cast(Any, "Encoder"))
OTHER = dataclasses.replace(IDENTITY, forward="fused")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_watch, "PROMPT_S", 0.001)
    monkeypatch.setattr(ingress_module, "FIRST_WAIT_S", 0)


class Replies:
    """Of a broadcast."""

    def __init__(self, told: object) -> None:
        self._told = told

    async def results_async(self, **_: object) -> list[object]:
        if isinstance(self._told, Exception):
            raise self._told
        return cast(list[object], self._told)


class Cluster(StandIns):
    """`identity`: of encoders, None where nobody answers for there being none. `running`: what a broadcast gets.
    `own`: of the language model's own encoder, None where it has none."""

    def __init__(
        self,
        *answers: Pieces,
        encodings: Sequence[Pieces] = (),
        identity: object = IDENTITY,
        running: object = UNAVAILABLE,
        own: object = IDENTITY,
    ) -> None:
        super().__init__(*answers, encodings=encodings, identity=identity)
        self._running = running
        self.jobs: list[list[ImageJob]] = []
        self.encoder_identity = Method(lambda: self._own(own))

    async def _own(self, own: object) -> object:
        return own

    async def _identity(self, identity: object) -> object:
        if identity is None:
            await asyncio.Event().wait()
        return await super()._identity(identity)

    def broadcast(self, _: str) -> Replies:
        return Replies(self._running)

    def _handle(self, request: HttpRequest, places: list[ImagePlace], given: list[object], call: Call) -> Pieces:
        assert len(given) == len(places), "each image comes from an encoder, or is to be encoded"
        self.jobs.append([one for one in given if isinstance(one, ImageJob)])
        return super()._handle(request, places, given, call)


def waits() -> Pieces:
    """A call that no encoder takes."""
    call = Pieces()
    call.taken = asyncio.Event()
    return call


def ask(cluster: Cluster, *, fallback: bool = True) -> Any:
    return chat(cluster, IMAGE, limits=LOCAL if fallback else {"request_timeout_s": 0.2})


def test_without_encoders_the_language_model_gets_the_images_themselves() -> None:
    cluster = Cluster(identity=None)
    assert ask(cluster).status_code == 200
    ((job,),) = cluster.jobs
    assert job.data.startswith(b"\x89PNG")
    assert (job.identity, job.digest) == (IDENTITY.fingerprint, IDENTITY.digest(job.data, None))
    assert [place.image for place in cluster.places[0]] == [0]
    assert cluster.encodings == []


def test_encoders_that_go_after_they_were_asked_who_they_are_are_done_without() -> None:
    """The call that waited for one is taken back."""
    cluster = Cluster(encodings=[waits()])
    cluster._identity = once_then_never(cluster)  # type: ignore[method-assign]
    assert ask(cluster).status_code == 200
    assert [len(jobs) for jobs in cluster.jobs] == [1]
    assert [encoding.cancelled for encoding in cluster.encodings] == [True]


def once_then_never(cluster: Cluster) -> Any:
    answers = [IDENTITY]

    async def identity(_: object) -> object:
        if not answers:
            await asyncio.Event().wait()
        return answers.pop()

    return identity


def test_an_image_whose_encoder_dies_and_leaves_none_is_encoded_by_the_language_model() -> None:
    """First the language model finds that it failed; of the next call nobody has taken it; then it has the image."""
    cluster = Cluster(Pieces(NotEncoded(0)), encodings=[Pieces(ActorDiedError()), waits()])
    cluster._identity = once_then_never(cluster)  # type: ignore[method-assign]
    assert ask(cluster).status_code == 200
    assert [len(jobs) for jobs in cluster.jobs] == [0, 1]


def test_where_serve_has_given_up_starting_encoders() -> None:
    assert ask(Cluster(identity=UNAVAILABLE)).status_code == 200
    cluster = Cluster(encodings=[Pieces()])
    cluster._identity = once_then_never(cluster)  # type: ignore[method-assign]
    lost = cluster._encode

    def encode(job: object) -> Pieces:
        call = lost(job)
        call._to_object_ref = unavailable  # type: ignore[method-assign]
        return call

    async def unavailable() -> Pieces:
        raise UNAVAILABLE

    cluster._encode = encode  # type: ignore[method-assign]
    assert ask(cluster).status_code == 200
    assert [len(jobs) for jobs in cluster.jobs] == [1]


@pytest.mark.parametrize("running", [["identity"], [ActorDiedError(), "identity"], TimeoutError()])
def test_encoders_that_are_there_are_waited_for(running: object) -> None:
    """However busy: they have places for a bounded number of calls, and one may be slow to say that it is there."""
    cluster = Cluster(encodings=[waits()], running=running)
    response = chat(cluster, IMAGE, limits=LOCAL | {"request_timeout_s": 0.5})
    assert told(response, 504)["code"] == "timeout"
    assert cluster.jobs == []


def test_dead_encoders_that_serve_has_not_missed_yet_are_none() -> None:
    cluster = Cluster(identity=None, running=[ActorDiedError(), ActorDiedError()])
    assert ask(cluster).status_code == 200
    assert [len(jobs) for jobs in cluster.jobs] == [1]


def test_a_language_model_that_encodes_otherwise_gets_digests_of_its_own() -> None:
    """Fused kernels there and none here, say: its embeddings differ by rounding and must not pass for the others."""
    cluster = Cluster(Pieces(IdentityChangedError("another tower")), encodings=[waits()], own=OTHER)
    cluster._identity = once_then_never(cluster)  # type: ignore[method-assign]
    assert ask(cluster).status_code == 200
    assert [job.identity for (job,) in cluster.jobs] == [IDENTITY.fingerprint, OTHER.fingerprint]
    first, second = (job.digest for (job,) in cluster.jobs)
    assert first != second


def test_where_the_language_model_cannot_either_it_is_a_503() -> None:
    response = ask(Cluster(identity=None, own=None))
    assert told(response, 503)["code"] == "unavailable"
    assert response.headers["retry-after"] == str(RETRY_AFTER_S)


@pytest.mark.parametrize("cluster", [Cluster(identity=UNAVAILABLE), Cluster(*always(UNAVAILABLE))])
def test_without_the_setting_it_stays_a_503(cluster: Cluster) -> None:
    response = ask(cluster, fallback=False)
    assert told(response, 503)["code"] == "unavailable"
    assert response.headers["retry-after"] == str(RETRY_AFTER_S)
    assert not any(cluster.jobs)


def test_without_the_setting_an_encoder_is_waited_for() -> None:
    cluster = Cluster(encodings=[waits()])
    assert told(ask(cluster, fallback=False), 504)["code"] == "timeout"
    assert cluster.jobs == []


def test_text_is_answered_whatever_becomes_of_encoders() -> None:
    stand_ins = StandIns(identity=UNAVAILABLE)
    assert chat(stand_ins, "text", limits=LOCAL).status_code == 200
