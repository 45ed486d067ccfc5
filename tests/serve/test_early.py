"""A language model replica whose vLLM is given requests while their embeddings are on their way.

The engine is vLLM's own, in this process's charge; the encoders are the test's, so that each embedding comes when the
test says. Answers are compared with those to the same embeddings given at once. One file, since all of it asks one
engine, which takes half a minute to start.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator, Sequence
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
    ImageRefused,
    ItemReference,
    NotEncoded,
    ResponseHead,
    SharedEmbedding,
    new_key,
)
from deployments.common.replica_errors import TransferFailedError
from deployments.llm.deployment import LLM
from deployments.telemetry.metrics import Counter
from deployments.transfer.same_host import ShmServer
from deployments.transfer.shared_store import EmbeddingStore
from encoder.item_header import ItemHeader, PromptRun, PromptUpdate
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
    counts: FreeAdded
    store: EmbeddingStore
    server: ShmServer
    width: int
    merge: int
    token: int
    """Of an image in a prompt."""
    loop: asyncio.AbstractEventLoop
    num_compiled: int
    """What torch had compiled in the engine when the replica was ready."""
    num_made: int = 0

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        self.counts.added.clear()
        self.loop.run_until_complete(asyncio.wait_for(scenario, PATIENCE_S))

    def images(self) -> list[EncodedImage]:
        """New ones of SIDES, in the encoder's memory."""
        made = []
        for h, w in SIDES:
            self.num_made += 1
            rows = h * w // self.merge**2
            tokens = self.store.allocate(rows, self.width, torch.float32)
            assert tokens is not None
            tokens.copy_(torch.randn(rows, self.width, generator=torch.Generator().manual_seed(self.num_made)))
            timings = EncodeTimings(1.0, 2.0, 3.0, time.time(), cached=False)
            made.append(EncodedImage.pack(tokens, f"{self.num_made:064x}", timings))
            assert self.store.offer(made[-1])
        return made

    def lent(self, image: EncodedImage) -> SharedEmbedding:
        return image.to_shared(self.server.address)

    def header(self, image: EncodedImage) -> ItemHeader:
        (grid,) = ((1, h, w) for h, w in SIDES if h * w == image.num_tokens * self.merge**2)
        update = PromptUpdate("replace", (self.token,), (PromptRun(self.token, image.num_tokens, True),))
        return ItemHeader(image.digest, "image", image.num_tokens, (update,), grid)

    def request(self, images: list[EncodedImage], **fields: object) -> tuple[HttpRequest, list[ItemReference]]:
        """Each with a salt of its own, by which it finds nothing in the prefix cache."""
        references = [ItemReference(new_key(), n, f"image {n}") for n in range(len(images))]
        content: list[object] = []
        for reference in references:
            content += [
                {"type": "text", "text": "And this one?"},
                {"type": "image_url", "image_url": {"url": reference.key}},
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
        return HttpRequest("POST", "/v1/chat/completions", b"", headers, json.dumps(body).encode()), references

    async def told(
        self, images: list[EncodedImage], encodings: Sequence[Awaitable[Any] | SharedEmbedding], **fields: object
    ) -> list[object]:
        request, references = self.request(images, **fields)
        headers = [self.header(image) for image in images]
        return [piece async for piece in self.llm.handle(request, references, headers, encodings)]

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
            len(self.llm._receiver) == len(self.llm._frontend.references) == 0
            and self.llm._requests.num_early_prefills == self.llm._requests.num_in_flight == 0
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
    num_compiled = loop.run_until_complete(compiled(llm))
    counts = FreeAdded()
    llm._requests._counts = llm._receiver._counts = counts
    config_of_model = llm._engine.model_config.hf_config
    merge, token = config_of_model.vision_config.spatial_merge_size, config_of_model.image_token_id
    store = EmbeddingStore(2**22)
    server = ShmServer(store)
    try:
        yield Replica(llm, counts, store, server, llm._requests._width, merge, token, loop, num_compiled)
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
    """The answer without anything of this: the embeddings are there before the request."""
    status, tokens = answered(await replica.told(images, [replica.lent(image) for image in images]))
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
        assert replica.llm._requests.num_early_prefills == 1
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
        assert await answer == [NotEncoded((2,))]
        futures[1].cancel()
        await eventually(replica.nothing_is_left)
        await at_once(replica, images)

    replica.run(scenario())


@pytest.mark.parametrize("which", [2, 0])
def test_what_comes_through_the_object_store_is_loaded_like_the_others(replica: Replica, which: int) -> None:
    async def scenario() -> None:
        images = replica.images()
        before = replica.num_loaded
        futures, answer = replica.asked(images)
        await asyncio.sleep(LOOK_S)
        for number, (future, image) in enumerate(zip(futures, images, strict=True)):
            future.set_result(image if number == which else replica.lent(image))
        status, tokens = answered(await answer)
        assert status == 200
        assert replica.num_loaded == before + 3
        assert replica.in_vain() == {}
        await eventually(replica.nothing_is_left)
        same(tokens, await at_once(replica, images))

    replica.run(scenario())


def test_an_embedding_that_is_not_what_its_file_said_never_reaches_the_engine(replica: Replica) -> None:
    """It would end the engine. The prompt is computed for the image that the header told of."""

    async def scenario() -> None:
        images = replica.images()
        futures, answer = replica.asked(images)
        wrong = EncodedImage.pack(torch.zeros(4, replica.width), images[1].digest, images[1].timings)
        futures[0].set_result(replica.lent(images[0]))
        futures[1].set_result(wrong)
        futures[2].set_result(replica.lent(images[2]))
        pieces = await answer
        assert answered(pieces)[0] == 500
        assert b"image 1: its embedding does not fit the model" in b"".join(
            one for one in pieces if isinstance(one, bytes)
        )
        assert replica.in_vain() == {"shape_mismatch": 1}
        await eventually(replica.nothing_is_left)
        await at_once(replica, images)

    replica.run(scenario())


def test_the_engine_has_no_tower(replica: Replica) -> None:
    async def scenario() -> None:
        engine: Any = replica.llm._engine
        ((tower_bytes, model_bytes),) = await engine.collective_rpc("weight_bytes")
        assert tower_bytes == 0
        assert model_bytes > 0

    replica.run(scenario())


def test_images_that_come_by_every_path_mix_in_a_request(replica: Replica) -> None:
    """One that vLLM has, a new one, the same again, and one through the object store; the text between them counts."""

    async def scenario() -> None:
        images = replica.images()
        await at_once(replica, images[:1])
        request, references = replica.request([*images, images[1]])
        references[3] = dataclasses.replace(references[3], item=1)
        headers = [replica.header(image) for image in images]
        futures = coming(replica.loop, 2)
        given: list[Any] = [replica.lent(images[0]), *futures]
        pieces = asyncio.ensure_future(_all(replica.llm.handle(request, references, headers, given)))
        await asyncio.sleep(LOOK_S)
        futures[1].set_result(images[2])
        await asyncio.sleep(LOOK_S)
        futures[0].set_result(replica.lent(images[1]))
        status, tokens = answered(await pieces)
        assert status == 200
        request, references = replica.request([*images, images[1]])
        references[3] = dataclasses.replace(references[3], item=1)
        lent = [replica.lent(image) for image in images]
        _, expected = answered(await _all(replica.llm.handle(request, references, headers, lent)))
        same(tokens, expected)
        await eventually(replica.nothing_is_left)

    replica.run(scenario())


async def _all(pieces: AsyncIterator[object]) -> list[object]:
    return [piece async for piece in pieces]


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
    async def scenario() -> None:
        images = replica.images()
        lent = [replica.lent(image) for image in images]
        assert answered(await replica.told(images, lent))[0] == 200
        assert replica.counts.added[Counter.EARLY_PREFILLS, None] == 0
        (late,) = coming(replica.loop, 1)
        late.set_result(lent[2])
        assert answered(await replica.told(images, [*lent[:2], late]))[0] == 200
        assert replica.counts.added[Counter.EARLY_PREFILLS, None] == 1

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
            pieces = [piece async for piece in replica.llm.handle(request, [], [], [])]
            assert [piece.status for piece in pieces if isinstance(piece, ResponseHead)] == [200], given
        assert await compiled(replica.llm) == replica.num_compiled

    replica.run(scenario())
