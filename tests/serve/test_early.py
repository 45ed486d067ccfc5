"""A language model replica whose vLLM is given requests while their embeddings are on their way.

The engine is vLLM's own, in this process's charge; the encoders are the test's, so that each embedding comes when the
test says. Answers are compared with those to the same embeddings given at once. One file, since all of it asks one
engine, which takes half a minute to start.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.exceptions import RayActorError

from configs.schema import AppConfig
from deployments.common.messages import (
    Accepted,
    EncodedImage,
    EncodeTimings,
    HttpRequest,
    ImageReference,
    ImageRefused,
    NotEncoded,
    ResponseHead,
    SharedEmbedding,
    new_key,
)
from deployments.common.replica_errors import TransferFailedError
from deployments.llm.deployment import LLM
from deployments.llm.early_prefill import EarlyPrefill
from deployments.telemetry.metrics import Counter
from deployments.transfer.same_host import ShmServer
from deployments.transfer.shared_store import EmbeddingStore
from tests.unit.deployments.llm.test_embedding_receiver import FreeAdded, eventually

PATIENCE_S = 120.0
LOOK_S = 0.3
"""For what must not happen."""
SIDES = ((8, 8), (12, 8), (8, 16))
"""Of the images' grids, in patches."""
TOLERANCE = 1e-3
"""Of a log-probability: a prompt that is read in parts is added up in another order."""

Coming = asyncio.Future[SharedEmbedding | EncodedImage | ImageRefused]


@dataclass
class Replica:
    llm: LLM
    early: EarlyPrefill
    counts: FreeAdded
    store: EmbeddingStore
    server: ShmServer
    width: int
    merge: int
    loop: asyncio.AbstractEventLoop
    num_compiled: int
    """What torch had compiled in the engine when the replica was ready."""
    num_made: int = 0

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        self.counts.added.clear()
        self.early._loaded.clear()
        self.loop.run_until_complete(asyncio.wait_for(scenario, PATIENCE_S))

    def images(self) -> list[EncodedImage]:
        """New ones, in the encoder's memory."""
        made = []
        for h, w in SIDES:
            self.num_made += 1
            rows = h * w // self.merge**2
            tokens = self.store.allocate(rows, self.width, torch.float32)
            assert tokens is not None
            tokens.copy_(torch.randn(rows, self.width, generator=torch.Generator().manual_seed(self.num_made)))
            timings = EncodeTimings(1.0, 2.0, 3.0, time.time(), cached=False)
            made.append(EncodedImage.pack(tokens, (1, h, w), f"{self.num_made:064x}", timings))
            assert self.store.offer(made[-1])
        return made

    def lent(self, image: EncodedImage) -> SharedEmbedding:
        return image.to_shared(self.server.address)

    def request(self, images: list[EncodedImage], **fields: object) -> tuple[HttpRequest, list[ImageReference]]:
        """Each with a salt of its own, by which it finds nothing in the prefix cache."""
        places = [
            ImageReference(new_key(), new_key(), n, f"image {n}", image.grid_thw) for n, image in enumerate(images)
        ]
        content: list[object] = []
        for place, image in zip(places, images, strict=True):
            keys = {"image_embeds": place.tokens_key, "image_grid_thw": place.grid_key}
            content += [
                {"type": "text", "text": "And this one?"},
                {"type": "image_embeds", "image_embeds": keys, "uuid": image.digest},
            ]
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 4,
            "temperature": 0,
            "logprobs": True,
            "cache_salt": new_key(),
            **fields,
        }
        headers = [(b"content-type", b"application/json")]
        return HttpRequest("POST", "/v1/chat/completions", b"", headers, json.dumps(body).encode()), places

    async def told(self, images: list[EncodedImage], encodings: list[Awaitable[Any]], **fields: object) -> list[object]:
        request, places = self.request(images, **fields)
        return [piece async for piece in self.llm.handle(request, places, encodings)]

    def asked(self, images: list[EncodedImage], **fields: object) -> tuple[list[Coming], asyncio.Task[list[object]]]:
        """What encoders are to answer, and what is told."""
        futures = coming(self.loop, len(images))
        return futures, asyncio.ensure_future(self.told(images, list(futures), **fields))

    async def begun(self) -> tuple[list[EncodedImage], list[Coming], asyncio.Task[list[object]]]:
        """A request whose first image vLLM has, and whose others are on their way."""
        images, before = self.images(), self.num_loaded
        futures, answer = self.asked(images)
        futures[0].set_result(self.lent(images[0]))
        await eventually(lambda: self.num_loaded > before)
        return images, futures, answer

    @property
    def num_loaded(self) -> int:
        return self.llm._receiver.num_loaded

    def nothing_is_left(self) -> bool:
        return (
            len(self.llm._receiver) == len(self.llm._frontend.keys) == self.early.num_waiting == 0
            and self.llm._requests.num_in_flight == 0
        )

    def in_vain(self) -> dict[str | None, int]:
        return {why: number for (which, why), number in self.counts.added.items() if which is IN_VAIN}


IN_VAIN = Counter.EARLY_PREFILLS_ABORTED


@pytest.fixture(scope="module")
def replica(checkpoints: dict[str, Path]) -> Iterator[Replica]:
    config = AppConfig.model_validate(
        {
            "model": str(checkpoints["qwen3"]),
            "transfer": "shared_memory",
            "llm": {
                "num_gpus": 0,
                "early_prefill_min_tokens": 8,
                "engine_args": {
                    "served_model_name": ["tiny"],
                    "dtype": "float32",
                    "max_model_len": 2048,
                    "max_num_seqs": 4,
                    "enforce_eager": True,
                    "worker_extension_cls": "tests.serve.compiles.Compiles",
                    "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
                    "num_gpu_blocks_override": 512,
                },
            },
        }
    )
    loop = asyncio.new_event_loop()
    llm = LLM.__new__(LLM)
    loop.run_until_complete(llm.__init__(config))  # type: ignore[misc]
    early = llm._requests.early_prefill
    assert early is not None
    num_compiled = loop.run_until_complete(compiled(llm))
    counts = FreeAdded()
    llm._requests._counts = llm._receiver._counts = counts
    shape = llm._frontend._shape
    store = EmbeddingStore(2**22)
    server = ShmServer(store)
    try:
        yield Replica(llm, early, counts, store, server, shape.width, shape.merge_size, loop, num_compiled)
    finally:
        server.close()
        llm.__del__()
        llm._engine = None  # type: ignore[assignment]  # ended
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


async def compiled(llm: LLM) -> int:
    engine: Any = llm._engine
    (number,) = await engine.collective_rpc("num_compiled")
    return int(number)


def coming(loop: asyncio.AbstractEventLoop, number: int) -> list[Coming]:
    return [loop.create_future() for _ in range(number)]


def answered(pieces: Sequence[object]) -> tuple[int, list[tuple[str, float]]]:
    """The status, and each token with its log-probability."""
    accepted, head, *chunks = pieces
    assert isinstance(accepted, Accepted)
    assert isinstance(head, ResponseHead)
    body = json.loads(b"".join(chunk for chunk in chunks if isinstance(chunk, bytes)))
    tokens = body["choices"][0]["logprobs"]["content"] if head.status == 200 else []
    return head.status, [(each["token"], each["logprob"]) for each in tokens]


async def at_once(replica: Replica, images: list[EncodedImage]) -> list[tuple[str, float]]:
    """The answer without anything of this."""
    replica.llm._requests.early_prefill = None
    try:
        futures = coming(replica.loop, len(images))
        for future, image in zip(futures, images, strict=True):
            future.set_result(replica.lent(image))
        status, tokens = answered(await replica.told(images, list(futures)))
    finally:
        replica.llm._requests.early_prefill = replica.early
    assert status == 200
    return tokens


def same(tokens: list[tuple[str, float]], expected: list[tuple[str, float]]) -> None:
    assert [token for token, _ in tokens] == [token for token, _ in expected]
    assert [value for _, value in tokens] == pytest.approx([value for _, value in expected], abs=TOLERANCE)


def test_a_prompt_is_read_as_its_images_come_and_the_answer_is_the_same(replica: Replica) -> None:
    async def scenario() -> None:
        images = replica.images()
        before = replica.num_loaded
        futures, answer = replica.asked(images)
        for number, (future, image) in enumerate(zip(futures, images, strict=True)):
            await asyncio.sleep(LOOK_S)
            assert replica.num_loaded == before + number, "what is not there cannot be read"
            assert not answer.done()
            future.set_result(replica.lent(image))
            await eventually(lambda number=number: replica.num_loaded == before + number + 1)  # type: ignore[misc]
        status, tokens = answered(await answer)
        assert status == 200
        assert replica.counts.added[Counter.EARLY_PREFILLS, None] == 1
        assert replica.in_vain() == {}
        same(tokens, await at_once(replica, images))
        await eventually(replica.nothing_is_left)

    replica.run(scenario())


def test_images_that_come_in_another_order_are_read_in_the_prompts(replica: Replica) -> None:
    async def scenario() -> None:
        images = replica.images()
        before = replica.num_loaded
        futures, answer = replica.asked(images, stream=False)
        for number in (2, 1):
            futures[number].set_result(replica.lent(images[number]))
            await asyncio.sleep(LOOK_S)
            assert replica.num_loaded == before
        futures[0].set_result(replica.lent(images[0]))
        _, tokens = answered(await answer)
        same(tokens, await at_once(replica, images))
        await eventually(replica.nothing_is_left)

    replica.run(scenario())


def test_others_are_answered_while_one_waits(replica: Replica) -> None:
    async def scenario() -> None:
        waiting, futures, answer = await replica.begun()
        assert replica.early.num_waiting == 1
        await at_once(replica, replica.images())
        assert not answer.done()
        for number in (1, 2):
            futures[number].set_result(replica.lent(waiting[number]))
        assert answered(await answer)[0] == 200

    replica.run(scenario())


def test_what_waits_for_encoders_is_no_reason_for_more_language_models(replica: Replica) -> None:
    async def scenario() -> None:
        images = replica.images()
        futures = coming(replica.loop, 3)
        answers = [asyncio.ensure_future(replica.told(images, list(futures))) for _ in range(2)]
        replica.llm._requests.num_in_flight += 1
        await eventually(lambda: sum(replica.llm._stats._loggers[0].load.__dict__.values()) >= 2)
        stats = replica.llm.record_autoscaling_stats()
        assert (stats["engine_running_requests"], stats["engine_waiting_requests"]) == (0, 0)
        replica.llm._requests.num_in_flight -= 1
        for future, image in zip(futures, images, strict=True):
            future.set_result(replica.lent(image))
        for pieces in await asyncio.gather(*answers):
            assert answered(pieces)[0] == 200

    replica.run(scenario())


def test_an_image_that_is_refused_is_told_and_the_engine_goes_on(replica: Replica) -> None:
    async def scenario() -> None:
        images, futures, answer = await replica.begun()
        futures[1].set_result(replica.lent(images[1]))
        futures[2].set_result(ImageRefused("the image is broken"))
        pieces = await answer
        assert answered(pieces)[0] == 400
        assert b"image 2: the image is broken" in b"".join(one for one in pieces if isinstance(one, bytes))
        assert replica.in_vain() == {"rejected": 1}
        await eventually(replica.nothing_is_left)
        await at_once(replica, replica.images())

    replica.run(scenario())


def test_an_encoder_that_fails_is_told_and_nothing_is_left(replica: Replica) -> None:
    async def scenario() -> None:
        images, futures, answer = await replica.begun()
        futures[2].set_exception(RayActorError())
        assert await answer == [NotEncoded(2)]
        futures[1].cancel()
        await eventually(replica.nothing_is_left)
        await at_once(replica, images)

    replica.run(scenario())


@pytest.mark.parametrize("which", [2, 0])
def test_what_comes_through_the_object_store_goes_with_the_request(replica: Replica, which: int) -> None:
    async def scenario() -> None:
        images = replica.images()
        futures, answer = replica.asked(images)
        await asyncio.sleep(LOOK_S)
        for number, (future, image) in enumerate(zip(futures, images, strict=True)):
            future.set_result(image if number == which else replica.lent(image))
        status, tokens = answered(await answer)
        assert status == 200
        assert replica.in_vain() == {"not_loaded": 1}
        await eventually(replica.nothing_is_left)
        same(tokens, await at_once(replica, images))

    replica.run(scenario())


def test_where_embeddings_come_otherwise_requests_are_given_to_vllm_once(replica: Replica) -> None:
    """As where encoders are on other hosts; and begun again when the engine loads what comes."""

    async def scenario() -> None:
        begun = []
        for by_the_store in [True] * 3 + [False] * 12:
            images = replica.images()[:1]
            before = replica.counts.added[Counter.EARLY_PREFILLS, None]
            (future,) = coming(replica.loop, 1)
            future.set_result(images[0] if by_the_store else replica.lent(images[0]))
            assert answered(await replica.told(images, [future], max_tokens=1))[0] == 200
            begun.append(replica.counts.added[Counter.EARLY_PREFILLS, None] > before)
        assert begun == [True] + [False] * 11 + [True] * 3, "3 of 4 have come so"
        assert replica.in_vain() == {"not_loaded": 1}

    replica.run(scenario())


def test_an_embedding_that_is_not_what_its_file_said_is_answered_as_what_it_is(replica: Replica) -> None:
    async def scenario() -> None:
        images = replica.images()
        futures = coming(replica.loop, 3)
        request, places = replica.request(images)
        places[1] = ImageReference(places[1].tokens_key, places[1].grid_key, 1, "image 1", (1, 4, 4))
        for future, image in zip(futures, images, strict=True):
            future.set_result(replica.lent(image))
        pieces = [piece async for piece in replica.llm.handle(request, places, list(futures))]
        status, tokens = answered(pieces)
        assert status == 200
        assert replica.in_vain() == {"shape_mismatch": 1}
        same(tokens, await at_once(replica, images))

    replica.run(scenario())


def test_an_embedding_that_has_gone_is_asked_for_again(replica: Replica) -> None:
    async def scenario() -> None:
        images = replica.images()
        futures = coming(replica.loop, 3)
        futures[0].set_result(replica.lent(images[0]))
        futures[1].set_result(EncodedImage.to_shared(images[1], "\0nobody"))
        with pytest.raises(TransferFailedError):
            await replica.told(images, list(futures))
        await eventually(replica.nothing_is_left)

    replica.run(scenario())


def test_a_client_that_leaves_before_its_images_come_leaves_nothing(replica: Replica) -> None:
    async def scenario() -> None:
        images, _, answer = await replica.begun()
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        await eventually(replica.nothing_is_left)
        await at_once(replica, images)
        load = replica.llm._stats.load()
        assert (load.running_requests, load.waiting_requests) == (0, 0)

    replica.run(scenario())


def test_what_vllm_refuses_is_told_once_all_has_come(replica: Replica) -> None:
    async def scenario() -> None:
        images = replica.images()
        futures, answer = replica.asked(images, max_tokens=100_000)
        await asyncio.sleep(LOOK_S)
        for future, image in zip(futures, images, strict=True):
            future.set_result(replica.lent(image))
        assert answered(await answer)[0] == 400
        await eventually(replica.nothing_is_left)

    replica.run(scenario())


def test_what_lies_in_shared_memory_is_not_waited_for(replica: Replica) -> None:
    """To begin without it would take longer than to have it."""

    async def scenario() -> None:
        images = replica.images()
        request, places = replica.request(images)
        lent = [replica.lent(image) for image in images]
        assert answered([piece async for piece in replica.llm.handle(request, places, lent)])[0] == 200
        assert replica.counts.added[Counter.EARLY_PREFILLS, None] == 0
        (late,) = coming(replica.loop, 1)
        request, places = replica.request(images)
        late.set_result(lent[2])
        assert answered([piece async for piece in replica.llm.handle(request, places, [*lent[:2], late])])[0] == 200
        assert replica.counts.added[Counter.EARLY_PREFILLS, None] == 1

    replica.run(scenario())


def test_where_a_place_does_not_say_what_comes_all_is_waited_for(replica: Replica) -> None:
    """As of an ingress of a version before it."""

    async def scenario() -> None:
        images = replica.images()
        futures = coming(replica.loop, 3)
        request, places = replica.request(images)
        places = [ImageReference(place.tokens_key, place.grid_key, place.image, place.label) for place in places]
        for future, image in zip(futures, images, strict=True):
            future.set_result(replica.lent(image))
        assert answered([piece async for piece in replica.llm.handle(request, places, list(futures))])[0] == 200
        assert replica.counts.added[Counter.EARLY_PREFILLS, None] == 0

    replica.run(scenario())


def test_no_option_of_a_request_has_anything_compiled_while_others_wait(replica: Replica) -> None:
    """vLLM compiled what ranks log-probabilities at the first request that asked for them, which took 15 s and stopped
    all others; without a C++ compiler that ended the engine."""
    options: list[dict[str, object]] = [
        {"logprobs": True, "top_logprobs": 5},
        {"logprobs": True, "n": 2, "temperature": 1.0, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
        {"prompt_logprobs": 1},
        {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1, "temperature": 1.0, "seed": 1},
        {"logit_bias": {"5": 1.0}, "bad_words": ["a"], "min_tokens": 1},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"choice": ["a", "b"]}, "temperature": 1.0},
    ]

    async def scenario() -> None:
        for given in options:
            request, _ = replica.request([], messages=[{"role": "user", "content": "Hi"}], **given)
            pieces = [piece async for piece in replica.llm.handle(request, [], [])]
            assert [piece.status for piece in pieces if isinstance(piece, ResponseHead)] == [200], given
        assert await compiled(replica.llm) == replica.num_compiled

    replica.run(scenario())
