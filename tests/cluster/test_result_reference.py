"""References to results of Ray's calls that are sent as bytes, as in a call by gRPC, and awaited in another process.

Serve's calls yield: first whether the replica has accepted the call, then the result. So do those of `Encoder`.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayTaskError

from deployments.common import ray_private
from deployments.common.ray_private import ResultReference
from tests.cluster.served import Cluster
from tests.waiting import until

pytestmark = pytest.mark.slow

SMALL, LARGE = 10, 2**21
"""Bytes of a result that its caller holds, and of one in Ray's object store."""
LIMIT_S = 60


class _Encoder:
    """Answers once it is told to."""

    def __init__(self) -> None:
        self._goes_on = asyncio.Event()

    async def encode(self, num_bytes: int) -> AsyncIterator[bytes]:
        yield b"accepted"
        await self._goes_on.wait()
        if not num_bytes:
            raise ValueError("no image")
        yield bytes(num_bytes)

    async def go_on(self) -> None:
        self._goes_on.set()


class _LanguageModel:
    async def receive(self, *sent: bytes) -> list[int]:
        references = [pickle.loads(one) for one in sent]
        self._most_known = num_known([one.reference.hex() for one in references])
        return [len(await one) for one in references]

    async def most_known(self) -> int:
        return self._most_known

    async def num_known(self, references: list[str]) -> int:
        """How many of the references this process knows."""
        return num_known(references)


Encoder: Any = ray.remote(num_cpus=0)(_Encoder)
LanguageModel: Any = ray.remote(num_cpus=0)(_LanguageModel)


class Result:
    """Of a call, as Serve holds it: without its generator, Ray drops what the call yields."""

    def __init__(self, encoder: Any, num_bytes: int) -> None:
        self._generator = encoder.encode.options(num_returns="streaming").remote(num_bytes)
        assert ray.get(next(self._generator), timeout=LIMIT_S) == b"accepted"
        (self.reference,) = self._generator._get_next_ref_n(1)

    @property
    def sent(self) -> bytes:
        return pickle.dumps(ResultReference(self.reference))


def num_known(references: list[str]) -> int:
    known = ray_private._core_worker().get_all_reference_counts()
    return len({name.decode() for name in known} & {*references})


@pytest.fixture
def encoder(cluster: Cluster) -> Any:
    return Encoder.remote()


def test_a_result_is_received_that_was_not_there_when_its_reference_was_sent(encoder: Any) -> None:
    results = [Result(encoder, num_bytes) for num_bytes in (SMALL, LARGE)]
    received = LanguageModel.remote().receive.remote(*[result.sent for result in results])
    with pytest.raises(GetTimeoutError):
        ray.get(received, timeout=1)
    ray.get(encoder.go_on.remote())
    assert ray.get(received, timeout=LIMIT_S) == [SMALL, LARGE]


def test_a_result_is_received_that_was_there_already(encoder: Any) -> None:
    ray.get(encoder.go_on.remote())
    results = [Result(encoder, num_bytes) for num_bytes in (SMALL, LARGE)]
    ray.get([result.reference for result in results], timeout=LIMIT_S)
    language_model, sent = LanguageModel.remote(), [result.sent for result in results]
    for _ in range(2):  # a reference can be sent again, after the first receiver has let go of its own
        assert ray.get(language_model.receive.remote(*sent), timeout=LIMIT_S) == [SMALL, LARGE]


def test_errors_reach_the_receiver_as_they_reach_a_caller(encoder: Any) -> None:
    failing, ending = Result(encoder, 0), Encoder.remote()
    lost, language_model = Result(ending, SMALL), LanguageModel.remote()
    received = [language_model.receive.remote(one.sent) for one in (failing, lost)]
    ray.get(encoder.go_on.remote())
    for failed in (received[0], language_model.receive.remote(failing.sent)):  # before it has failed, and after that
        with pytest.raises(RayTaskError, match="no image"):
            ray.get(failed, timeout=LIMIT_S)
    ray.kill(ending)
    with pytest.raises(RayTaskError, match="ActorDiedError"):
        ray.get(received[1], timeout=LIMIT_S)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_result_that_its_caller_gave_up_is_lost(encoder: Any, is_there: bool) -> None:
    """And is not waited for."""
    if is_there:
        ray.get(encoder.go_on.remote())
    result, language_model = Result(encoder, LARGE), LanguageModel.remote()
    if is_there:
        ray.get(result.reference, timeout=LIMIT_S)
    as_bytes = result.sent
    received = None if is_there else language_model.receive.remote(as_bytes)
    del result
    ray.get(encoder.go_on.remote())
    with pytest.raises(RayTaskError) as failed:
        ray.get(received or language_model.receive.remote(as_bytes), timeout=LIMIT_S)
    assert isinstance(failed.value.cause, ObjectLostError)


def test_nothing_is_left_of_a_reference(encoder: Any) -> None:
    """In either process, once both have let go of it."""
    language_model = LanguageModel.remote()
    results = [Result(encoder, num_bytes) for num_bytes in (SMALL, LARGE)]
    names = [result.reference.hex() for result in results]
    received = language_model.receive.remote(*[result.sent for result in results])
    ray.get(encoder.go_on.remote())
    assert ray.get(received, timeout=LIMIT_S) == [SMALL, LARGE]
    assert (num_known(names), ray.get(language_model.most_known.remote())) == (2, 2)
    until(lambda: ray.get(language_model.num_known.remote(names)) == 0, "the receiver to let go")
    del results
    until(lambda: num_known(names) == 0, "the caller to let go")
