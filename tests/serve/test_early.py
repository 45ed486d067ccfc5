"""A language model replica whose vLLM is given requests while their embeddings are on their way.

The engine is vLLM's own, in this process's charge; the encoders are the test's, so that each embedding comes when the
test says. Answers are compared with those to the same embeddings given at once. One file, since all of it asks one
engine, which takes half a minute to start.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.exceptions import RayActorError

from configs.schema import AppConfig, TcpConfig
from deployments.common.messages import (
    ImageRefused,
    NotEncoded,
    ResponseHead,
)
from deployments.common.replica_errors import TransferFailedError
from deployments.llm.deployment import LLM
from deployments.telemetry.metrics import Counter
from deployments.transfer.same_host import ShmServer
from deployments.transfer.shared_store import EmbeddingStore
from deployments.transfer.tcp_server import TcpServer
from deployments.transfer.unix_socket import host_id
from tests.serve.early_replica import (
    LOOK_S,
    Replica,
    answered,
    at_once,
    coming,
    compiled,
    same,
)
from tests.unit.deployments.llm.receivers import FreeAdded, eventually
from tests.unit.deployments.transfer.stored_embeddings import tokens_of


@pytest.fixture(scope="module")
def replica(checkpoints: dict[str, Path]) -> Iterator[Replica]:
    config = AppConfig.model_validate(
        {
            "model": str(checkpoints["qwen3"]),
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
    server, tcp = ShmServer(store), TcpServer(store, llm._receiver._tcp._secret, TcpConfig())
    try:
        yield Replica(llm, counts, store, server, tcp, llm._requests._width, merge, token, loop, num_compiled)
    finally:
        server.close()
        tcp.close()
        llm.__del__()
        llm._engine = None  # type: ignore[assignment]  # ended
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


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


def test_a_video_is_read_as_its_chunks_come_and_the_answer_is_that_to_the_whole(replica: Replica) -> None:
    """Twice: the second time, vLLM has the item, and one of its chunks comes late."""

    async def scenario() -> None:
        header, parts = replica.video((8, 8, 8), (3, 3, 2))
        whole = dataclasses.replace(header, digest="e" * 64, chunks=())
        [joined] = replica.parts(whole, torch.cat([tokens_of(part) for part in parts]))
        for late in (range(3), (0, 2, 1)):
            before = replica.num_loaded
            futures = coming(replica.loop, 3)
            answer = asyncio.ensure_future(replica.told_of_video(header, list(futures)))
            for step, number in enumerate(late):
                await asyncio.sleep(LOOK_S)
                assert not answer.done()
                futures[number].set_result(replica.lent(parts[number]))
                if late == range(3):
                    await eventually(lambda due=before + step + 1: replica.num_loaded == due)  # type: ignore[misc]
            status, tokens = answered(await answer)
            assert status == 200
            _, expected = answered(await replica.told_of_video(whole, [replica.lent(joined)]))
            same(tokens, expected)
            await eventually(replica.nothing_is_left)

    replica.run(scenario())


def test_a_chunk_that_is_refused_refuses_the_video(replica: Replica) -> None:
    async def scenario() -> None:
        header, parts = replica.video((8, 8, 8), (4, 4))
        futures = coming(replica.loop, 2)
        answer = asyncio.ensure_future(replica.told_of_video(header, list(futures)))
        futures[0].set_result(replica.lent(parts[0]))
        await asyncio.sleep(LOOK_S)
        futures[1].set_result(ImageRefused("frame 9 of the video cannot be decoded"))
        _, head, body = await answer
        assert isinstance(head, ResponseHead)
        assert head.status == 400
        assert b"video 1: frame 9 of the video cannot be decoded" in body  # type: ignore[operator]
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
        await eventually(lambda: sum(replica.llm._stats._load.__dict__.values()) >= 2)
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
def test_what_comes_from_another_host_is_loaded_like_the_others(replica: Replica, which: int) -> None:
    async def scenario() -> None:
        images = replica.images()
        before = replica.num_loaded
        futures, answer = replica.asked(images)
        await asyncio.sleep(LOOK_S)
        for number, (future, image) in enumerate(zip(futures, images, strict=True)):
            future.set_result(replica.lent(image, far=number == which))
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
        wrong = dataclasses.replace(replica.lent(images[1]), shape=(4, replica.width))
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
    """One that vLLM has, a new one, the same again, and one from another host; the text between them counts."""

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
        futures[1].set_result(replica.lent(images[2]))
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
        futures[1].set_result(images[1].to_shared(f"{host_id()}/vitray-nobody"))
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
