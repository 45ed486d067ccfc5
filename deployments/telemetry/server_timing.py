"""Durations of a request's stages as an HTTP `Server-Timing` header (w3.org/TR/server-timing)."""

from __future__ import annotations

from collections.abc import Sequence

from deployments.common.messages import ImageRefused, SharedEmbedding

MAX_IMAGES_LISTED = 32
"""Most images of a request in the header, since proxies and clients limit a header's size."""


def format_metric(name: str, duration_ms: float) -> str:
    return f"{name};dur={duration_ms:.1f}"


def format_server_timing(
    images: Sequence[SharedEmbedding | ImageRefused | None],
    transfer_s: float | None,
    first_token_s: float | None,
    path: str | None = None,
) -> str:
    """Returns the header's value: `preprocess, queue, encode, transfer, first-token` in milliseconds, and details.

    A request's images are processed in parallel, so each stage states its slowest image. `transfer` is the time from
    the last embedding's readiness to its arrival at the language model, `first-token` the time from that arrival to
    vLLM's first token. `cache` states how many of the images were in the embedding cache, `path` how the embeddings
    reached the engine, `image-N`,
    `audio-N` or `video-N` how and where the N-th distinct item, or chunk of a video, was encoded (`_describe_image`).
    `images`: None for each that the engine did not need; it has a number, and no entry.
    """
    metrics = []
    encoded = [image for image in images if isinstance(image, SharedEmbedding)]
    if encoded or path is not None:
        fresh = [image.timings for image in encoded if not image.timings.cached]
        metrics += [
            format_metric("preprocess", max((timing.preprocess_ms for timing in fresh), default=0.0)),
            format_metric("queue", max((timing.queue_ms for timing in fresh), default=0.0)),
            format_metric("encode", max((timing.encode_ms for timing in fresh), default=0.0)),
            format_metric("transfer", (transfer_s or 0.0) * 1e3),
            f'cache;desc="{sum(image.timings.cached for image in encoded)}/{len(encoded)}"',
        ]
        metrics += [f'path;desc="{path}"'] if path is not None else []
        numbered = [(number, image) for number, image in enumerate(images, 1) if isinstance(image, SharedEmbedding)]
        metrics += [
            f'{_modality(image)}-{number};desc="{_describe_image(image)}"'
            for number, image in numbered[:MAX_IMAGES_LISTED]
        ]
    if first_token_s is not None:
        metrics.append(format_metric("first-token", first_token_s * 1e3))
    return ", ".join(metrics)


def _modality(image: SharedEmbedding) -> str:
    """Returns "image", "audio" or "video"; models call images and parts of videos "vision_chunk"."""
    modality = "image" if image.header is None else image.header.modality
    return modality if modality in ("audio", "video") else "image"


def _describe_image(image: SharedEmbedding) -> str:
    """Returns how an image was encoded, such as `tokens=140 replica=x8f3 graph=512 batch=420/3 cached`.

    The fields are the image's tokens, the frames of a video that it has (`frames=1-8`), the encoder replica, the token
    budget of the replayed graph (or `eager=REASON`), the tokens and images of its batch, and whether the embedding was
    cached.
    """
    timings, fields = image.timings, [f"tokens={image.num_tokens}"]
    if timings.frames is not None:
        fields.append("frames={}-{}".format(*timings.frames))
    if timings.replica:
        fields.append(f"replica={timings.replica}")
    if (ran := timings.ran) is not None:
        fields.append(f"eager={ran.reason}" if ran.budget is None else f"graph={ran.budget}")
        fields.append(f"batch={ran.num_tokens}/{ran.num_images}")
    return " ".join([*fields, *(["cached"] if timings.cached else [])])
