"""The connector as vLLM calls it, beside its scheduler and in a worker, on vLLM's own base class."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deployments.common.messages import EncodedImage
from deployments.llm.embedding_receiver import EmbeddingReceiver
from deployments.llm.received import ReceivedEmbeddings
from deployments.transfer.header import WrongEmbeddingError
from deployments.transfer.same_host import ShmServer
from deployments.transfer.shared_store import EmbeddingStore
from deployments.vllm import compat
from deployments.vllm.connector.link import ADDRESS_KEY
from tests.unit.deployments.llm.test_embedding_receiver import MERGE, FreeAdded, receiver_for
from tests.unit.deployments.samples import at_once
from tests.unit.deployments.transfer.test_same_host import WIDTH, encoded, eventually


@dataclass
class Engine:
    receiver: EmbeddingReceiver
    store: EmbeddingStore
    server: ShmServer
    scheduler: Any
    worker: Any
    loop: asyncio.AbstractEventLoop

    def given(self, *numbers: int) -> tuple[list[EncodedImage], ReceivedEmbeddings]:
        """Embeddings that a request has come with."""
        images = [encoded(self.store, number) for number in numbers]
        for image in images:
            self.store.offer(image)
        borrowing = self.receiver.receive(at_once(*(image.to_shared(self.server.address) for image in images)))
        arrived = self.loop.run_until_complete(borrowing)
        eventually(lambda: all(self.can_load(image.digest) for image in images))
        return images, arrived

    def can_load(self, digest: str) -> bool:
        """What vLLM's scheduler would be answered, without its asking."""
        there: bool = self.scheduler._scheduler.table.has(digest)
        return there

    def step(self, cache: dict[str, torch.Tensor]) -> None:
        """What vLLM does between scheduling and the forward pass."""
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(SimpleNamespace()))
        self.worker.start_load_caches(cache)
        self.worker.clear_connector_metadata()


@pytest.fixture
def engine() -> Iterator[Engine]:
    compat.lookup("ECConnectorBase")  # the packages that vLLM needs are mended by now
    from vllm.config import ECTransferConfig
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

    receiver = receiver_for(FreeAdded(), num_workers=1)
    store = EmbeddingStore(2**20)
    server = ShmServer(store)
    transfer = ECTransferConfig(
        ec_connector="SharedMemoryConnector",
        ec_connector_module_path="deployments.vllm.connector.ec_connector",
        ec_role="ec_consumer",
        ec_connector_extra_config={ADDRESS_KEY: receiver.link.address},
    )
    config: Any = SimpleNamespace(
        ec_transfer_config=transfer,
        model_config=SimpleNamespace(dtype=torch.float32),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )
    scheduler = ECConnectorFactory.create_connector(config, ECConnectorRole.SCHEDULER)
    worker = ECConnectorFactory.create_connector(config, ECConnectorRole.WORKER)
    assert receiver.wait_for_engine(timeout_s=60)
    loop = asyncio.new_event_loop()
    try:
        yield Engine(receiver, store, server, scheduler, worker, loop)
    finally:
        scheduler.shutdown()
        worker.shutdown()
        receiver.shut_down()
        server.close()
        loop.close()


def feature(image: EncodedImage | str, offset: int, *, width: int = 0, length: int = 6) -> Any:
    digest = image if isinstance(image, str) else image.digest
    data = {"image_embeds": SimpleNamespace(data=torch.empty(length, width))}
    position = SimpleNamespace(offset=offset, length=length)
    return SimpleNamespace(data=data, identifier=digest, mm_position=position)


def request(*features: Any, name: str = "request") -> Any:
    return SimpleNamespace(request_id=name, mm_features=list(features))


def test_an_embedding_is_loaded_before_its_step_and_never_twice(engine: Engine) -> None:
    (image, other), arrived = engine.given(1, 2)
    asked = request(feature(image, 0), feature(other, 10), feature(image, 20))
    assert engine.scheduler.ensure_cache_available(asked, 0)
    for index in (0, 1, 2):
        engine.scheduler.update_state_after_alloc(asked, index)
    cache: dict[str, torch.Tensor] = {}
    engine.step(cache)
    for each in (image, other):
        assert torch.equal(cache[each.digest], each.unpack(width=WIDTH, merge_size=MERGE).float())
    eventually(lambda: engine.receiver.num_loaded == 2)
    engine.step(cache)
    engine.scheduler.update_state_after_alloc(asked, 0)
    engine.step(cache)  # it is there already, and only told of
    assert engine.scheduler.request_finished(asked) == (False, None)
    engine.receiver.close(arrived)
    eventually(lambda: len(engine.receiver) == 0)
    assert engine.receiver.num_loaded == 2


def test_a_request_waits_for_what_is_not_there_and_not_for_what_it_brings(engine: Engine) -> None:
    (image,), arrived = engine.given(1)
    missing = "f" * 64
    assert not engine.scheduler.ensure_cache_available(request(feature(image, 0), feature(missing, 10)), 0)
    assert engine.scheduler.ensure_cache_available(request(feature(missing, 0, width=WIDTH)), 0)
    assert not engine.scheduler.has_cache_item(missing), "vLLM takes what the request brings"
    assert engine.scheduler.ensure_cache_available(request(), 0)
    engine.receiver.close(arrived)


def test_what_the_prefix_cache_has_is_not_waited_for(engine: Engine) -> None:
    missing = "f" * 64
    asked = request(feature(missing, 4))
    assert not engine.scheduler.ensure_cache_available(asked, 9)
    assert engine.scheduler.ensure_cache_available(asked, 10)


def test_what_a_request_waits_for_is_told_once_and_what_the_prefix_cache_has_is_not(engine: Engine) -> None:
    """By which the replica learns whether the engine can do without an embedding that lies nowhere near."""
    (image,), arrived = engine.given(1)
    told: list[str] = []
    engine.receiver.link._on_missing = told.append
    covered, wanted = "c" * 64, "f" * 64
    features = feature(covered, 0), feature(image, 10), feature(wanted, 20)
    for name in ("one", "two"):
        for _ in range(3):
            assert not engine.scheduler.ensure_cache_available(request(*features, name=name), 6)
    eventually(lambda: told == [wanted] * 2)
    assert engine.scheduler.ensure_cache_available(request(*features[:2], name="one"), 6)
    for name in ("one", "two"):
        engine.scheduler.request_finished(request(name=name))
    assert engine.scheduler._scheduler._reported_missing == {}
    assert not engine.scheduler.ensure_cache_available(request(*features, name="one"), 0)
    eventually(lambda: told[2:] == [covered, wanted])
    engine.receiver.close(arrived)


def test_a_lease_does_not_end_between_the_question_for_it_and_the_load(engine: Engine) -> None:
    """vLLM asks for the embedding of a request that brings its own data, then plans the load, all in one step. The
    lease, another request's, could end between the two: the load was not made, and the engine ended with an encoder
    cache miss."""
    (image,), arrived = engine.given(1)
    asked = request(feature(image, 0, width=WIDTH))
    assert engine.scheduler.ensure_cache_available(asked, 0)
    assert engine.scheduler.has_cache_item(image.digest)
    engine.receiver.close(arrived)
    table = engine.scheduler._scheduler.table
    eventually(lambda: not engine.can_load(image.digest) or bool(table._entries[image.digest].released))
    engine.scheduler.update_state_after_alloc(asked, 0)
    cache: dict[str, torch.Tensor] = {}
    engine.step(cache)
    assert list(cache) == [image.digest]
    assert not engine.can_load(image.digest)
    eventually(lambda: len(engine.receiver) == 0)


def test_an_adapters_name_before_the_digest_is_no_other_image(engine: Engine) -> None:
    (image,), arrived = engine.given(1)
    identifier = f"adapter:{image.digest}"
    asked = request(feature(identifier, 0))
    assert engine.scheduler.ensure_cache_available(asked, 0)
    assert engine.scheduler.has_cache_item(identifier)
    engine.scheduler.update_state_after_alloc(asked, 0)
    cache: dict[str, torch.Tensor] = {}
    engine.step(cache)
    assert list(cache) == [identifier]
    engine.receiver.close(arrived)


def test_another_embedding_in_its_place_is_never_loaded(engine: Engine) -> None:
    """It cannot come to that; if it did, the engine had to end rather than answer from another image."""
    (image,), arrived = engine.given(1)
    asked = request(feature(image, 0))
    assert engine.scheduler.ensure_cache_available(asked, 0)
    engine.scheduler.update_state_after_alloc(asked, 0)
    engine.store.offer(EncodedImage("e" * 64, image.grid_thw, image.dtype, image.bits, image.timings))
    cache: dict[str, torch.Tensor] = {}
    with pytest.raises(WrongEmbeddingError):
        engine.step(cache)
    assert cache == {}
    engine.receiver.close(arrived)
