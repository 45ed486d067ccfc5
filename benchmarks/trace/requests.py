"""Requests of a trace: their times, images, and lengths of question and answer.

A line is a JSON object: `t` in seconds, `images` with `id`, `w` and `h` in pixels (equal ids are the same image),
`prompt_tokens` and `output_tokens`. A request with videos is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.traces import MAX_TOKENS, TraceError, read_lines

GENERATED = "generated"
"""Name of the trace that is generated if none is given."""
MAX_SIDE = 65_500
"""Maximum width and height in pixels of a JPEG that libjpeg writes."""
_SIDES = (64, 128, 192, 256, 320, 384, 512)
_REPEATS = 0.3
_BURST = 0.5


@dataclass(frozen=True)
class TraceImage:
    id: int
    width: int
    height: int
    """Width and height are in pixels."""


@dataclass(frozen=True)
class TraceRequest:
    at_s: float
    """Seconds from the trace's start."""
    images: tuple[TraceImage, ...]
    prompt_tokens: int
    """Tokens of the question's text, without images."""
    output_tokens: int


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    digest: str
    """64 hexadecimal characters, the hash of the whole file, which determines pictures and words."""
    requests: tuple[TraceRequest, ...]

    @property
    def images(self) -> list[TraceImage]:
        """Distinct images, ordered by id."""
        found = {image.id: image for request in self.requests for image in request.images}
        return [found[number] for number in sorted(found)]

    def cut(self, requests: int | None) -> Trace:
        """Returns the trace with its first `requests` requests; all for None."""
        return dataclasses.replace(self, requests=self.requests[:requests])

    def capped(self, prompt_tokens: int | None, output_tokens: int | None) -> Trace:
        """Returns the trace with question and answer cut to these numbers of tokens."""
        capped = tuple(
            dataclasses.replace(
                one,
                prompt_tokens=min(one.prompt_tokens, prompt_tokens or one.prompt_tokens),
                output_tokens=min(one.output_tokens, output_tokens or one.output_tokens),
            )
            for one in self.requests
        )
        return dataclasses.replace(self, requests=capped)

    def pieces(self, number: int) -> Iterator[Sequence[int]]:
        """Yields indices of `requests` in `number` consecutive parts of about equal length."""
        total = len(self.requests)
        edges = [total * edge // number for edge in range(number + 1)]
        for begin, end in itertools.pairwise(edges):
            yield range(begin, end)


def read_trace(path: Path) -> Trace:
    """Reads a trace. Raises TraceError with file and line if it is invalid, or if an image has two sizes."""
    requests: list[TraceRequest] = []
    sizes: dict[int, TraceImage] = {}

    def add(line: dict[str, object]) -> None:
        request = _request(line)
        for image in request.images:
            if sizes.setdefault(image.id, image) != image:
                known = sizes[image.id]
                raise ValueError(f"image {image.id} is {image.width}×{image.height}, and was "
                                 f"{known.width}×{known.height}")  # fmt: skip
        if requests and request.at_s < requests[-1].at_s:
            raise ValueError(f"t is {request.at_s}, and was {requests[-1].at_s} in the line before")
        requests.append(request)

    read_lines(path, add)
    if not requests:
        raise TraceError(f"{path.name} has no request")
    return Trace(path.stem, hashlib.sha256(path.read_bytes()).hexdigest(), tuple(requests))


def _request(line: dict[str, object]) -> TraceRequest:
    images = line["images"]
    if not isinstance(images, list):
        raise TypeError("images must be a list")
    if line.get("videos"):
        raise ValueError("a request has videos, which this benchmark does not send")
    request = TraceRequest(
        float(str(line["t"])),
        tuple(TraceImage(int(image["id"]), int(image["w"]), int(image["h"])) for image in images),
        int(str(line["prompt_tokens"])),
        int(str(line["output_tokens"])),
    )
    if not math.isfinite(request.at_s) or min((image.id for image in request.images), default=0) < 0:
        raise ValueError("t must be finite, and the ids of images at least 0")
    sides = [side for image in request.images for side in (image.width, image.height)]
    for name, values, limit in (
        ("w and h", sides, MAX_SIDE),
        ("prompt_tokens", [request.prompt_tokens], MAX_TOKENS),
        ("output_tokens", [request.output_tokens], MAX_TOKENS),
    ):
        for value in values:
            if not 1 <= value <= limit:
                raise ValueError(f"{name}: {value}; must be from 1 to {limit}")
    return request


def generate_trace(requests: int = 60, rate: float = 2.0, seed: int = 0) -> Trace:
    """Returns a small trace for a first run: pictures of 64 to 512 pixels a side, one request in four without a
    picture.

    `rate`: mean requests per second; half of the gaps are almost zero, so that requests arrive in bursts.
    """
    chance = random.Random(seed)
    at_s, images = 0.0, list[TraceImage]()
    found: list[TraceRequest] = []
    for _ in range(requests):
        wanted = chance.choice((0, 1, 1, 2))
        chosen: list[TraceImage] = []
        for _ in range(wanted):
            if images and chance.random() < _REPEATS:
                chosen.append(chance.choice(images))
            else:
                chosen.append(TraceImage(len(images), chance.choice(_SIDES), chance.choice(_SIDES)))
                images.append(chosen[-1])
        found.append(TraceRequest(round(at_s, 4), tuple(chosen), chance.randint(10, 80), chance.randint(8, 48)))
        at_s += 0.0 if chance.random() < _BURST else chance.expovariate(rate * (1 - _BURST))
    return _of(GENERATED, found)


def alike_trace(images: int, side: int, prompt_tokens: int, output_tokens: int, requests: int, seed: int = 0) -> Trace:
    """Returns requests that arrive independently of each other, one a second on average, with new square pictures of
    `side` pixels and equal lengths of question and answer."""
    chance = random.Random(seed)
    at_s = 0.0
    found: list[TraceRequest] = []
    for number in range(requests):
        pictures = tuple(TraceImage(number * images + place, side, side) for place in range(images))
        found.append(TraceRequest(round(at_s, 4), pictures, prompt_tokens, output_tokens))
        at_s += chance.expovariate(1)
    return _of(f"{images}x{side}+{prompt_tokens}+{output_tokens}", found)


def _of(name: str, requests: Sequence[TraceRequest]) -> Trace:
    text = "".join(f"{line}\n" for line in lines(requests))
    return Trace(name, hashlib.sha256(text.encode()).hexdigest(), tuple(requests))


def lines(requests: Sequence[TraceRequest]) -> Iterator[str]:
    """Yields the requests as lines of a trace file."""
    for one in requests:
        images = [{"id": image.id, "w": image.width, "h": image.height} for image in one.images]
        about = {"t": one.at_s, "images": images}
        yield json.dumps({**about, "prompt_tokens": one.prompt_tokens, "output_tokens": one.output_tokens})
