"""The vision tower beside a language model: as the encoders compute, one image at a time, so many waiting."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from configs.schema import AppConfig
from deployments import local_encoder
from deployments.decode import DecodePool
from deployments.errors import ApiError
from deployments.gpu_worker import GpuWorker
from deployments.local_encoder import LocalEncoder, Tower, load_tower
from deployments.metrics import Count, Counts
from deployments.replica_errors import DeviceMemoryError, DeviceSickError, IdentityChangedError
from deployments.wire import Accepted, EncodedImage, EncodeTimings, ImageJob, ImageRefused, ResponseHead
from encoder import Encoder
from encoder.identity import EncoderIdentity
from encoder.image_size import PixelBounds
from tests.unit.deployments.controlled import StandInLLM
from tests.unit.deployments.samples import at_once, png
from tests.unit.deployments.test_llm import place, request

GATE_WAIT_S = 60


class Told:
    def __init__(self) -> None:
        self.counts: list[Count] = []

    def add(self, count: Count, number: int = 1, **_: object) -> None:
        self.counts += [count] * number


@pytest.fixture(scope="module")
def checkpoint(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["qwen3_vl"]


def config(checkpoint: Path, *, at_most: int = 16, **replica: object) -> AppConfig:
    return AppConfig.model_validate(
        {
            "model": str(checkpoint),
            "llm": {"fallback": "local", "fallback_max_images": at_most},
            "encoder_replica": {"num_gpus": 0, **replica},
            "ingress": {"retry_after_s": 7},
        }
    )


class Lasting(Tower):
    """Of several replicas, none of which ends it."""

    def stop(self) -> None: ...


@pytest.fixture(scope="module")
def tower(checkpoint: Path) -> Iterator[Tower]:
    made = load_tower(config(checkpoint))
    yield Lasting(made.worker, made.decoders)
    made.stop()


def job(data: bytes, identity: EncoderIdentity, size: tuple[int, int], bounds: PixelBounds | None = None) -> ImageJob:
    return ImageJob(data, bounds, identity.digest(data, bounds), identity.fingerprint, size, 4)


def local(
    checkpoint: Path, tower: Tower, told: Told | None = None, *, at_most: int = 16, **replica: object
) -> LocalEncoder:
    counts = cast(Counts, told or Told())
    return LocalEncoder(config(checkpoint, at_most=at_most, **replica), counts, lambda _: tower)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


async def encoded(by: LocalEncoder, *jobs: ImageJob) -> list[EncodedImage | ImageRefused]:
    with by.encodings(jobs) as encodings:
        return list(await asyncio.gather(*encodings))


def test_it_computes_what_encoders_compute(checkpoint: Path, tower: Tower) -> None:
    """The same identity, so the same digests; bounds are those of the job; and the numbers are the library's."""
    library, told = Encoder.from_checkpoint(checkpoint), Told()
    bounds = PixelBounds(None, 64 * 64)
    asked = [(png(320, 160), (320, 160), None), (png(200, 300, (1, 2, 200)), (200, 300), bounds)]

    async def scenario() -> None:
        by = local(checkpoint, tower, told)
        identity = await by.identity()
        assert identity == library.identity
        images = await encoded(by, *(job(data, identity, size, bound) for data, size, bound in asked))
        for image, (data, _, bound) in zip(images, asked, strict=True):
            (expected,) = library.encode([data], bounds=bound)
            assert isinstance(image, EncodedImage)
            assert (image.digest, image.grid_thw) == (expected.digest, expected.grid_thw)
            np.testing.assert_allclose(image.bits, expected.tokens.numpy(), rtol=1e-4, atol=1e-5)
            assert (image.timings.local, image.timings.cached) == (True, False)
        assert told.counts.count(Count.IMAGES_ENCODED_LOCALLY) == 2

    run(scenario())


def test_an_image_that_comes_again_is_not_encoded_again(checkpoint: Path, tower: Tower) -> None:
    told = Told()

    async def scenario() -> None:
        by = local(checkpoint, tower, told)
        one = job(png(), tower.worker.identity, (56, 56))
        first, again = await encoded(by, one, one)
        assert isinstance(first, EncodedImage)
        assert isinstance(again, EncodedImage)
        assert (first.timings.cached, again.timings.cached) == (False, True)
        np.testing.assert_array_equal(first.bits, again.bits)
        assert told.counts.count(Count.IMAGES_ENCODED_LOCALLY) == 1

    run(scenario())


def test_a_bad_image_is_refused_and_a_job_for_other_weights_is_not_done(checkpoint: Path, tower: Tower) -> None:
    async def scenario() -> None:
        by, identity = local(checkpoint, tower), tower.worker.identity
        (refused,) = await encoded(by, job(png()[:60], identity, (56, 56)))
        assert isinstance(refused, ImageRefused)
        other = ImageJob(png(), None, hashlib.sha256(b"x").hexdigest(), "another identity", (56, 56), 4)
        with pytest.raises(IdentityChangedError):
            await encoded(by, other)

    run(scenario())


@contextmanager
def held(tower: Tower) -> Iterator[tuple[Tower, threading.Event, list[int]]]:
    """The tower, whose decoders wait for an event; how many images were at them at once."""
    gate, at_once = threading.Event(), [0, 0]

    class Held:
        async def pixels(self, *arguments: Any) -> object:
            at_once[0] += 1
            at_once[1] = max(at_once)
            try:
                await asyncio.to_thread(gate.wait, GATE_WAIT_S)
                return await tower.decoders.pixels(*arguments)
            finally:
                at_once[0] -= 1

    try:
        yield Tower(tower.worker, cast(DecodePool, Held())), gate, at_once
    finally:
        gate.set()


def test_one_image_at_a_time_and_so_many_waiting(checkpoint: Path, tower: Tower) -> None:
    """More is a 503 that says when to come again; one request is taken whatever it has."""
    told = Told()

    async def scenario() -> None:
        with held(tower) as (slow, gate, at_once):
            by, identity = local(checkpoint, slow, told, at_most=2, cache_bytes=0), tower.worker.identity
            jobs = [job(png(56, 56, (0, 0, colour)), identity, (56, 56)) for colour in range(3)]
            first = asyncio.create_task(encoded(by, *jobs))
            while not at_once[0]:  # noqa: ASYNC110  # a stand-in has no event for it
                await asyncio.sleep(0.001)
            with pytest.raises(ApiError, match=r"3 images wait .*, the limit is 2") as refused:
                await encoded(by, jobs[0])
            assert (refused.value.status, refused.value.code, refused.value.retry_after_s) == (503, "overloaded", 7)
            assert told.counts.count(Count.SHED_REQUESTS) == 1
            gate.set()
            assert len(await first) == 3
            assert at_once == [0, 1]
            assert len(await encoded(by, jobs[0])) == 1, "there is room again"

    run(scenario())


def test_who_leaves_takes_no_room(checkpoint: Path, tower: Tower) -> None:
    async def scenario() -> None:
        with held(tower) as (slow, gate, at_once):
            by, identity = local(checkpoint, slow, at_most=1), tower.worker.identity
            jobs = [job(png(56, 56, (0, 9, colour)), identity, (56, 56)) for colour in range(3)]
            leaves = asyncio.create_task(encoded(by, *jobs))
            while not at_once[0]:  # noqa: ASYNC110  # a stand-in has no event for it
                await asyncio.sleep(0.001)
            leaves.cancel()
            await asyncio.wait([leaves])
            gate.set()
            assert len(await encoded(by, jobs[2])) == 1

    run(scenario())


def test_it_takes_nothing_until_it_is_asked_and_is_loaded_once(checkpoint: Path, tower: Tower) -> None:
    loads: list[AppConfig] = []

    def load(settings: AppConfig) -> Tower:
        loads.append(settings)
        return tower

    async def scenario() -> None:
        by = LocalEncoder(config(checkpoint), cast(Counts, Told()), load)
        by.stop()
        assert loads == []
        await asyncio.gather(*(by.identity() for _ in range(5)))
        assert len(loads) == 1

    run(scenario())


def test_a_tower_that_cannot_be_loaded_is_a_503_and_is_tried_again_later(
    checkpoint: Path, tower: Tower, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[AppConfig] = []

    def load(settings: AppConfig) -> Tower:
        loads.append(settings)
        if len(loads) == 1:
            raise RuntimeError("CUDA out of memory: /secret")
        return tower

    async def scenario() -> None:
        by = LocalEncoder(config(checkpoint), cast(Counts, Told()), load)
        one = job(png(), tower.worker.identity, (56, 56))
        for _ in range(2):
            with pytest.raises(ApiError, match="cannot encode by itself") as refused:
                await encoded(by, one)
            assert (refused.value.status, refused.value.code) == (503, "unavailable")
            assert refused.value.retry_after_s is not None
            assert 7 < refused.value.retry_after_s <= local_encoder.LOAD_AGAIN_S
        assert await by.identity() is None
        assert len(loads) == 1
        later = local_encoder.time.monotonic() + local_encoder.LOAD_AGAIN_S
        monkeypatch.setattr(local_encoder.time, "monotonic", lambda: later)
        assert len(await encoded(by, one)) == 1

    run(scenario())


@pytest.mark.parametrize(
    ("error", "code"), [(DeviceMemoryError("16 images"), "overloaded"), (DeviceSickError("failed"), "unavailable")]
)
def test_a_device_that_fails_is_a_503(checkpoint: Path, tower: Tower, error: Exception, code: str) -> None:
    class Failing:
        identity, resizes, tokens_per_s = tower.worker.identity, False, 0.0
        stopped = False

        def submit(self, _: object) -> Any:
            raise error

        def stop(self) -> None:
            Failing.stopped = True

    class Pool:
        pixels = tower.decoders.pixels

        def stop(self) -> None: ...

    async def scenario() -> None:
        by = local(checkpoint, Tower(cast(GpuWorker, Failing()), cast(DecodePool, Pool())))
        with pytest.raises(ApiError) as refused:
            await encoded(by, job(png(), tower.worker.identity, (56, 56)))
        assert (refused.value.status, refused.value.code) == (503, code)
        assert Failing.stopped == (code == "unavailable"), "what is sick is loaded anew"

    run(scenario())


def replica(checkpoint: Path, load: Callable[[AppConfig], Tower] | None, identity: EncoderIdentity) -> StandInLLM:
    """A language model with a fallback, or without where `load` is None."""
    settings = config(checkpoint)
    if load is None:
        settings = AppConfig(model=str(checkpoint))
    made = StandInLLM(settings, identity.vision.width, identity.vision.spatial_merge_size)
    if load is not None:
        made._local = made._requests.local = LocalEncoder(settings, cast(Counts, Told()), load)
    return made


def pieces(llm: StandInLLM, jobs: list[ImageJob], places: int = 1) -> list[Any]:
    async def ask() -> list[Any]:
        named = [place(number) for number in range(places)]
        return [piece async for piece in llm.handle(request(*named), named, jobs)]

    return asyncio.run(ask())


def test_the_language_model_answers_with_what_it_encoded_itself(checkpoint: Path, tower: Tower) -> None:
    identity = tower.worker.identity
    llm = replica(checkpoint, lambda _: tower, identity)
    accepted, head, *body = pieces(llm, [job(png(), identity, (56, 56))])
    assert isinstance(accepted, Accepted)
    (image,) = json.loads(b"".join(body))["images"]
    (expected,) = Encoder.from_checkpoint(checkpoint).encode([png()])
    assert image["grid"] == list(expected.grid_thw)
    assert image["first"] == pytest.approx(expected.tokens[0, :4].tolist(), rel=1e-4)
    timing = dict(head.headers)[b"server-timing"].decode()
    assert 'way;desc="local"' in timing
    assert timing.partition("image-1;")[2].partition('"')[2].partition('"')[0].endswith(" local")


def test_images_of_one_request_may_come_from_an_encoder_and_be_encoded_here(checkpoint: Path, tower: Tower) -> None:
    """Where an embedding lay lately, say, and the other image is new. Each goes to its own place."""
    identity = tower.worker.identity
    llm = replica(checkpoint, lambda _: tower, identity)
    bits = np.full((4, identity.vision.width), 2.0, np.float32)
    came = EncodedImage("d" * 64, (1, 4, 4), "float32", bits, EncodeTimings(1, 1, 1, 1, cached=False))

    async def ask() -> list[Any]:
        named = [place(0), place(1), place(2)]
        jobs = [job(png(56, 84, (1, 2, 3)), identity, (56, 84)), job(png(84, 56), identity, (84, 56))]
        encodings = [jobs[0], *at_once(came), jobs[1]]
        return [piece async for piece in llm.handle(request(*named), named, encodings)]

    _, _, *body = asyncio.run(ask())
    images = json.loads(b"".join(body))["images"]
    own = Encoder.from_checkpoint(checkpoint).encode([png(56, 84, (1, 2, 3)), png(84, 56)])
    assert [image["grid"] for image in images] == [list(own[0].grid_thw), [1, 4, 4], list(own[1].grid_thw)]
    assert images[1]["first"] == [2.0] * 4
    assert images[2]["first"] == pytest.approx(own[1].tokens[0, :4].tolist(), rel=1e-4)


def test_without_the_tower_the_language_model_refuses(checkpoint: Path, tower: Tower) -> None:
    def fail(_: AppConfig) -> Tower:
        raise RuntimeError("no memory")

    for load in (None, fail):
        llm = replica(checkpoint, load, tower.worker.identity)
        head, body = pieces(llm, [job(png(), tower.worker.identity, (56, 56))])
        assert isinstance(head, ResponseHead)
        assert (head.status, json.loads(body)["error"]["code"]) == (503, "unavailable")
        assert llm.seen.calls == 0
        assert asyncio.run(llm.encoder_identity()) is None


def test_an_answer_is_never_given_without_its_image(checkpoint: Path, tower: Tower) -> None:
    """Two places in the request and one image or none: the engine is not called."""
    identity = tower.worker.identity
    llm = replica(checkpoint, lambda _: tower, identity)
    called: list[object] = []
    llm._app = cast(Any, lambda *_: called.append(1))
    for jobs in ([], [job(png(), identity, (56, 56))]):
        with pytest.raises(IndexError):
            pieces(llm, jobs, places=2)
    assert called == []
