"""References to results of Ray's calls that are sent as bytes, as in a call by gRPC, and awaited in another process."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayTaskError

from deployments.common.ray_private import ResultReference
from tests.cluster.served import Cluster

pytestmark = pytest.mark.slow

SMALL, LARGE = 10, 2**21
"""Bytes of a result that its caller holds, and of one in Ray's object store."""
LIMIT_S = 60


class _Encoder:
    """Answers once it is told to."""

    def __init__(self) -> None:
        self._goes_on = asyncio.Event()

    async def encode(self, num_bytes: int) -> bytes:
        await self._goes_on.wait()
        if not num_bytes:
            raise ValueError("no image")
        return bytes(num_bytes)

    async def go_on(self) -> None:
        self._goes_on.set()


class _LanguageModel:
    async def receive(self, *sent: bytes) -> list[int]:
        return [len(await pickle.loads(one)) for one in sent]

    async def receive_after(self, signal: list[Any], sent: bytes) -> int:
        received = pickle.loads(sent)
        await signal[0]
        return len(await received)


Encoder: Any = ray.remote(num_cpus=0)(_Encoder)
LanguageModel: Any = ray.remote(num_cpus=0)(_LanguageModel)


def sent(reference: Any) -> bytes:
    return pickle.dumps(ResultReference(reference))


@pytest.fixture
def encoder(cluster: Cluster) -> Any:
    return Encoder.remote()


def test_a_result_is_received_that_was_not_there_when_its_reference_was_sent(encoder: Any) -> None:
    results = [encoder.encode.remote(num_bytes) for num_bytes in (SMALL, LARGE)]
    received = LanguageModel.remote().receive.remote(*map(sent, results))
    with pytest.raises(GetTimeoutError):
        ray.get(received, timeout=1)
    ray.get(encoder.go_on.remote())
    assert ray.get(received, timeout=LIMIT_S) == [SMALL, LARGE]


def test_a_result_is_received_that_was_there_already(encoder: Any) -> None:
    ray.get(encoder.go_on.remote())
    results = [encoder.encode.remote(num_bytes) for num_bytes in (SMALL, LARGE)]
    ray.wait(results, num_returns=2, timeout=LIMIT_S)
    language_model = LanguageModel.remote()
    for _ in range(2):  # a reference can be sent again, after the first receiver has let go of its own
        assert ray.get(language_model.receive.remote(*map(sent, results)), timeout=LIMIT_S) == [SMALL, LARGE]


def test_errors_reach_the_receiver_as_they_reach_a_caller(encoder: Any) -> None:
    failing, ending = encoder.encode.remote(0), Encoder.remote()
    lost, language_model = ending.encode.remote(SMALL), LanguageModel.remote()
    received = [language_model.receive.remote(sent(one)) for one in (failing, lost)]
    ray.get(encoder.go_on.remote())
    with pytest.raises(RayTaskError, match="no image"):
        ray.get(received[0], timeout=LIMIT_S)
    ray.kill(ending)
    with pytest.raises(RayTaskError, match="ActorDiedError"):
        ray.get(received[1], timeout=LIMIT_S)


def test_a_result_that_its_caller_gave_up_is_lost(encoder: Any) -> None:
    """And is not waited for."""
    ray.get(encoder.go_on.remote())
    result, signal = encoder.encode.remote(SMALL), Encoder.remote()
    as_bytes = sent(result)
    del result
    received = LanguageModel.remote().receive_after.remote([signal.encode.remote(SMALL)], as_bytes)
    ray.get(signal.go_on.remote())
    with pytest.raises(RayTaskError) as failed:
        ray.get(received, timeout=LIMIT_S)
    assert isinstance(failed.value.cause, ObjectLostError)
