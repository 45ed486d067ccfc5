"""Who lends to whom: an ingress tells encoders whether language models read from other hosts; they take the way."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import closing

import pytest

from deployments.embedding_shelf import EmbeddingShelf
from deployments.encoder import EncoderReplica
from deployments.lending import Lender
from deployments.metrics import Count
from deployments.nixl_memory import NotInstalledError
from deployments.remote_lending import RemoteLending
from deployments.remote_memory import RemoteMemory
from deployments.replica_errors import TransferFailedError
from deployments.wire import Accepted, EncodedImage, ImageJob, ImageRefused, SharedEmbedding
from tests.unit.deployments.fake_remote_memory import FakeMemory, FakeNetwork
from tests.unit.deployments.samples import IDENTITY, png
from tests.unit.deployments.stand_ins import JSON_HEAD, Accepting, Pieces
from tests.unit.deployments.test_incoming import FreeAdded
from tests.unit.deployments.test_lending import encoded
from tests.unit.deployments.test_whereabouts import in_turn

HERE, THERE = "here", "there"
MIB = 2**20


class Pulls(Accepting):
    """Language models on another host; of each answer whether its replica reads from there."""

    def __init__(self, *answers: Pieces, pulls: tuple[bool, ...]) -> None:
        super().__init__(*answers)
        self._pulls = list(pulls)

    def accepted(self) -> Accepted:
        return Accepted(THERE, (None,), pulls=self._pulls.pop(0))


def test_encoders_are_told_once_all_language_models_read_from_other_hosts() -> None:
    stand_ins = Pulls(pulls=(True, True, False, True))
    assert in_turn(stand_ins, 4) == [200] * 4
    assert [job.pulled for job in stand_ins.jobs] == [False, True, True, False]


def test_what_could_not_be_read_comes_through_the_object_store() -> None:
    failed = Pieces(TransferFailedError("no bytes for an embedding"))
    stand_ins = Pulls(Pieces(JSON_HEAD, b"{}"), failed, Pieces(JSON_HEAD, b"{}"), pulls=(True, True))
    assert in_turn(stand_ins, 2) == [200, 200]
    assert [(job.pulled, job.read_on) for job in stand_ins.jobs] == [(False, ()), (True, (THERE,)), (False, ())]


def missing() -> RemoteMemory:
    raise NotInstalledError("pip install it")


@pytest.mark.parametrize(
    ("read_on", "pulled", "always", "installed", "way"),
    [
        ((), False, False, True, "object store"),
        ((HERE,), False, False, True, "shared memory"),
        ((HERE,), True, False, True, "shared memory"),
        ((THERE,), False, False, True, "object store"),
        ((THERE,), True, False, True, "remote"),
        ((HERE, THERE), True, False, True, "remote"),
        ((HERE, THERE), False, False, True, "object store"),
        ((THERE,), True, False, False, "unshared"),
        ((HERE,), True, True, True, "remote"),
        ((HERE,), False, True, True, "object store"),
    ],
)
def test_an_encoder_gives_it_the_way_that_its_readers_take(
    read_on: tuple[str, ...], pulled: bool, always: bool, installed: bool, way: str
) -> None:
    async def given() -> None:
        shelf, network = EmbeddingShelf(MIB), FakeNetwork()
        replica = object.__new__(EncoderReplica)  # what encodes is not the point
        image, counts = encoded(shelf), FreeAdded()

        async def made(job: ImageJob) -> EncodedImage | ImageRefused:
            return image

        remote = RemoteLending(shelf, (lambda: FakeMemory(network)) if installed else missing)
        lender = Lender(shelf)
        vars(replica).update(
            _encoded=made, _lender=lender, _remote=remote, _host=HERE, _always_remote=always, _counts=counts
        )
        job = ImageJob(png(), None, image.digest, IDENTITY.fingerprint, (4, 4), 6)
        with closing(lender), closing(remote):
            found = await replica.encode(dataclasses.replace(job, read_on=read_on, pulled=pulled))
        if isinstance(found, SharedEmbedding):
            assert way == ("shared memory" if found.remote is None else "remote")
            assert (found.lender == lender.address) == (found.remote is None)
        else:
            assert found is image
            assert way == ("unshared" if counts.added[Count.EMBEDDINGS_UNSHARED, None] else "object store")
        del vars(replica)["_lender"], vars(replica)["_remote"]

    asyncio.run(given())
