"""A trace's requests as they are sent: when, with which images and how long a question and an answer.

A line is a JSON object: `t` in seconds, `images` with `id`, `w` and `h` in pixels (the same id is the same image),
`prompt_tokens` and `output_tokens`. It must not know of servers, nor what the images show.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from encoder.traces import TraceError

GENERATED = "generated"
"""The name of the trace that is made where none is given."""
_SIDES = (64, 128, 192, 256, 320, 384, 512)
_REPEATS = 0.3
_BURST = 0.5


@dataclass(frozen=True)
class TraceImage:
    id: int
    width: int
    height: int
    """Both in pixels."""


@dataclass(frozen=True)
class TraceRequest:
    at_s: float
    """From the trace's start."""
    images: tuple[TraceImage, ...]
    prompt_tokens: int
    """Of the question's text; images come on top."""
    output_tokens: int


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    digest: str
    """64 hex characters over the whole file, from which images and words follow."""
    requests: tuple[TraceRequest, ...]

    @property
    def images(self) -> list[TraceImage]:
        """Each one once, by id."""
        found = {image.id: image for request in self.requests for image in request.images}
        return [found[number] for number in sorted(found)]

    def cut(self, requests: int | None) -> Trace:
        """The first so many requests; all for None."""
        return dataclasses.replace(self, requests=self.requests[:requests])

    def capped(self, prompt_tokens: int | None, output_tokens: int | None) -> Trace:
        """With no text longer than so many tokens."""
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
        """Indices of `requests` in so many consecutive parts of about the same length."""
        total = len(self.requests)
        edges = [total * edge // number for edge in range(number + 1)]
        for begin, end in itertools.pairwise(edges):
            yield range(begin, end)


def read_trace(path: Path) -> Trace:
    """Raises TraceError, naming file and line, where it is not such a trace, or one image comes in two sizes."""
    content = path.read_bytes()
    requests: list[TraceRequest] = []
    sizes: dict[int, TraceImage] = {}
    for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
        try:
            request = _request(json.loads(line))
            for image in request.images:
                if sizes.setdefault(image.id, image) != image:
                    known = sizes[image.id]
                    raise ValueError(f"image {image.id} is {image.width}×{image.height}, and was "
                                     f"{known.width}×{known.height}")  # fmt: skip
            if requests and request.at_s < requests[-1].at_s:
                raise ValueError(f"t is {request.at_s}, and was {requests[-1].at_s} in the line before")
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{path.name}, line {number}: {error!r}") from error
        requests.append(request)
    if not requests:
        raise TraceError(f"{path.name} holds no request")
    return Trace(path.stem, hashlib.sha256(content).hexdigest(), tuple(requests))


def _request(line: dict[str, object]) -> TraceRequest:
    images = line["images"]
    if not isinstance(images, list):
        raise TypeError("images must be a list")
    request = TraceRequest(
        float(str(line["t"])),
        tuple(TraceImage(int(image["id"]), int(image["w"]), int(image["h"])) for image in images),
        int(str(line["prompt_tokens"])),
        int(str(line["output_tokens"])),
    )
    least = min((min(image.width, image.height) for image in request.images), default=1)
    for name, value in (
        ("w and h", least),
        ("prompt_tokens", request.prompt_tokens),
        ("output_tokens", request.output_tokens),
    ):
        if value < 1:
            raise ValueError(f"{name}: {value}; must be at least 1")
    return request


def generated(requests: int = 60, rate: float = 2.0, seed: int = 0) -> Trace:
    """A small trace for a first run: pictures of 64 to 512 pixels a side, one in four requests without one.

    `rate`: requests a second in the mean; half of the gaps are next to none, so that they come in bursts.
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
    text = "".join(f"{line}\n" for line in lines(found))
    return Trace(GENERATED, hashlib.sha256(text.encode()).hexdigest(), tuple(found))


def lines(requests: Sequence[TraceRequest]) -> Iterator[str]:
    """The requests as a trace file holds them."""
    for one in requests:
        images = [{"id": image.id, "w": image.width, "h": image.height} for image in one.images]
        about = {"t": one.at_s, "images": images}
        yield json.dumps({**about, "prompt_tokens": one.prompt_tokens, "output_tokens": one.output_tokens})
