"""The connector as vLLM calls it, beside its scheduler and in a worker, on vLLM's own base class."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from deployments.common.messages import EncodedImage
from deployments.llm.embedding_receiver import EmbeddingReceiver
from deployments.llm.received import ReceivedEmbeddings
from deployments.transfer.header import WrongEmbeddingError
from deployments.transfer.same_host import ShmServer
from deployments.transfer.shared_store import EmbeddingStore
from deployments.vllm import compat
from deployments.vllm.connector.link import ADDRESS_KEY, MIN_TOKENS_KEY
from encoder.item_header import CHUNKS, ChunkHeader, chunk_headers
from tests.unit.deployments.llm.receivers import FreeAdded, received_by, receiver_for
from tests.unit.deployments.samples import at_once
from tests.unit.deployments.transfer.stored_embeddings import encoded, eventually, tokens_of

STEP = SimpleNamespace(total_num_scheduled_tokens=1, free_encoder_mm_hashes=[])


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
        images = [encoded(self.store, number, seed=number % 2**31) for number in numbers]
        for image in images:
            self.store.offer(image)
        borrowing = received_by(self.receiver, *at_once(*(image.to_shared(self.server.address) for image in images)))
        arrived = self.loop.run_until_complete(borrowing)
        eventually(lambda: all(self.can_load(image.digest) for image in images))
        return images, arrived

    def can_load(self, digest: str) -> bool:
        """What vLLM's scheduler would be answered, without its asking."""
        there: bool = self.scheduler._scheduler.table.has(digest)
        return there

    def step(self, cache: dict[str, torch.Tensor], freed: Sequence[str] = (), *, num_tokens: int = 1) -> None:
        """What vLLM does between scheduling and the forward pass. `freed`: items that it has evicted. Its first model
        runner does not ask the worker's connector in a step without tokens."""
        step = SimpleNamespace(total_num_scheduled_tokens=num_tokens, free_encoder_mm_hashes=freed)
        loads = self.scheduler.build_connector_meta(step)
        if num_tokens:
            self.worker.bind_connector_metadata(loads)
            self.worker.start_load_caches(cache)
            self.worker.clear_connector_metadata()


@contextmanager
def started(*, min_tokens: int | None = None, is_hybrid: bool = False) -> Iterator[Engine]:
    compat.lookup("ECConnectorBase")  # the packages that vLLM needs are mended by now
    from vllm.config import ECTransferConfig
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    from vllm.model_executor.models.interfaces import SupportsMultiModal

    receiver = receiver_for(FreeAdded(), num_workers=1)
    store = EmbeddingStore(2**20)
    server = ShmServer(store)
    transfer = ECTransferConfig(
        ec_connector="SharedMemoryConnector",
        ec_connector_module_path="deployments.vllm.connector.ec_connector",
        ec_role="ec_consumer",
        ec_connector_extra_config={ADDRESS_KEY: receiver.link.address, MIN_TOKENS_KEY: min_tokens},
    )
    config: Any = SimpleNamespace(
        ec_transfer_config=transfer,
        model_config=SimpleNamespace(dtype=torch.float32, is_hybrid=is_hybrid),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
    )
    scheduler = ECConnectorFactory.create_connector(config, ECConnectorRole.SCHEDULER)
    # Restored at the end, or towers of later tests of this process would have no weights.
    mark = mock.patch.object(SupportsMultiModal, "_mark_tower_model", SupportsMultiModal._mark_tower_model)
    mark.start()
    worker = ECConnectorFactory.create_connector(config, ECConnectorRole.WORKER)
    assert receiver.link.wait_for_engine(timeout_s=60)
    loop = asyncio.new_event_loop()
    try:
        yield Engine(receiver, store, server, scheduler, worker, loop)
    finally:
        scheduler.shutdown()
        worker.shutdown()
        receiver.shut_down()
        server.close()
        loop.close()
        mark.stop()


@pytest.fixture
def engine() -> Iterator[Engine]:
    with started() as engine:
        yield engine


def feature(image: EncodedImage | str, offset: int, *, length: int = 6) -> Any:
    digest = image if isinstance(image, str) else image.digest
    return SimpleNamespace(identifier=digest, mm_position=SimpleNamespace(offset=offset, length=length), data=None)


VIDEO = "ab" * 32
FIRST, SECOND, THIRD = chunk_headers(VIDEO, (6, 6, 6))


def video(offset: int) -> Any:
    """A video of three embeddings, with two tokens of text before the rows of each."""
    is_embed = torch.tensor(([False] * 2 + [True] * 6) * 3)
    position = SimpleNamespace(offset=offset, length=24, is_embed=is_embed)
    return SimpleNamespace(identifier=VIDEO, mm_position=position, data={CHUNKS: SimpleNamespace(data=[6, 6, 6])})


def number_of(chunk: ChunkHeader) -> int:
    return int(chunk.digest, 16)


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
        assert torch.equal(cache[each.digest], tokens_of(each).float())
    eventually(lambda: engine.receiver.num_loaded == 2)
    engine.step(cache)
    engine.scheduler.update_state_after_alloc(asked, 0)
    engine.step(cache)  # it is there already, and only told of
    assert engine.scheduler.request_finished(asked) == (False, None)
    engine.receiver.close(arrived)
    eventually(lambda: len(engine.receiver._granted) == 0)
    assert engine.receiver.num_loaded == 2


def test_a_request_waits_for_what_is_not_there(engine: Engine) -> None:
    (image,), arrived = engine.given(1)
    missing = "f" * 64
    assert not engine.scheduler.ensure_cache_available(request(feature(image, 0), feature(missing, 10)), 0)
    assert not engine.scheduler.has_cache_item(missing)
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
    told: list[tuple[str, list[str]]] = []
    engine.receiver.link._on_missing = lambda name, digests: told.append((name, list(digests)))
    covered, wanted, too = "c" * 64, "f" * 64, "e" * 64
    features = feature(covered, 0), feature(image, 10), feature(wanted, 20), feature(too, 30), feature(wanted, 40)
    for name in ("one", "two"):
        for _ in range(3):
            assert not engine.scheduler.ensure_cache_available(request(*features, name=name), 6)
    eventually(lambda: told == [("one", [wanted, too]), ("two", [wanted, too])])
    assert engine.scheduler.ensure_cache_available(request(*features[:2], name="one"), 6)
    for name in ("one", "two"):
        engine.scheduler.request_finished(request(name=name))
    assert engine.scheduler._scheduler._reported_missing == {}
    assert not engine.scheduler.ensure_cache_available(request(*features, name="one"), 0)
    eventually(lambda: told[2:] == [("one", [covered, wanted, too])])
    engine.receiver.close(arrived)


def test_a_lease_does_not_end_between_the_question_for_it_and_the_load(engine: Engine) -> None:
    """vLLM asks for an embedding, then plans its load, all in one step. The lease could end between the two: the load
    was not made, and the engine ended with an encoder cache miss."""
    (image,), arrived = engine.given(1)
    asked = request(feature(image, 0))
    assert engine.scheduler.has_cache_item(image.digest)
    engine.receiver.close(arrived)
    table = engine.scheduler._scheduler.table
    eventually(lambda: not engine.can_load(image.digest) or bool(table._entries[image.digest].released))
    engine.scheduler.update_state_after_alloc(asked, 0)
    cache: dict[str, torch.Tensor] = {}
    engine.step(cache)
    assert list(cache) == [image.digest]
    assert not engine.can_load(image.digest)
    eventually(lambda: len(engine.receiver._granted) == 0)


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
    engine.store.offer(EncodedImage("e" * 64, image.dtype, image.bits, image.timings))
    cache: dict[str, torch.Tensor] = {}
    with pytest.raises(WrongEmbeddingError):
        engine.step(cache)
    assert cache == {}
    engine.receiver.close(arrived)


def test_an_item_that_the_engines_own_tower_computed_ends_the_engine(engine: Engine) -> None:
    """The tower has no weights: an answer would be about nothing."""
    with pytest.raises(RuntimeError, match="ran its own tower for item abc"):
        engine.worker.save_caches({}, "abc")


def test_towers_are_built_without_weights_in_a_worker(engine: Engine) -> None:
    """vLLM creates the connector before it loads the model."""
    from vllm.model_executor.models.interfaces import SupportsMultiModal

    assert SupportsMultiModal._mark_tower_model.__module__ == "deployments.vllm.towerless"


def test_a_step_without_tokens_pauses(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's scheduler polls while all of its requests wait for embeddings, which took a core."""
    from deployments.vllm.connector import ec_connector

    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    engine.scheduler.build_connector_meta(STEP)
    assert pauses == []
    engine.scheduler.build_connector_meta(SimpleNamespace(total_num_scheduled_tokens=0, free_encoder_mm_hashes=[]))
    assert pauses == [ec_connector.IDLE_STEP_S]


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_prompts_of_a_hybrid_model_are_not_prefilled_early(is_hybrid: bool) -> None:
    with started(min_tokens=8, is_hybrid=is_hybrid) as engine:
        (image,), arrived = engine.given(1)
        asked = request(feature(image, 2), feature("f" * 64, 10))
        assert engine.scheduler.prefill_limit(asked, 0) == (0 if is_hybrid else 10)
        engine.receiver.close(arrived)


def test_chunks_of_a_video_are_loaded_as_they_come(engine: Engine) -> None:
    """Into one tensor, each once; all of them again once vLLM has evicted the item."""
    cache: dict[str, torch.Tensor] = {}
    asked, batches = request(video(3)), []
    images: list[EncodedImage] = []
    for chunk in (FIRST, SECOND, THIRD):
        [image], arrived = engine.given(number_of(chunk))
        images.append(image)
        batches.append(arrived)
        engine.scheduler.prefill_limit(asked, 0)
        if chunk is FIRST:
            assert engine.scheduler.has_cache_item(VIDEO)
            engine.scheduler.update_state_after_alloc(asked, 0)
        engine.scheduler.load_further_chunks(asked, 0, 27)
        engine.step(cache)
        rows = torch.cat([tokens_of(each).float() for each in images])
        assert cache[VIDEO].shape == (18, rows.shape[1])
        assert torch.equal(cache[VIDEO][: len(rows)], rows)
    eventually(lambda: engine.receiver.num_loaded == 3)
    engine.scheduler.load_further_chunks(asked, 0, 27)
    del cache[VIDEO]
    engine.step(cache, freed=[VIDEO])
    assert not cache
    engine.scheduler.load_further_chunks(asked, 0, 27)
    engine.step(cache)
    assert not cache, "vLLM has not scheduled it"
    engine.scheduler.update_state_after_alloc(asked, 0)
    engine.step(cache)
    assert torch.equal(cache[VIDEO], rows)
    engine.scheduler.request_finished(asked)
    for arrived in batches:
        engine.receiver.close(arrived)
    eventually(lambda: len(engine.receiver._granted) == 0)


@pytest.mark.parametrize("is_evicted", [False, True])
def test_loads_that_are_planned_for_a_step_without_tokens_wait_for_the_next(engine: Engine, is_evicted: bool) -> None:
    """vLLM preempts a request after it has planned a chunk for it, and then schedules nothing. The chunk was never
    loaded, and the encoder's memory never freed."""
    cache: dict[str, torch.Tensor] = {}
    asked = request(video(3))
    [first], early = engine.given(number_of(FIRST))
    engine.scheduler.prefill_limit(asked, 0)
    engine.scheduler.update_state_after_alloc(asked, 0)
    engine.step(cache)
    later, rest = engine.given(number_of(SECOND), number_of(THIRD))
    engine.scheduler.prefill_limit(asked, 0)
    engine.scheduler.load_further_chunks(asked, 0, 27)
    engine.step(cache, num_tokens=0)
    if is_evicted:
        cache.clear()
        engine.step(cache, freed=[VIDEO], num_tokens=0)
    engine.step(cache)
    assert (VIDEO in cache) == (not is_evicted)
    if is_evicted:
        engine.scheduler.update_state_after_alloc(asked, 0)
        engine.step(cache)
    assert torch.equal(cache[VIDEO], torch.cat([tokens_of(each).float() for each in (first, *later)]))
    engine.scheduler.request_finished(asked)
    for arrived in (early, rest):
        engine.receiver.close(arrived)
    eventually(lambda: len(engine.receiver._granted) == 0)


def test_a_chunk_is_loaded_into_the_item_without_space_for_another(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk took the memory of the whole video for a moment: vLLM has not counted it in."""
    asked, made = request(video(3)), []
    new_empty = torch.Tensor.new_empty

    def counted(tensor: torch.Tensor, *size: int) -> torch.Tensor:
        made.append(size)
        return new_empty(tensor, *size)

    monkeypatch.setattr(torch.Tensor, "new_empty", counted)
    _, arrived = engine.given(*map(number_of, (FIRST, SECOND, THIRD)))
    assert engine.scheduler.ensure_cache_available(asked, 0)
    engine.scheduler.update_state_after_alloc(asked, 0)
    engine.step({})
    assert len(made) == 1
    engine.receiver.close(arrived)


@pytest.mark.parametrize(("min_tokens", "wanted"), [(8, [SECOND, THIRD]), (None, [FIRST, SECOND, THIRD])])
def test_chunks_that_the_prefix_cache_has_are_not_waited_for(min_tokens: int | None, wanted: list[ChunkHeader]) -> None:
    """They were encoded again for each turn. vLLM's own scheduler would never load them later, for a request that
    shares the item: without early prefill all are loaded at once."""
    with started(min_tokens=min_tokens) as engine:
        told: list[str] = []
        engine.receiver.link._on_missing = lambda _, digests: told.extend(digests)
        asked = request(video(3))
        assert not engine.scheduler.ensure_cache_available(asked, 3 + 8)
        eventually(lambda: told == [chunk.digest for chunk in wanted])
        images, arrived = engine.given(*map(number_of, wanted))
        assert engine.scheduler.prefill_limit(asked, 3 + 8) is None
        assert engine.scheduler.has_cache_item(VIDEO)
        engine.scheduler.update_state_after_alloc(asked, 0)
        cache: dict[str, torch.Tensor] = {}
        engine.step(cache)
        rows = torch.cat([tokens_of(each).float() for each in images])
        assert cache[VIDEO].shape == (18, rows.shape[1])
        assert torch.equal(cache[VIDEO][-len(rows) :], rows)
        if min_tokens is not None:
            whole = request(video(3), name="without a prefix")
            assert engine.scheduler.prefill_limit(whole, 0) == 0
            [first], first_arrived = engine.given(number_of(FIRST))
            assert engine.scheduler.prefill_limit(whole, 0) is None
            engine.scheduler.load_further_chunks(whole, 0, 27)
            engine.step(cache)
            assert torch.equal(cache[VIDEO], torch.cat([tokens_of(first).float(), rows]))
            engine.receiver.close(first_arrived)
        engine.receiver.close(arrived)


def test_a_chunk_whose_lease_ends_while_its_load_is_planned_is_not_loaded(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listening thread withdraws leases at any time: vLLM's scheduler ended with a KeyError."""
    _, arrived = engine.given(number_of(FIRST))
    asked = request(video(3))
    table = engine.scheduler._scheduler.table
    engine.scheduler.prefill_limit(asked, 0)
    monkeypatch.setattr(table, "has", lambda _: True)  # as it was a moment ago
    engine.scheduler.update_state_after_alloc(asked, 0)
    assert [load.lease.header.digest for load in engine.scheduler._loads] == [FIRST.digest]
    engine.step({})
    engine.receiver.close(arrived)
