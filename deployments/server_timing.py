"""Where a request's time went, as an HTTP `Server-Timing` header (w3.org/TR/server-timing).

It must not know who measured; it only adds up.
"""

from __future__ import annotations

from collections.abc import Sequence

from deployments.wire import EncodedImage, ImageRefused, SharedEmbedding

MAX_IMAGES_TOLD = 32
"""Of a request's images: a header has bounds wherever it passes."""


def metric(name: str, duration_ms: float) -> str:
    return f"{name};dur={duration_ms:.1f}"


def server_timing(
    images: Sequence[EncodedImage | SharedEmbedding | ImageRefused],
    arrived_at_s: float,
    arrived: float,
    first_token_at_s: float | None,
    way: str | None = None,
) -> str:
    """`preprocess, queue, encode, transfer, first-token` in milliseconds.

    The images of a request are worked on side by side, so each stage counts its slowest image. `transfer` runs from
    the moment the last embedding was ready (seconds since the epoch, so clocks of different hosts must agree) to its
    arrival at the language model; `first-token` from there to vLLM's first token. `cache` says how many of the images
    came from the embedding cache, `way` how the embeddings came to the engine. `image-N` is the request's N-th image,
    equal ones counted once: where it was encoded and how (`_image`).
    """
    metrics = []
    encoded = [image for image in images if not isinstance(image, ImageRefused)]
    if encoded:
        fresh = [image.timings for image in encoded if not image.timings.cached]
        metrics += [
            metric("preprocess", max((timing.preprocess_ms for timing in fresh), default=0.0)),
            metric("queue", max((timing.queue_ms for timing in fresh), default=0.0)),
            metric("encode", max((timing.encode_ms for timing in fresh), default=0.0)),
            metric("transfer", max(0.0, arrived_at_s - max(image.timings.ready_at_s for image in encoded)) * 1e3),
            f'cache;desc="{sum(image.timings.cached for image in encoded)}/{len(encoded)}"',
        ]
        metrics += [f'way;desc="{way}"'] if way is not None else []
        metrics += [
            f'image-{number};desc="{_image(image)}"'
            for number, image in enumerate(images[:MAX_IMAGES_TOLD], 1)
            if not isinstance(image, ImageRefused)
        ]
    if first_token_at_s is not None:
        metrics.append(metric("first-token", (first_token_at_s - arrived) * 1e3))
    return ", ".join(metrics)


def _image(image: EncodedImage | SharedEmbedding) -> str:
    """`tokens=140 replica=x8f3 graph=512 batch=420/3 cached`: how it was encoded, and whether that was before.

    The image's tokens, the encoder replica, the budget of the graph that was replayed (or `eager=REASON`), and the
    tokens and images of its batch; `local` where the replica is the language model's.
    """
    timings, told = image.timings, [f"tokens={image.num_tokens}"]
    if timings.replica:
        told.append(f"replica={timings.replica}")
    if (ran := timings.ran) is not None:
        told.append(f"eager={ran.reason}" if ran.budget is None else f"graph={ran.budget}")
        told.append(f"batch={ran.num_tokens}/{ran.num_images}")
    told += ["local"] if timings.local else []
    return " ".join([*told, *(["cached"] if timings.cached else [])])
