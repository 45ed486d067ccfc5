"""Turns a chat into a request for the engine: fetches images and sounds, reads their headers and computes digests.

Nothing is decoded here.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from configs.schema import IngressConfig
from deployments.common.api_error import ApiError
from deployments.common.messages import (
    MODEL_SAMPLING,
    HttpRequest,
    ImageJob,
    ItemReference,
    VideoSampling,
    new_key,
)
from deployments.ingress.fetch.fetcher import MediaBusyError, MediaFetcher, ignore_bytes
from deployments.ingress.http.chat_request import ChatRequest
from deployments.ingress.http.image_parts import PLURALS, ImagePart, MediaError, media_error
from deployments.ingress.http.routes import COUNTING
from encoder.audio.header import DECODING_RULES_VERSION as AUDIO_RULES_VERSION
from encoder.audio.header import AudioError, read_audio_header
from encoder.images.generic_identity import GenericIdentity, Identity
from encoder.images.identity import EncoderIdentity
from encoder.images.size import ImageError, ImageHeader, PixelBounds, read_header
from encoder.item_header import ChunkHeader, ItemHeader

VIDEO_RULES_VERSION = "video 2"
"""Part of every digest of a video. Increment it with any change that may alter a frame."""
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
    headers: Sequence[ItemHeader | ChunkHeader | None] = ()
    """Header of each job's image; None if only the encoder can compute it, which sends it with the embedding. The first
    job of a video that is encoded in chunks has the video's."""
    conversation: str | None = None
    """Hash that all turns of a conversation share, 64 hex characters."""
    deferred: frozenset[int] = frozenset()
    """Indices of the jobs whose images are only in earlier turns, of all jobs for a route that counts tokens: encoded
    only if the engine asks for them."""
    files: Sequence[ImageJob] = ()
    """The jobs, if the language model is sent the image files and encodes them itself; else empty."""

    @property
    def new_jobs(self) -> list[ImageJob]:
        return [job for number, job in enumerate(self.jobs) if number not in self.deferred]

    @property
    def visual_tokens(self) -> int:
        """Visual tokens of the images that are not deferred: a repeated image counts each time."""
        items = (reference.item for reference in self.references)
        return sum(map(self._num_tokens, (item for item in items if item not in self.deferred)))

    @property
    def prompt_tokens(self) -> int:
        """Estimated tokens of the prompt, visual and text."""
        visual_tokens = sum(self._num_tokens(reference.item) for reference in self.references)
        return visual_tokens + len(self.http.body) // BYTES_PER_TOKEN

    def _num_tokens(self, item: int) -> int:
        """Returns the visual tokens of an item: of a video all, where `item` is the job of its first chunk."""
        header = self.headers[item]
        return header.num_embeds if header is not None else self.jobs[item].num_tokens

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
    headers: list[ItemHeader | None] = field(default_factory=list)
    """Header of each job's image; None if only the encoder can compute it."""
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
    """Returns the parts with their files. Missing files are fetched concurrently, in slots of `client`.

    `count` is called with the size of each received chunk.

    Raises:
        ApiError: 400 or 413, which name the image, the value and the limit; 503 if too many fetches are in flight.
    """

    async def fetched(part: ImagePart) -> ImagePart:
        if part.file is not None:
            return part
        try:
            max_bytes = limits.max_file_bytes(part.modality)
            file = await fetcher.fetch(part.url, max_bytes=max_bytes, client=client, count=count)
        except MediaBusyError as error:
            raise ApiError(503, str(error), code="overloaded", retry_after_s=limits.retry_after_s) from error
        except MediaError as error:
            raise media_error(part, error) from error
        return dataclasses.replace(part, file=file)

    tasks = [asyncio.ensure_future(fetched(part)) for part in parts]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        while tasks:  # which a failed one would keep alive
            tasks.pop().cancel()


def build_engine_request(
    chat: ChatRequest,
    http: HttpRequest,
    identity: Identity,
    limits: IngressConfig,
    salt: str | None,
    measure: Measure,
) -> EngineRequest:
    """Returns the request for the engine of `chat`, whose images have been fetched. `http` lacks only the body.
    `measure`: `measure_image`, which may remember its results by digest.

    Raises ApiError as `build_encoder_jobs` and `ChatRequest.to_json` do.
    """
    images = build_encoder_jobs(chat.images, chat.pixel_bounds, identity, limits, salt, measure, chat.sampling)
    references = [
        ItemReference(new_key(), job, part.label, part.modality)
        for part, job in zip(chat.images, images.job_of_part, strict=True)
    ]
    body, conversation = chat.to_json(references, [images.jobs[reference.item].digest for reference in references])
    http = dataclasses.replace(http, body=body)
    if identity.in_engine:  # vLLM is sent every image and may process every one: all of them count
        files = images.jobs
        return EngineRequest(http, references, images.jobs, images.headers, conversation, files=files)
    deferred = frozenset(range(len(images.jobs))) if http.path in COUNTING else images.deferred
    return EngineRequest(http, references, images.jobs, images.headers, conversation, deferred)


def build_encoder_jobs(
    parts: Sequence[ImagePart],
    bounds: PixelBounds | None,
    identity: Identity,
    limits: IngressConfig,
    salt: str | None = None,
    measure: Measure | None = None,
    sampling: VideoSampling = MODEL_SAMPLING,
) -> RequestImages:
    """Checks images and sounds by their headers, and estimates videos; only new ones count for the request's
    limit. `salt` is part of the digests, which separates embeddings of clients.

    Raises ApiError 400 that names the part, the value and the limit.
    """
    if bounds is not None and not identity.has_pixel_bounds:
        refused = "mm_processor_kwargs: images of this model have no pixel bounds"
        raise ApiError(400, refused, param="mm_processor_kwargs")
    jobs: dict[str, ImageJob] = {}
    headers: dict[str, ItemHeader | None] = {}
    digests = []
    total_tokens = 0
    new: dict[str, int] = {}  # visual tokens by digest
    for part in parts:
        assert part.file is not None, "it was fetched"
        if part.modality not in identity.modalities:
            taken = " and ".join(PLURALS[each] for each in identity.modalities)
            refused = f"{part.label}: the model takes no {PLURALS[part.modality]} here, only text and {taken}"
            raise ApiError(400, refused, param=part.param, code="unsupported_media")
        before = sum(new.values())
        try:
            if part.modality == "audio":
                job, header = _audio_job(part.file, identity, limits, salt, before), None
            elif part.modality == "video":
                if bounds is not None:
                    raise ImageError("mm_processor_kwargs cannot bound the pixels of videos")
                job, header = _video_job(part.file, sampling, identity, salt, before), None
            else:
                effective = _effective_bounds(part, bounds, limits) if identity.has_pixel_bounds else None
                job, header = _image_job(part.file, effective, identity, limits, salt, before, measure or measure_image)
        except ImageError as error:
            raise ApiError(400, f"{part.label}: {error}", param=part.param, code=f"invalid_{part.modality}") from error
        tokens = job.num_tokens
        if tokens > limits.max_visual_tokens_per_image:
            limit = limits.max_visual_tokens_per_image
            raise ApiError(400, f"{part.label} comes to {tokens} visual tokens, the limit is {limit}", param=part.param)
        digests.append(job.digest)
        if part.is_new:
            total_tokens += tokens
            new[job.digest] = tokens
        jobs.setdefault(job.digest, job)
        headers[job.digest] = header
    if total_tokens > limits.max_visual_tokens_per_request:
        raise ApiError(
            400,
            f"the images come to {total_tokens} visual tokens, the limit is {limits.max_visual_tokens_per_request}",
            param=parts[0].param,
        )
    order = {digest: number for number, digest in enumerate(jobs)}
    job_of_part = [order[digest] for digest in digests]
    deferred = frozenset(number for digest, number in order.items() if digest not in new)
    return RequestImages(list(jobs.values()), job_of_part, list(headers.values()), deferred)


def _image_job(
    data: bytes,
    bounds: PixelBounds | None,
    identity: Identity,
    limits: IngressConfig,
    salt: str | None,
    tokens_before: int,
    measure: Measure,
) -> tuple[ImageJob, ItemHeader | None]:
    digest = identity.digest(data, bounds, salt)
    size = measure(digest, data, limits)
    tokens, header = identity.plan_image(digest, *size, bounds)
    facts = identity.fingerprint, size, tokens, tokens_before
    return ImageJob(data, bounds, digest, *facts, tower=identity.tower), header


def _audio_job(
    data: bytes, identity: Identity, limits: IngressConfig, salt: str | None, tokens_before: int
) -> ImageJob:
    """Returns the job of a sound, by its header, which may lie: decoding has the same limits."""
    assert isinstance(identity, GenericIdentity), "it takes sounds"
    header, most = read_audio_header(data), limits.audio
    if header.seconds > most.max_seconds:
        raise AudioError(f"the sound has {header.seconds:.1f} s, the limit is {most.max_seconds:g}")
    if header.num_samples > most.max_samples:
        raise AudioError(f"the sound has {header.num_samples} samples, the limit is {most.max_samples}")
    digest = identity.digest(data, None, salt, rules_version=AUDIO_RULES_VERSION)
    facts = identity.fingerprint, (0, 0), identity.estimate_audio_tokens(header.seconds), tokens_before
    return ImageJob(data, None, digest, *facts, tower=identity.tower, modality="audio")


def _video_job(
    data: bytes, sampling: VideoSampling, identity: Identity, salt: str | None, tokens_before: int
) -> ImageJob:
    """Returns the job of a video. Its container is parsed in the encoder's worker processes only, since demuxers are no
    safer than decoders: for vitray's own towers, the tokens are known once it is planned, else they are estimated."""
    rules = f"{VIDEO_RULES_VERSION} {sampling.fps} {sampling.num_frames}"
    digest = identity.digest(data, None, salt, rules_version=rules)
    tokens = identity.video_tokens if isinstance(identity, GenericIdentity) else 0
    facts = identity.fingerprint, (0, 0), tokens, tokens_before, identity.tower, "video", sampling
    return ImageJob(data, None, digest, *facts, in_chunks=isinstance(identity, EncoderIdentity))


def _effective_bounds(part: ImagePart, bounds: PixelBounds | None, limits: IngressConfig) -> PixelBounds | None:
    """Returns the bounds of an image: `detail: low` caps them, "high" and "auto" keep the request's."""
    if part.detail != "low":
        return bounds
    cap, requested = limits.low_detail_max_pixels, bounds or PixelBounds()
    low = cap if requested.max_pixels is None else min(requested.max_pixels, cap)
    return PixelBounds(None if requested.min_pixels is None else min(requested.min_pixels, low), low)


def measure_image(digest: str, data: bytes, limits: IngressConfig) -> tuple[int, int]:
    """Returns width and height of an image by its file's header alone. `digest` determines the result under the same
    limits. Raises ImageError."""
    found = read_header(data, max_pixels_decoded=limits.max_image_pixels, formats=limits.image_formats)
    _check_sides(found, limits)
    return found.width, found.height


Measure = Callable[[str, bytes, IngressConfig], tuple[int, int]]
"""Type of `measure_image`."""


def _check_sides(found: ImageHeader, limits: IngressConfig) -> None:
    shorter, longer = sorted((found.width, found.height))
    if shorter < limits.min_image_side:
        raise ImageError(f"image of {found.width}x{found.height} is under the least side, {limits.min_image_side}")
    if longer > limits.max_image_side:
        raise ImageError(f"image of {found.width}x{found.height} is over the largest side, {limits.max_image_side}")
