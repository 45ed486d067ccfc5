"""Who lends to whom: an ingress tells encoders whether language models read from other hosts; they take the way."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from deployments.common.messages import Accepted, EncodedImage, ImageJob, ImageRefused, SharedEmbedding
from deployments.common.replica_errors import TransferFailedError
from deployments.encoder_replica.deployment import EncoderReplica
from deployments.telemetry.metrics import Counter
from deployments.transfer.remote_sender import RemoteSender
from deployments.transfer.same_host import ShmServer
from deployments.transfer.shared_store import EmbeddingStore
from tests.unit.deployments.ingress.test_embedding_directory import in_turn
from tests.unit.deployments.llm.test_embedding_receiver import FreeAdded
from tests.unit.deployments.samples import IDENTITY, png
from tests.unit.deployments.stand_ins import JSON_HEAD, Accepting, Pieces
from tests.unit.deployments.transfer.fake_remote_memory import FakeMemory, FakeNetwork
from tests.unit.deployments.transfer.test_same_host import encoded

HERE, THERE = "here", "there"
MIB = 2**20


class Pulls(Accepting):
    """Language models on another host; of each answer whether its replica reads from there."""

    def __init__(self, *answers: Pieces, pulls: tuple[bool, ...]) -> None:
        super().__init__(*answers)
        self._pulls = list(pulls)

    def accepted(self) -> Accepted:
        return Accepted(THERE, (None,), remote_read=self._pulls.pop(0))


def test_encoders_are_told_once_all_language_models_read_from_other_hosts() -> None:
    stand_ins = Pulls(pulls=(True, True, False, True))
    assert in_turn(stand_ins, 4) == [200] * 4
    assert [job.remote_read for job in stand_ins.jobs] == [False, True, True, False]


def test_what_could_not_be_read_comes_through_the_object_store() -> None:
    failed = Pieces(TransferFailedError("no bytes for an embedding"))
    stand_ins = Pulls(Pieces(JSON_HEAD, b"{}"), failed, Pieces(JSON_HEAD, b"{}"), pulls=(True, True))
    assert in_turn(stand_ins, 2) == [200, 200]
    assert [(job.remote_read, job.reader_hosts) for job in stand_ins.jobs] == [
        (False, ()),
        (True, (THERE,)),
        (False, ()),
    ]


@pytest.mark.parametrize(
    ("reader_hosts", "remote_read", "nixl", "way"),
    [
        ((), False, False, "object store"),
        ((HERE,), False, False, "shared memory"),
        ((THERE,), False, False, "object store"),
        ((HERE, THERE), False, False, "object store"),
        ((THERE,), True, False, "object store"),
        ((THERE,), True, True, "remote"),
        ((HERE, THERE), True, True, "remote"),
        ((HERE,), True, True, "remote"),
        ((HERE,), False, True, "object store"),
    ],
)
def test_an_encoder_gives_it_the_way_that_its_readers_take(
    reader_hosts: tuple[str, ...], remote_read: bool, nixl: bool, way: str
) -> None:
    async def given() -> None:
        store = EmbeddingStore(MIB)
        replica = object.__new__(EncoderReplica)  # what encodes is not the point
        image, counts = encoded(store), FreeAdded()

        async def made(job: ImageJob) -> EncodedImage | ImageRefused:
            return image

        remote = RemoteSender(store, FakeMemory(FakeNetwork())) if nixl else None
        server = ShmServer(store)
        vars(replica).update(_get_or_encode=made, _server=server, _remote=remote, _host=HERE, _counts=counts)
        job = ImageJob(png(), None, image.digest, IDENTITY.fingerprint, (4, 4), 6)
        found = await replica.encode(dataclasses.replace(job, reader_hosts=reader_hosts, remote_read=remote_read))
        if isinstance(found, SharedEmbedding):
            assert way == ("shared memory" if found.remote is None else "remote")
            assert (found.server == server.address) == (found.remote is None)
        else:
            assert found is image
            assert way == "object store"
            assert not counts.added[Counter.EMBEDDING_SHM_FALLBACKS, None]
        replica.__del__()
        del vars(replica)["_server"], vars(replica)["_remote"]

    asyncio.run(given())
