"""Replays a trace's images through a routing policy to encoder replicas, in a virtual clock.

The caches are the application's (`deployments.encoder_replica.embedding_cache`). A replica encodes one image at a time
and caches it when done; transfers take time in parallel to that.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from deployments.encoder_replica.embedding_cache import EmbeddingCache
from deployments.routing.affinity import ActiveCall, Call
from encoder.checkpoint.image_rules import ImageRules
from planner.traces import TraceError, image_cost, read_lines

BYTES_PER_TOKEN = 32 * 1024
"""Embedding bytes per token of Qwen3-VL-8B in bfloat16: width 4096, output and three deepstack levels."""


@dataclass(frozen=True)
class Image:
    digest: str
    num_tokens: int

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * BYTES_PER_TOKEN


@dataclass(frozen=True)
class Request:
    at_s: float
    images: tuple[Image, ...]
    """Distinct images, each once, as the ingress sends them."""


def read_requests(path: Path, rules: ImageRules) -> list[Request]:
    """Returns the requests with images in order of arrival. Raises TraceError."""

    def request(line: dict[str, Any]) -> Request:
        images: dict[object, Image] = {}
        for image in line["images"]:
            name = [image["id"], image["w"], image["h"]]
            tokens = image_cost(image, rules).num_tokens
            images[tuple(name)] = Image(hashlib.sha256(json.dumps(name).encode()).hexdigest(), tokens)
        return Request(float(line["t"]), tuple(images.values()))

    found = [request for request in read_lines(path, request) if request.images]
    if not found:
        raise TraceError(f"{path.name} has no image")
    return found


class Router(Protocol):
    """The part of `Affinity` that the replay uses."""

    def candidates(self, call: Call) -> list[str]: ...
    def begin(self, name: str, call: Call) -> ActiveCall | None: ...
    def end(self, active: ActiveCall) -> None: ...


@dataclass(frozen=True)
class Scenario:
    """Conditions that are the same for each routing policy."""

    requests: Sequence[Request]
    replicas: int
    cache_bytes: int
    """Cache bytes of all replicas together."""
    tokens_per_s: float
    """Speed of one replica."""
    ingresses: int

    @property
    def names(self) -> list[str]:
        return [f"replica {number}" for number in range(self.replicas)]


@dataclass
class Found:
    """Results, counted in images."""

    asked: int = 0
    cached: int = 0
    joined: int = 0
    """Images coalesced with an encoding in flight, at the ingress or at the replica."""
    encoded: int = 0
    tokens_encoded: int = 0
    waited_s: float = 0.0
    by_replica: dict[str, int] = field(default_factory=dict)
    """Encoded tokens by replica."""

    @property
    def hit_rate(self) -> float:
        return (self.cached + self.joined) / self.asked


class Replay:
    """One run of a trace through a fleet of replicas behind ingresses, each with its own router."""

    def __init__(self, scene: Scenario, make_router: Callable[[int], Router]) -> None:
        self._scene = scene
        self._routers = [make_router(number) for number in range(scene.ingresses)]
        self._caches = {name: EmbeddingCache[bool](scene.cache_bytes // scene.replicas) for name in scene.names}
        self._free_at = dict.fromkeys(scene.names, 0.0)
        self._at_ingress: list[dict[str, float]] = [{} for _ in self._routers]  # end time by digest in flight
        self._at_replica: dict[str, dict[str, float]] = {name: {} for name in scene.names}
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self.found = Found(by_replica=dict.fromkeys(scene.names, 0))

    def run(self) -> Found:
        for number, request in enumerate(self._scene.requests):
            self._until(request.at_s)
            for image in request.images:
                self._ask(request.at_s, number % len(self._routers), image)
        self._until(float("inf"))
        return self.found

    def _ask(self, now: float, ingress: int, image: Image) -> None:
        self.found.asked += 1
        if image.digest in self._at_ingress[ingress]:
            self.found.joined += 1
            return
        router, call = self._routers[ingress], Call(image.digest, image.num_tokens)
        name = router.candidates(call)[0]
        begun = router.begin(name, call)
        assert begun is not None
        done_at = self._encode(now, name, image) + give_s(image.num_bytes)
        self._at_ingress[ingress][image.digest] = done_at

        def done() -> None:
            router.end(begun)
            del self._at_ingress[ingress][image.digest]

        self._at(done_at, done)

    def _encode(self, now: float, name: str, image: Image) -> float:
        """Encodes an image and returns the time when the embedding is ready."""
        if self._caches[name].get(image.digest):
            self.found.cached += 1
            return now
        under_way = self._at_replica[name]
        if image.digest in under_way:
            self.found.joined += 1
            return under_way[image.digest]
        self.found.encoded += 1
        self.found.tokens_encoded += image.num_tokens
        self.found.by_replica[name] += image.num_tokens
        self.found.waited_s += max(0.0, self._free_at[name] - now)
        done_at = max(now, self._free_at[name]) + image.num_tokens / self._scene.tokens_per_s
        self._free_at[name] = under_way[image.digest] = done_at

        def done() -> None:
            del under_way[image.digest]
            self._caches[name].put(image.digest, True, image.num_bytes)

        self._at(done_at, done)
        return done_at

    def _at(self, at_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._later, (at_s, next(self._number), action))

    def _until(self, now: float) -> None:
        while self._later and self._later[0][0] <= now:
            heapq.heappop(self._later)[2]()


def give_s(num_bytes: int) -> float:
    """Returns the seconds of a transfer to the next replica, measured on an H200 host: 10 and 40 MB in 13 and 41 ms."""
    return 0.004 + num_bytes / 1.07e9


def one_cache(requests: Sequence[Request], num_bytes: int) -> float:
    """Returns the hit rate of one cache into which every image is put immediately."""
    cache: EmbeddingCache[bool] = EmbeddingCache(num_bytes)
    hits = []
    for image in images_of(requests):
        hits.append(cache.get(image.digest) is not None)
        if not hits[-1]:
            cache.put(image.digest, True, image.num_bytes)
    return fmean(hits)


def images_of(requests: Sequence[Request]) -> Iterator[Image]:
    return itertools.chain.from_iterable(request.images for request in requests)


def distinct_bytes(requests: Sequence[Request]) -> int:
    return sum(image.num_bytes for image in set(images_of(requests)))


def paced(requests: Sequence[Request], factor: float) -> list[Request]:
    return [Request(request.at_s / factor, request.images) for request in requests]


def load_of(requests: Sequence[Request], replicas: int, speed: float) -> float:
    """Returns the utilization of the replicas if no image was cached."""
    return sum(image.num_tokens for image in images_of(requests)) / speed / replicas / requests[-1].at_s
