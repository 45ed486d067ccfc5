"""From image parts to jobs: limits that name value and limit, each distinct image once, `detail`, cancelled fetches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from configs.schema import FetchConfig, IngressConfig
from deployments.common.api_error import ApiError
from deployments.ingress.fetch.fetcher import MediaBusyError, MediaError, MediaFetcher, MediaTooLargeError
from deployments.ingress.http.chat_request import ChatRequest
from deployments.ingress.http.image_parts import BodyFormat, ImagePart
from deployments.ingress.image_jobs import RequestImages
from encoder.images.size import PixelBounds
from tests.unit.deployments.samples import IDENTITY, png, request_images

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
