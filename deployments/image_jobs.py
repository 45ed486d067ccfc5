"""From the images of a request to jobs for the encoder: fetched, measured by their headers, digested, never decoded.

It must not know where the jobs are sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from configs.schema import IngressConfig
from deployments.chat_images import ImagePart
from deployments.errors import ApiError
from deployments.media import MediaBusyError, MediaError, MediaFetcher, MediaTooLargeError
from deployments.wire import ImageJob
from encoder.identity import EncoderIdentity
from encoder.image_size import Grid, ImageError, ImageHeader, PixelBounds, grid_of, header, num_tokens


@dataclass(frozen=True)
class RequestImages:
    """The images of one request, each distinct one once."""

    jobs: list[ImageJob]
    job_of_part: list[int]
    """For every image part of the request, in order, its index into `jobs`."""
    num_tokens: int = 0
    """Visual tokens of all parts together, repeats included: what the language model reads."""
    grids: list[Grid] = field(default_factory=list)
    """Of each job, what its embedding's is going to be."""


async def request_images(
    parts: Sequence[ImagePart],
    bounds: PixelBounds | None,
    identity: EncoderIdentity,
    fetcher: MediaFetcher,
    limits: IngressConfig,
    *,
    client: str = "",
    salt: str | None = None,
) -> RequestImages:
    """Fetches all images side by side, on behalf of `client`, and checks them against the limits.

    `salt` is part of the digests: it keeps the client's embeddings apart from others'.

    Raises:
        ApiError: 400 or 413, naming the image, the value and the limit; 503 where too many are being fetched.
    """
    if len(parts) > limits.max_images_per_request:
        raise ApiError(
            400, f"the request has {len(parts)} images, the limit is {limits.max_images_per_request}", param="messages"
        )
    files = await _fetch_all(parts, fetcher, limits, client)
    jobs: dict[str, ImageJob] = {}
    grids: dict[str, Grid] = {}
    digests = []
    total_tokens = 0
    for part, data in zip(parts, files, strict=True):
        asked = _bounds_of(part, bounds, limits)
        size, grid = _size(part, data, asked, identity, limits)
        tokens = num_tokens(grid, identity.rules.merge_size)
        if tokens > limits.max_visual_tokens_per_image:
            limit = limits.max_visual_tokens_per_image
            raise ApiError(400, f"{part.label} comes to {tokens} visual tokens, the limit is {limit}", param="messages")
        total_tokens += tokens
        digest = identity.digest(data, asked, salt)
        digests.append(digest)
        before = sum(job.num_tokens for job in jobs.values())
        jobs.setdefault(digest, ImageJob(data, asked, digest, identity.fingerprint, size, tokens, before))
        grids[digest] = grid
    if total_tokens > limits.max_visual_tokens_per_request:
        raise ApiError(
            400,
            f"the images come to {total_tokens} visual tokens, the limit is {limits.max_visual_tokens_per_request}",
            param="messages",
        )
    order = list(jobs)
    job_of_part = [order.index(digest) for digest in digests]
    return RequestImages(list(jobs.values()), job_of_part, total_tokens, list(grids.values()))


async def _fetch_all(
    parts: Sequence[ImagePart], fetcher: MediaFetcher, limits: IngressConfig, client: str
) -> list[bytes]:
    async def fetch(part: ImagePart) -> bytes:
        try:
            return await fetcher.fetch(part.url, client=client)
        except MediaTooLargeError as error:
            raise ApiError(413, f"{part.label}: {error}", param="messages", code="image_too_large") from error
        except MediaBusyError as error:
            raise ApiError(503, str(error), code="overloaded", retry_after_s=limits.retry_after_s) from error
        except MediaError as error:
            raise ApiError(400, f"{part.label}: {error}", param="messages", code="invalid_image_url") from error

    tasks = [asyncio.ensure_future(fetch(part)) for part in parts]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _bounds_of(part: ImagePart, bounds: PixelBounds | None, limits: IngressConfig) -> PixelBounds | None:
    """`detail: low` caps the pixels; "high" and "auto" leave what the request or the checkpoint says."""
    if part.detail != "low":
        return bounds
    cap, asked = limits.low_detail_max_pixels, bounds or PixelBounds()
    low = cap if asked.max_pixels is None else min(asked.max_pixels, cap)
    return PixelBounds(None if asked.min_pixels is None else min(asked.min_pixels, low), low)


def _size(
    part: ImagePart, data: bytes, bounds: PixelBounds | None, identity: EncoderIdentity, limits: IngressConfig
) -> tuple[tuple[int, int], Grid]:
    """The image's size in pixels and in patches, from its header alone."""
    try:
        found = header(data, max_pixels_decoded=limits.max_image_pixels, formats=limits.image_formats)
        _check_sides(found, limits)
        return (found.width, found.height), grid_of(found.width, found.height, identity.rules, bounds)
    except ImageError as error:
        raise ApiError(400, f"{part.label}: {error}", param="messages", code="invalid_image") from error


def _check_sides(found: ImageHeader, limits: IngressConfig) -> None:
    shorter, longer = sorted((found.width, found.height))
    if shorter < limits.min_image_side:
        raise ImageError(f"image of {found.width}x{found.height} is under the least side, {limits.min_image_side}")
    if longer > limits.max_image_side:
        raise ImageError(f"image of {found.width}x{found.height} is over the largest side, {limits.max_image_side}")
