"""From image parts to jobs: limits that name value and limit, each distinct image once, `detail`, cancelled fetches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from configs.schema import AudioConfig, FetchConfig, IngressConfig
from deployments.common.api_error import ApiError
from deployments.common.messages import HttpRequest, VideoSampling
from deployments.ingress.fetch.fetcher import MediaBusyError, MediaFetcher
from deployments.ingress.http.chat_request import ChatRequest
from deployments.ingress.http.image_parts import BodyFormat, ImagePart, MediaError, MediaTooLargeError
from deployments.ingress.image_jobs import (
    RequestImages,
    build_encoder_jobs,
    build_engine_request,
    fetch_images,
    measure_image,
)
from encoder.checkpoint.video_rules import VideoRules
from encoder.images.generic_identity import GenericIdentity, Identity
from encoder.images.identity import EncoderIdentity
from encoder.images.size import PixelBounds
from tests.serve.pictures import data_url
from tests.sounds import tone
from tests.unit.deployments.samples import IDENTITY, RULES, png, request_images

RED, BLUE = png(), png(colour=(0, 0, 255))


class Files(MediaFetcher):
    """Files by name instead of URLs; an exception is raised, an event is waited for."""

    def __init__(self, **files: object) -> None:
        super().__init__(FetchConfig(), max_bytes=10**6)
        self._files = files
        self.cancelled: list[str] = []

    async def fetch(self, url: str, **_: object) -> bytes:
        found = self._files[url]
        if isinstance(found, asyncio.Event):
            try:
                await found.wait()
            except asyncio.CancelledError:
                self.cancelled.append(url)
                raise
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, bytes)
        return found


def parts(*names: str, detail: str = "auto") -> list[ImagePart]:
    return [ImagePart({}, name, detail, f"image {i + 1} of {len(names)}") for i, name in enumerate(names)]


def jobs(
    images: Sequence[ImagePart], fetcher: Files, bounds: PixelBounds | None = None, **limits: Any
) -> RequestImages:
    return asyncio.run(request_images(images, bounds, IDENTITY, fetcher, IngressConfig(**limits)))


def refusal(images: Sequence[ImagePart], fetcher: Files, bounds: PixelBounds | None = None, **limits: Any) -> ApiError:
    with pytest.raises(ApiError) as refused:
        jobs(images, fetcher, bounds, **limits)
    assert refused.value.param == "messages"
    return refused.value


def test_jobs_carry_file_bounds_digest_and_identity() -> None:
    bounds = PixelBounds(None, 28 * 28 * 50)
    (job,) = jobs(parts("red"), Files(red=RED), bounds).jobs
    assert (job.data, job.bounds, job.identity) == (RED, bounds, IDENTITY.fingerprint)
    assert job.digest == IDENTITY.digest(RED, bounds)


def test_each_distinct_image_is_one_job_and_the_order_is_the_parts() -> None:
    found = jobs(parts("red", "blue", "again", "blue"), Files(red=RED, blue=BLUE, again=RED))
    assert [job.data for job in found.jobs] == [RED, BLUE]
    assert found.job_of_part == [0, 1, 0, 1]
    assert [job.tokens_before for job in found.jobs] == [0, found.jobs[0].num_tokens]


def test_the_same_file_at_another_detail_is_another_job() -> None:
    large = png(280, 280)
    images = [*parts("red"), *parts("red", detail="low")]
    found = jobs(images, Files(red=large), low_detail_max_pixels=56 * 56)
    assert found.job_of_part == [0, 1]
    assert found.jobs[0].digest != found.jobs[1].digest


def test_a_request_without_images_has_no_jobs() -> None:
    assert jobs([], Files()) == RequestImages([], [])


@pytest.mark.parametrize(
    ("asked", "low"),
    [
        (None, PixelBounds(None, 3136)),
        (PixelBounds(), PixelBounds(None, 3136)),
        (PixelBounds(None, 10_000), PixelBounds(None, 3136)),
        (PixelBounds(None, 1000), PixelBounds(None, 1000)),
        (PixelBounds(2000, 10_000), PixelBounds(2000, 3136)),
        (PixelBounds(9000, 10_000), PixelBounds(3136, 3136)),
        (PixelBounds(9000, None), PixelBounds(3136, 3136)),
    ],
)
def test_low_detail_caps_the_pixels_and_the_others_do_not(asked: PixelBounds | None, low: PixelBounds) -> None:
    for detail, wanted in (("low", low), ("high", asked), ("auto", asked)):
        (job,) = jobs(parts("red", detail=detail), Files(red=RED), asked, low_detail_max_pixels=3136).jobs
        assert job.bounds == wanted


def test_low_detail_costs_less() -> None:
    """10x10 tokens, and 2x2 at low detail: the limit of 4 shows which of the two was counted."""
    large = Files(red=png(280, 280))
    limits: dict[str, Any] = {"max_visual_tokens_per_image": 4, "low_detail_max_pixels": 56 * 56}
    assert len(jobs(parts("red", detail="low"), large, **limits).jobs) == 1
    assert "comes to 100 visual tokens, the limit is 4" in refusal(parts("red"), large, **limits).message


def test_too_many_images_are_refused_before_any_is_fetched() -> None:
    images = [{"type": "image_url", "image_url": {"url": f"http://a.example/{name}"}} for name in "abc"]
    body = json.dumps({"messages": [{"role": "user", "content": images}]}).encode()
    with pytest.raises(ApiError) as refused:
        ChatRequest.parse([body], IngressConfig(max_images_per_request=2), body_format=BodyFormat.CHAT, salt=None)
    error = refused.value
    assert (error.status, error.message) == (400, "the request has 3 images, the limit is 2")


def test_an_image_with_too_many_tokens_is_named() -> None:
    files = Files(small=png(28, 28), large=png(84, 56))
    error = refusal(parts("small", "large"), files, max_visual_tokens_per_image=5)
    assert (error.status, error.message) == (400, "image 2 of 2 comes to 6 visual tokens, the limit is 5")
    assert len(jobs(parts("small", "large"), files, max_visual_tokens_per_image=6).jobs) == 2


def test_the_tokens_of_a_request_are_bounded_repeats_included() -> None:
    """A repeated image is encoded once, but the language model reads it every time."""
    files = Files(red=RED)
    error = refusal(parts("red", "red", "red"), files, max_visual_tokens_per_request=11)
    assert (error.status, error.message) == (400, "the images come to 12 visual tokens, the limit is 11")
    assert len(jobs(parts("red", "red", "red"), files, max_visual_tokens_per_request=12).jobs) == 1


def test_enlarging_by_min_pixels_is_bounded_too() -> None:
    error = refusal(parts("red"), Files(red=RED), PixelBounds(2**40, None), max_visual_tokens_per_image=1000)
    assert error.status == 400
    assert "visual tokens, the limit is 1000" in error.message


def test_too_many_pixels_are_refused_by_the_header() -> None:
    error = refusal(parts("red"), Files(red=png(100, 100)), max_image_pixels=9_999)
    assert (error.status, error.code) == (400, "invalid_image")
    assert error.message == "image 1 of 1: image has 100x100 = 10000 pixels, the limit is 9999"
    jobs(parts("red"), Files(red=png(100, 100)), max_image_pixels=10_000)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"no image", "not an image"),
        (png()[:20], "truncated or corrupt"),
        (png(28 * 201, 28), "aspect ratio 201, the limit is 200"),
    ],
)
def test_what_is_no_usable_image_is_named(data: bytes, told: str) -> None:
    error = refusal(parts("red", "bad"), Files(red=RED, bad=data))
    assert (error.status, error.code) == (400, "invalid_image")
    assert error.message.startswith("image 2 of 2: ")
    assert told in error.message


def test_what_cannot_be_fetched_is_named() -> None:
    error = refusal(parts("red", "gone"), Files(red=RED, gone=MediaError("status 404")))
    assert (error.status, error.code, error.message) == (400, "invalid_image_url", "image 2 of 2: status 404")
    error = refusal(parts("red", "big"), Files(red=RED, big=MediaTooLargeError("too big")))
    assert (error.status, error.code, error.message) == (413, "image_too_large", "image 2 of 2: too big")


def test_too_many_fetches_are_a_503() -> None:
    with pytest.raises(ApiError) as refused:
        jobs(parts("busy"), Files(busy=MediaBusyError("too many images are being fetched; try again")), retry_after_s=4)
    assert (refused.value.status, refused.value.code, refused.value.retry_after_s) == (503, "overloaded", 4)


def test_a_bad_url_cancels_the_other_fetches() -> None:
    async def scenario() -> None:
        files = Files(slow=asyncio.Event(), gone=MediaError("status 404"), slower=asyncio.Event())
        with pytest.raises(ApiError):
            await request_images(parts("slow", "gone", "slower"), None, IDENTITY, files, IngressConfig())
        await asyncio.sleep(0)
        assert sorted(files.cancelled) == ["slow", "slower"]

    asyncio.run(scenario())


def test_a_client_that_leaves_cancels_its_fetches() -> None:
    async def scenario() -> None:
        files = Files(slow=asyncio.Event())
        task = asyncio.create_task(request_images(parts("slow"), None, IDENTITY, files, IngressConfig()))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert files.cancelled == ["slow"]

    asyncio.run(scenario())


def test_images_are_fetched_side_by_side() -> None:
    """Each waits for the other to have started."""

    async def scenario() -> None:
        both = asyncio.Barrier(2)

        class Meeting(Files):
            async def fetch(self, url: str, **_: object) -> bytes:
                await asyncio.wait_for(both.wait(), 5)
                return RED

        found = await request_images(parts("a", "b"), None, IDENTITY, Meeting(), IngressConfig())
        assert found.job_of_part == [0, 0]

    asyncio.run(scenario())


GENERIC = GenericIdentity("checkpoint", "settings", ((100,) * 4,) * 4)


def generic_jobs(images: Sequence[ImagePart], fetcher: Files, bounds: PixelBounds | None = None, **limits: Any) -> Any:
    return asyncio.run(request_images(images, bounds, GENERIC, fetcher, IngressConfig(**limits)))


def test_without_image_rules_the_cost_is_estimated_and_the_encoder_sends_the_header() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(RED)}}]}]}
    chat = ChatRequest.parse([json.dumps(body).encode()], IngressConfig(), body_format=BodyFormat.CHAT, salt=None)
    http = HttpRequest("POST", "/v1/chat/completions", b"", [], b"")
    request = build_engine_request(chat, http, GENERIC, IngressConfig(), None, measure_image)
    assert request.headers == [None]
    assert (request.visual_tokens, request.tower) == (100, GENERIC.tower)
    assert (request.jobs[0].identity, request.jobs[0].size) == (GENERIC.fingerprint, (56, 56))


def test_of_an_image_no_more_than_its_size_is_remembered() -> None:
    """Remembered headers took kilobytes an image; they are computed again, with vLLM's encoder as well."""
    limits, image = IngressConfig(), ImagePart({}, "", "auto", "image 1 of 1", RED)
    size = measure_image("digest", RED, limits)
    assert size == (56, 56)
    for identity in (IDENTITY, GENERIC):
        remembered = build_encoder_jobs([image], None, identity, limits, None, lambda *_: size)
        assert remembered == build_encoder_jobs([image], None, identity, limits)
        assert (remembered.headers[0] is None) == (identity is GENERIC)


def test_estimated_tokens_are_bounded() -> None:
    with pytest.raises(ApiError, match="image 1 of 1 comes to 100 visual tokens, the limit is 99"):
        generic_jobs(parts("red"), Files(red=RED), max_visual_tokens_per_image=99)


def test_without_image_rules_a_request_cannot_bound_pixels_and_detail_changes_nothing() -> None:
    """Ignored bounds would let a client believe in them; vLLM alone ignores `detail`."""
    with pytest.raises(ApiError, match="images of this model have no pixel bounds") as refused:
        generic_jobs(parts("red"), Files(red=RED), PixelBounds(None, 10_000))
    assert (refused.value.status, refused.value.param) == (400, "mm_processor_kwargs")
    low, high = (generic_jobs(parts("red", detail=each), Files(red=RED)).jobs for each in ("low", "high"))
    assert low == high


HEARS = GenericIdentity("checkpoint", "settings", ((64,) * 4,) * 4, audio_tokens=(25, 250, 1500))


def sound(file: bytes, modality: str = "audio") -> ImagePart:
    return ImagePart({}, "", "auto", f"{modality} 1 of 1", file, modality=modality)


def test_a_sound_costs_what_its_header_states() -> None:
    found = build_encoder_jobs([sound(tone(seconds=4)), sound(RED, "image")], None, HEARS, IngressConfig())
    assert [(job.modality, job.num_tokens, job.tokens_before) for job in found.jobs] == [
        ("audio", 100, 0),
        ("image", 64, 100),
    ]
    assert found.headers == [None, None]
    assert found.jobs[0].digest != HEARS.digest(found.jobs[0].data, None), "media have digests of their own"


@pytest.mark.parametrize(
    ("identity", "file", "limits", "code", "message"),
    [
        (HEARS, tone(seconds=4), {"max_seconds": 3}, "invalid_audio", "the sound has 4.0 s, the limit is 3"),
        (
            HEARS,
            tone(seconds=1),
            {"max_samples": 100},
            "invalid_audio",
            "the sound has 16000 samples, the limit is 100",
        ),
        (HEARS, RED, {}, "invalid_audio", "not an audio file of a supported format: WAV, FLAC, MP3, OGG"),
        (IDENTITY, tone(), {}, "unsupported_media", "the model takes no sounds here, only text and images"),
        (replace(HEARS, audio_tokens=()), tone(), {}, "unsupported_media", "the model takes no sounds here, "),
    ],
)
def test_sounds_that_are_refused(
    identity: Identity, file: bytes, limits: dict[str, Any], code: str, message: str
) -> None:
    with pytest.raises(ApiError) as refused:
        build_encoder_jobs([sound(file)], None, identity, IngressConfig(audio=AudioConfig(**limits)))
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, code, "messages")
    assert refused.value.message.startswith(f"audio 1 of 1: {message}")


@pytest.mark.parametrize("modality", ["image", "audio", "video"])
def test_a_file_of_each_medium_is_fetched_within_its_own_bound(modality: str) -> None:
    asked = []

    class Fetcher(Files):
        async def fetch(self, url: str, **options: object) -> bytes:
            asked.append((url, options["max_bytes"]))
            return b"file"

    bounds = {"max_image_bytes": 11, "audio": {"max_bytes": 12}, "video": {"max_bytes": 13}}
    limits = IngressConfig.model_validate(bounds)
    part = replace(sound(b"", modality), url="https://example.com/file", file=None)
    [fetched] = asyncio.run(fetch_images([part], Fetcher(), limits))
    assert (fetched.file, asked) == (
        b"file",
        [("https://example.com/file", {"image": 11, "audio": 12, "video": 13}[modality])],
    )


def test_a_video_is_named_by_its_file_and_its_sampling() -> None:
    """Decode workers parse its container: here even its format is unknown, and its tokens are estimated."""
    sees, digests = replace(HEARS, video_tokens=512), set()
    for sampling in (VideoSampling(), VideoSampling(fps=1), VideoSampling(num_frames=1)):
        jobs = build_encoder_jobs([sound(b"file", "video")], None, sees, IngressConfig(), sampling=sampling).jobs
        assert [(job.modality, job.sampling, job.num_tokens) for job in jobs] == [("video", sampling, 512)]
        digests.add(jobs[0].digest)
    assert len(digests) == 3
    with pytest.raises(ApiError, match="the model takes no videos here"):
        build_encoder_jobs([sound(b"file", "video")], None, HEARS, IngressConfig())


def test_one_of_our_towers_takes_videos() -> None:
    """By the checkpoint's rules; a request's bounds on pixels are those of its images."""
    sees = replace(IDENTITY, videos=VideoRules("qwen2_vl", RULES, 2.0, 4, 768))
    assert sees.fingerprint != IDENTITY.fingerprint
    assert EncoderIdentity.from_json(sees.to_json()) == sees
    [job] = build_encoder_jobs([sound(b"file", "video")], None, sees, IngressConfig()).jobs
    assert (job.modality, job.num_tokens, job.identity) == ("video", 0, sees.fingerprint)
    with pytest.raises(ApiError, match="cannot bound the pixels of videos"):
        build_encoder_jobs([sound(b"file", "video")], PixelBounds(None, 100), sees, IngressConfig())


def test_a_model_without_images_refuses_them() -> None:
    only_hears = replace(HEARS, token_counts=())
    with pytest.raises(ApiError, match="the model takes no images here, only text and sounds"):
        build_encoder_jobs([sound(RED, "image")], None, only_hears, IngressConfig())
