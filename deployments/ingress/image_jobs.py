"""Turns a chat into a request for the engine: fetches images, reads their headers and computes digests.

Pixels are not decoded here.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from configs.schema import IngressConfig
from deployments.common.api_error import ApiError
from deployments.common.messages import HttpRequest, ImageJob, ItemReference, new_key
from deployments.ingress.fetch.fetcher import MediaBusyError, MediaFetcher, ignore_bytes
from deployments.ingress.http.chat_request import ChatRequest
from deployments.ingress.http.data_url import raise_as_api_error
from deployments.ingress.http.image_parts import ImagePart
from encoder.images.identity import EncoderIdentity
from encoder.images.size import Grid, ImageError, ImageHeader, PixelBounds, image_grid, num_tokens, read_header
from encoder.item_header import ItemHeader

BYTES_PER_TOKEN = 4
"""Estimated bytes of a request's body per text token."""


@dataclass(frozen=True)
class EngineRequest:
    """A request for a language model, with references instead of its images."""

    http: HttpRequest
    references: Sequence[ItemReference] = ()
    """References in the body; several may refer to one job."""
    jobs: Sequence[ImageJob] = ()
    """The distinct images."""
    headers: Sequence[ItemHeader] = ()
    """Header of each job's image."""
    conversation: str | None = None
    """Hash that all turns of a conversation share, 64 hex characters."""
    deferred: frozenset[int] = frozenset()
    """Indices of the jobs whose images are only in earlier turns: encoded only if the engine asks for them."""

    @property
    def new_jobs(self) -> list[ImageJob]:
        return [job for number, job in enumerate(self.jobs) if number not in self.deferred]

    @property
    def visual_tokens(self) -> int:
        """Visual tokens of the images that are not deferred: a repeated image counts each time."""
        items = (reference.item for reference in self.references)
        return sum(self.jobs[item].num_tokens for item in items if item not in self.deferred)

    @property
    def prompt_tokens(self) -> int:
        """Estimated tokens of the prompt, visual and text."""
        visual_tokens = sum(self.jobs[reference.item].num_tokens for reference in self.references)
        return visual_tokens + len(self.http.body) // BYTES_PER_TOKEN

    @property
    def tower(self) -> str:
        """Tower of the encoders, empty without images. Only language models that expect this tower are called."""
        return self.jobs[0].tower if self.jobs else ""


@dataclass(frozen=True)
class RequestImages:
    """The distinct images of one request."""

    jobs: list[ImageJob]
    job_of_part: list[int]
    """Index into `jobs` of each image part of the request, in order."""
    grids: list[Grid] = field(default_factory=list)
    """Patch grid of each job's embedding."""
    deferred: frozenset[int] = frozenset()
    """Indices of the jobs of which no part is new."""


async def fetch_images(
    parts: Sequence[ImagePart],
    fetcher: MediaFetcher,
    limits: IngressConfig,
    *,
    client: str = "",
    count: Callable[[int], None] = ignore_bytes,
) -> list[ImagePart]:
    """Returns the images with their files. Missing files are fetched concurrently, in slots of `client`.

    `count` is called with the size of each received chunk.

    Raises:
        ApiError: 400 or 413, which name the image, the value and the limit; 503 if too many fetches are in flight.
    """

    async def fetched(part: ImagePart) -> ImagePart:
        if part.file is not None:
            return part
        with raise_as_api_error(part.label, part.param):
            try:
                file = await fetcher.fetch(part.url, client=client, count=count)
            except MediaBusyError as error:
                raise ApiError(503, str(error), code="overloaded", retry_after_s=limits.retry_after_s) from error
        return dataclasses.replace(part, file=file)

    tasks = [asyncio.ensure_future(fetched(part)) for part in parts]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def build_engine_request(
    chat: ChatRequest,
    http: HttpRequest,
    identity: EncoderIdentity,
    limits: IngressConfig,
    salt: str | None,
    measure: Measure,
) -> EngineRequest:
    """Returns the request for the engine of `chat`, whose images have been fetched. `http` lacks only the body.
    `measure`: `size_and_grid`, which may remember its results by digest.

    Raises ApiError as `build_encoder_jobs` and `ChatRequest.to_json` do.
    """
    images = build_encoder_jobs(chat.images, chat.pixel_bounds, identity, limits, salt, measure)
    references = [
        ItemReference(new_key(), job, part.label) for part, job in zip(chat.images, images.job_of_part, strict=True)
    ]
    body, conversation = chat.to_json(references, [images.jobs[reference.item].digest for reference in references])
    headers = [identity.header(job.digest, grid) for job, grid in zip(images.jobs, images.grids, strict=True)]
    http = dataclasses.replace(http, body=body)
    return EngineRequest(http, references, images.jobs, headers, conversation, images.deferred)


def build_encoder_jobs(
    parts: Sequence[ImagePart],
    bounds: PixelBounds | None,
    identity: EncoderIdentity,
    limits: IngressConfig,
    salt: str | None = None,
    measure: Measure | None = None,
) -> RequestImages:
    """Checks images by their headers; only new ones count for the request's limit. `salt` becomes part of the digests,
    which separates embeddings of clients.

    Raises ApiError 400 that names the image, the value and the limit.
    """
    jobs: dict[str, ImageJob] = {}
    grids: dict[str, Grid] = {}
    digests = []
    total_tokens = 0
    new: dict[str, int] = {}  # visual tokens by digest
    for part in parts:
        assert part.file is not None, "it was fetched"
        data = part.file
        effective = _effective_bounds(part, bounds, limits)
        digest = identity.digest(data, effective, salt)
        try:
            size, grid = (measure or size_and_grid)(digest, data, effective, identity, limits)
        except ImageError as error:
            raise ApiError(400, f"{part.label}: {error}", param=part.param, code="invalid_image") from error
        tokens = num_tokens(grid, identity.rules.merge_size)
        if tokens > limits.max_visual_tokens_per_image:
            limit = limits.max_visual_tokens_per_image
            raise ApiError(400, f"{part.label} comes to {tokens} visual tokens, the limit is {limit}", param=part.param)
        digests.append(digest)
        before = sum(new.values())
        if part.is_new:
            total_tokens += tokens
            new[digest] = tokens
        job = ImageJob(data, effective, digest, identity.fingerprint, size, tokens, before, tower=identity.tower)
        jobs.setdefault(digest, job)
        grids[digest] = grid
    if total_tokens > limits.max_visual_tokens_per_request:
        raise ApiError(
            400,
            f"the images come to {total_tokens} visual tokens, the limit is {limits.max_visual_tokens_per_request}",
            param=parts[0].param,
        )
    order = {digest: number for number, digest in enumerate(jobs)}
    job_of_part = [order[digest] for digest in digests]
    deferred = frozenset(number for digest, number in order.items() if digest not in new)
    return RequestImages(list(jobs.values()), job_of_part, list(grids.values()), deferred)


def _effective_bounds(part: ImagePart, bounds: PixelBounds | None, limits: IngressConfig) -> PixelBounds | None:
    """Returns the bounds of an image: `detail: low` caps them, "high" and "auto" keep the request's."""
    if part.detail != "low":
        return bounds
    cap, requested = limits.low_detail_max_pixels, bounds or PixelBounds()
    low = cap if requested.max_pixels is None else min(requested.max_pixels, cap)
    return PixelBounds(None if requested.min_pixels is None else min(requested.min_pixels, low), low)


def size_and_grid(
    digest: str, data: bytes, bounds: PixelBounds | None, identity: EncoderIdentity, limits: IngressConfig
) -> tuple[tuple[int, int], Grid]:
    """Returns the image's width and height in pixels and its patch grid, from its header alone. `digest` determines
    the result under the same limits. Raises ImageError."""
    found = read_header(data, max_pixels_decoded=limits.max_image_pixels, formats=limits.image_formats)
    _check_sides(found, limits)
    return (found.width, found.height), image_grid(found.width, found.height, identity.rules, bounds)


Measure = Callable[[str, bytes, PixelBounds | None, EncoderIdentity, IngressConfig], tuple[tuple[int, int], Grid]]
"""Type of `size_and_grid`."""


def _check_sides(found: ImageHeader, limits: IngressConfig) -> None:
    shorter, longer = sorted((found.width, found.height))
    if shorter < limits.min_image_side:
        raise ImageError(f"image of {found.width}x{found.height} is under the least side, {limits.min_image_side}")
    if longer > limits.max_image_side:
        raise ImageError(f"image of {found.width}x{found.height} is over the largest side, {limits.max_image_side}")
