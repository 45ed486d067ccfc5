"""Videos of our own towers: an encoder reads the header once, and each chunk is a job."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayActorError
from starlette.requests import Request
from starlette.responses import Response

from deployments.common.messages import (
    Accepted,
    Deferred,
    ImageJob,
    ImageRefused,
    PlannedVideo,
    SharedEmbedding,
    VideoSampling,
)
from deployments.common.replica_errors import IdentityGoneError
from deployments.ingress.deployment import Ingress
from deployments.ingress.failures import MAX_ATTEMPTS
from deployments.ingress.replica_client import MAX_PLANNING
from deployments.routing.affinity import Call
from encoder.checkpoint.video_rules import VideoRules
from encoder.item_header import ChunkHeader, ItemHeader, VideoFields
from encoder.video.size import plan_chunks
from tests.unit.deployments.ingress.test_embedding_directory import seen
from tests.unit.deployments.samples import IDENTITY, RULES
from tests.unit.deployments.stand_ins import (
    IMAGE,
    RETRY_AFTER_S,
    Accepting,
    Pieces,
    asked,
    chat,
    ingress_of,
    told,
)

SEES = dataclasses.replace(IDENTITY, videos=VideoRules("qwen2_vl", RULES, 2.0, 4, 768))
GRID = (5, 4, 4)
INDICES = tuple(range(0, 18, 2))
"""Of nine frames, so that the last patch has one."""


def video(file: bytes) -> dict[str, Any]:
    return {
        "type": "video_url",
        "video_url": {"url": "data:video/mp4;base64," + base64.b64encode(file).decode()},
    }


class Videos(Accepting):
    """Encoders that read every file as the same video, but for one that they refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.run(SEES)
        self.planned: list[ImageJob] = []
        """With their files."""
        self.lost = 0
        """Encoders that end while they read a header, one after the other."""
        self.locations: tuple[SharedEmbedding | None, ...] = ()
        """Where the language model read the chunks of the last request."""

    def accepted(self) -> Accepted:
        return Accepted(self.locations)

    def _plan(self, job: object, file: object) -> Pieces:
        assert isinstance(job, ImageJob)
        assert job.data == b"", "the file travels as a reference"
        [data] = cast(list[bytes], file)  # in a list: the replica fetches it itself
        self.planned.append(dataclasses.replace(job, data=data))
        if self.lost:
            self.lost -= 1
            return Pieces(RayActorError())
        if data == b"broken":
            return Pieces(ImageRefused("video data is truncated or corrupt"))
        chunks = tuple(plan_chunks(GRID, len(INDICES), 2, RULES))
        rows = tuple(chunk.num_tokens for chunk in chunks)
        header = ItemHeader(job.digest, "video", 20, (), VideoFields(GRID, seconds_per_grid=1.0), rows)
        return Pieces(PlannedVideo(header, INDICES, chunks))


@pytest.fixture(autouse=True)
def stored(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Files that the ingress puts into the object store; a file stands for its reference."""
    files: list[bytes] = []

    def put(file: bytes) -> bytes:
        files.append(file)
        return file

    monkeypatch.setattr(ray, "put", put)
    return files


def test_each_chunk_of_a_video_is_encoded_by_a_job_of_its_own(stored: list[bytes]) -> None:
    stand_ins = Videos()
    assert chat(stand_ins, video(b"one"), IMAGE).status_code == 200
    [planned], [first, second, third, image] = stand_ins.planned, stand_ins.jobs
    assert (planned.data, stored) == (b"one", [b"one"])
    [headers], [references] = stand_ins.headers, stand_ins.references
    assert isinstance(headers[0], ItemHeader)
    assert headers[0].digest == planned.digest
    assert headers[0].embeddings == [ChunkHeader(job.digest, job.num_tokens) for job in (first, second, third)]
    assert headers[1:3] == headers[0].embeddings[1:]
    assert [reference.item for reference in references] == [0, 3]
    assert [job.num_tokens for job in (first, second, third)] == [8, 8, 4]
    assert [job.tokens_before for job in (first, second, third)] == [0, 8, 16]
    for job in (first, second, third):
        assert job.chunk is not None
        assert (job.data, str(job.chunk.file), job.chunk.indices) == (b"", str(b"one"), INDICES)
    assert [job.chunk.part.num_frames for job in (first, second, third) if job.chunk] == [4, 4, 1]
    assert image.chunk is None
    calls = [Call.from_session_id(label) for label in stand_ins.labels["encode"]]
    of_video, of_image = (planned.digest, True), (image.digest, False)
    assert [(call.key, call.sticky) for call in calls] == [of_video] * 3 + [of_image], "one decoder reads the file"
    assert image.tokens_before == 20


def test_a_video_that_is_refused_is_named() -> None:
    stand_ins = Videos()
    error = told(chat(stand_ins, IMAGE, video(b"broken")), 400)
    assert (error["code"], error["param"]) == ("invalid_video", "messages")
    assert error["message"] == "video 1 of 1 (messages[0].content[1]): video data is truncated or corrupt"
    assert not stand_ins.jobs


def test_a_header_is_read_by_another_encoder_where_one_was_lost(stored: list[bytes]) -> None:
    stand_ins = Videos()
    stand_ins.lost = 2
    assert chat(stand_ins, video(b"one")).status_code == 200
    assert [Call.from_session_id(label).attempt for label in stand_ins.labels["plan"]] == [0, 1, 2]
    assert stored == [b"one"]
    assert len(stand_ins.jobs) == 3
    stand_ins.lost = MAX_ATTEMPTS
    assert told(chat(stand_ins, video(b"two")), 503)["code"] == "replica_lost"


def test_admission_and_limits_count_the_tokens_that_the_header_states() -> None:
    """20 tokens of the video, 4 of the image."""
    stand_ins = Videos()
    error = told(chat(stand_ins, video(b"one"), IMAGE, limits={"max_visual_tokens_per_request": 23}), 400)
    assert error["message"] == "the images and videos come to 24 visual tokens, the limit is 23"
    assert not stand_ins.jobs
    admitted = chat(stand_ins, video(b"one"), IMAGE, limits={"max_visual_tokens_per_request": 24})
    assert admitted.status_code == 200
    twice = told(chat(stand_ins, video(b"one"), video(b"one"), limits={"max_visual_tokens_per_request": 39}), 400)
    assert twice["message"] == "the images and videos come to 40 visual tokens, the limit is 39"


def test_a_quota_holds_where_the_encoders_change_while_a_header_is_read() -> None:
    """The second attempt was not charged."""

    class Changing(Videos):
        def _plan(self, job: object, file: object) -> Pieces:
            return super()._plan(job, file) if self.planned else self._gone(job, file)

        def _gone(self, job: object, file: object) -> Pieces:
            super()._plan(job, file)
            return Pieces(IdentityGoneError("another model has taken over"))

    limits = {"rate_limit": {"visual_tokens_per_minute": 19}}
    for stand_ins in (Videos(), Changing()):
        told(chat(stand_ins, video(b"one"), limits=limits), 429)
        assert not stand_ins.jobs


def test_an_evicted_chunk_is_encoded_again_alone(stored: list[bytes]) -> None:
    """The ingress knows where the others are; the header is not read again."""
    stand_ins = Videos()
    messages: Sequence[object] = [{"role": "user", "content": [video(b"one")]}]

    async def scenario() -> None:
        ingress = ingress_of(stand_ins)
        assert (await sent(ingress, messages)).status_code == 200
        assert len(stand_ins.jobs) == 3
        stand_ins.locations = tuple(seen(job.digest) for job in stand_ins.jobs)
        assert (await sent(ingress, messages)).status_code == 200
        ingress._replicas.discard_location(seen(stand_ins.jobs[1].digest))
        assert (await sent(ingress, messages)).status_code == 200

    asyncio.run(scenario())
    assert [job.digest for job in stand_ins.jobs[6:]] == [stand_ins.jobs[1].digest]
    assert [type(one) for one in stand_ins.given[-1]] == [SharedEmbedding, Pieces, SharedEmbedding]
    assert len(stand_ins.planned) == 1


async def sent(ingress: Ingress, messages: Sequence[object]) -> Response:
    body = json.dumps({"messages": messages}).encode()
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": []}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    return await ingress(Request(scope, receive))


def test_videos_whose_tokens_are_counted_are_not_encoded() -> None:
    stand_ins = Videos()
    body = {"messages": [{"role": "user", "content": [video(b"one")]}]}
    assert asked(stand_ins, "POST", "/tokenize", json=body).status_code == 200
    assert not stand_ins.jobs
    assert [[type(one) for one in given] for given in stand_ins.given] == [[Deferred] * 3]


def test_the_operators_sampling_holds_where_a_request_chooses_nothing() -> None:
    stand_ins = Videos()
    limits = {"llm": {"engine_args": {"media_io_kwargs": {"video": {"fps": 1.0}}}}}
    for chosen in ({}, {"media_io_kwargs": {"video": {"num_frames": 4}}}):
        assert chat(stand_ins, video(b"one"), limits={**limits}, **chosen).status_code == 200
    assert [job.sampling for job in stand_ins.planned] == [VideoSampling(fps=1.0), VideoSampling(num_frames=4)]


@pytest.mark.parametrize("error", [ObjectStoreFullError("full"), OutOfDiskError("full")])
def test_a_full_object_store_is_a_503(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """When the header is to be read, and when that is known. The event loop goes on while a file is stored."""
    stand_ins = Videos()
    threads: list[str] = []

    def put(_: bytes) -> None:
        threads.append(threading.current_thread().name)
        raise error

    async def scenario() -> None:
        ingress = ingress_of(stand_ins)
        messages: Sequence[object] = [{"role": "user", "content": [video(b"one")]}]
        with monkeypatch.context() as full:
            full.setattr(ray, "put", put)
            assert (await sent(ingress, messages)).status_code == 503
        assert (await sent(ingress, messages)).status_code == 200
        monkeypatch.setattr(ray, "put", put)
        answer = await sent(ingress, messages)
        assert json.loads(bytes(answer.body))["error"]["message"] == "the memory for files is full; try again"
        assert answer.headers["retry-after"] == str(RETRY_AFTER_S)

    asyncio.run(scenario())
    assert len(stand_ins.planned) == 1
    assert len(threads) == 2
    assert threading.main_thread().name not in threads


def test_headers_of_one_client_are_read_a_few_at_a_time() -> None:
    """They are read before the client is admitted. Another client does not wait for it."""

    class Slow(Videos):
        def __init__(self) -> None:
            super().__init__()
            self.go_on = asyncio.Event()

        def _plan(self, job: object, file: object) -> Pieces:
            answer = super()._plan(job, file)
            return Pieces(self.go_on, *answer._pieces)

    async def scenario() -> None:
        stand_ins = Slow()
        replicas = ingress_of(stand_ins)._replicas
        jobs = [job_of(number) for number in range(MAX_PLANNING + 5)]
        requests = [asyncio.create_task(replicas.plan_videos([job], "one")) for job in jobs]
        await until(lambda: len(stand_ins.planned) == MAX_PLANNING)
        other = asyncio.create_task(replicas.plan_videos([job_of(100)], "two"))
        await until(lambda: len(stand_ins.planned) == MAX_PLANNING + 1)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(stand_ins.planned) == MAX_PLANNING + 1
        stand_ins.go_on.set()
        assert len(await asyncio.gather(*requests, other)) == MAX_PLANNING + 6

    asyncio.run(scenario())


def test_headers_are_not_read_on_where_one_failed() -> None:
    class Failing(Videos):
        def _plan(self, job: object, file: object) -> Pieces:
            answer = super()._plan(job, file)
            if len(self.planned) == 1:
                self.both = asyncio.Event()
                return Pieces(self.both, IdentityGoneError("another model has taken over"))
            self.both.set()
            self.second = Pieces(asyncio.Event(), *answer._pieces)
            return self.second

    async def scenario() -> None:
        stand_ins = Failing()
        with pytest.raises(IdentityGoneError):
            await ingress_of(stand_ins)._replicas.plan_videos([job_of(1), job_of(2)])
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert stand_ins.second.cancelled, "its encoder would read on"

    asyncio.run(scenario())


def job_of(number: int) -> ImageJob:
    digest = f"{number:064x}"
    return ImageJob(b"file", None, digest, "", (0, 0), 0, modality="video", in_chunks=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.001)
