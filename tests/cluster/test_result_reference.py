"""References to results of Ray's calls that are sent as bytes, as in a call by gRPC, and awaited in another process.

Serve's calls yield: first whether the replica has accepted the call, then the result. So do those of `Encoder`.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayTaskError

from deployments.common.ray_private import ResultReference
from tests.cluster.served import Cluster, until

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
        return [len(await pickle.loads(one)) for one in sent]

    async def num_known(self, references: list[str]) -> int:
        """How many of the references this process knows."""
        return num_known(references)


Encoder: Any = ray.remote(num_cpus=0)(_Encoder)
LanguageModel: Any = ray.remote(num_cpus=0)(_LanguageModel)


def encode(encoder: Any, num_bytes: int) -> Any:
    """A reference to the result, as Serve takes it."""
    generator = encoder.encode.options(num_returns="streaming").remote(num_bytes)
    assert ray.get(next(generator), timeout=LIMIT_S) == b"accepted"
    (reference,) = generator._get_next_ref_n(1)
    return reference


def num_known(references: list[str]) -> int:
    core_worker: Any = cast(Any, ray)._private.worker.global_worker.core_worker
    return len(core_worker.get_all_reference_counts().keys() & {*references})


def sent(reference: Any) -> bytes:
    return pickle.dumps(ResultReference(reference))


@pytest.fixture
def encoder(cluster: Cluster) -> Any:
    return Encoder.remote()


def test_a_result_is_received_that_was_not_there_when_its_reference_was_sent(encoder: Any) -> None:
    results = [encode(encoder, num_bytes) for num_bytes in (SMALL, LARGE)]
    received = LanguageModel.remote().receive.remote(*map(sent, results))
    with pytest.raises(GetTimeoutError):
        ray.get(received, timeout=1)
    ray.get(encoder.go_on.remote())
    assert ray.get(received, timeout=LIMIT_S) == [SMALL, LARGE]


def test_a_result_is_received_that_was_there_already(encoder: Any) -> None:
    ray.get(encoder.go_on.remote())
    results = [encode(encoder, num_bytes) for num_bytes in (SMALL, LARGE)]
    ray.wait(results, num_returns=2, timeout=LIMIT_S)
    language_model = LanguageModel.remote()
    for _ in range(2):  # a reference can be sent again, after the first receiver has let go of its own
        assert ray.get(language_model.receive.remote(*map(sent, results)), timeout=LIMIT_S) == [SMALL, LARGE]


def test_errors_reach_the_receiver_as_they_reach_a_caller(encoder: Any) -> None:
    failing, ending = encode(encoder, 0), Encoder.remote()
    lost, language_model = encode(ending, SMALL), LanguageModel.remote()
    received = [language_model.receive.remote(sent(one)) for one in (failing, lost)]
    ray.get(encoder.go_on.remote())
    for failed in (received[0], language_model.receive.remote(sent(failing))):  # before it has failed, and after that
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
    result, language_model = encode(encoder, LARGE), LanguageModel.remote()
    if is_there:
        ray.wait([result], timeout=LIMIT_S)
    as_bytes = sent(result)
    received = None if is_there else language_model.receive.remote(as_bytes)
    del result
    ray.get(encoder.go_on.remote())
    with pytest.raises(RayTaskError) as failed:
        ray.get(received or language_model.receive.remote(as_bytes), timeout=LIMIT_S)
    assert isinstance(failed.value.cause, ObjectLostError)


def test_nothing_is_left_of_a_reference(encoder: Any) -> None:
    """In either process, once both have let go of it."""
    language_model = LanguageModel.remote()
    results = [encode(encoder, num_bytes) for num_bytes in (SMALL, LARGE)]
    names = [one.hex() for one in results]
    received = language_model.receive.remote(*map(sent, results))
    ray.get(encoder.go_on.remote())
    assert ray.get(received, timeout=LIMIT_S) == [SMALL, LARGE]
    assert num_known(names) == 2
    until(lambda: ray.get(language_model.num_known.remote(names)) == 0, "the receiver to let go")
    del results
    until(lambda: num_known(names) == 0, "the caller to let go")
