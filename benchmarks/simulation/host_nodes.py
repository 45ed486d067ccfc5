"""Encoders, language models and network links of `host_fleet.py`, in virtual time.

Caches, queues, coalescing and load reports are the application's. An encoder encodes one image at a time at a constant
speed, in the order of its fair queue; a language model prefills one chunk of one prompt at a time, first come, first
served, and begins a prompt before all of its embeddings are there.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum

from benchmarks.simulation.affinity_replay import Image
from benchmarks.simulation.virtual_time import now_s
from deployments.common.fair_queue import FairQueue, virtual_arrival_s
from deployments.common.throughput import BusySpeed, InFlightTokens
from deployments.encoder_replica.busy import is_too_busy
from deployments.encoder_replica.embedding_cache import EmbeddingCache
from deployments.encoder_replica.single_flight import SingleFlight
from deployments.routing.affinity import Call
from deployments.routing.prefill_load import PrefillLoad
from planner.model import STEP_TOKENS


@dataclass(frozen=True)
class Speeds:
    """Speeds of one replica, and delays; all are the same for all replicas."""

    tokens_per_s: float = 80_000.0
    """Of an encoder."""
    prefill_tokens_per_s: float = 1 / 26e-6
    link_bytes_per_s: float = 12.5e9
    """Of a host's network card, in each direction."""
    decode_s: float = 0.006
    """From an image file to pixels."""
    call_s: float = 0.001
    """From a call until the replica has accepted or refused it."""
    shared_memory_s: float = 0.0002
    """Until an embedding on the same host is read."""
    connect_s: float = 0.0005
    """Added to each transfer between hosts."""
    output_token_s: float = 0.01
    """Between two tokens of an answer, which counts as load of its language model until it ends."""


class Source(Enum):
    """How an embedding was obtained."""

    PREFIX = "prefix cache"
    """Not at all: the engine has the prompt up to it."""
    DIRECTORY = "directory"
    """From its last known location, without a call to an encoder."""
    CACHED = "cached"
    JOINED = "joined"
    """From an encoding in flight."""
    ENCODED = "encoded"


class EncoderNode:
    """An encoder replica with `devices` devices: 1, more for a fleet that shares one queue and one cache."""

    def __init__(self, name: str, host: str, cache_bytes: int, speeds: Speeds, *, devices: int = 1) -> None:
        self.name, self.host = name, host
        self.cache: EmbeddingCache[bool] = EmbeddingCache(cache_bytes)
        self.in_flight = InFlightTokens(now_s)
        self.busy_s = 0.0
        self.num_refused = 0
        self._speeds = speeds
        self._flights: SingleFlight[float] = SingleFlight()
        self._speed = BusySpeed(now_s)
        self._queue: FairQueue[tuple[int, asyncio.Future[float]]] = FairQueue()
        self._idle_devices = devices

    def is_too_busy(self, call: Call, max_backlog_s: float) -> bool:
        """Whether the replica refuses the call."""
        assert call.key is not None
        if not call.refusable or call.key in self.cache or call.key in self._flights:
            return False
        speed = self._speed.tokens_per_s
        return is_too_busy(call, self.in_flight, tokens_per_s=speed, max_backlog_s=max_backlog_s, now_s=now_s())

    async def encode(self, image: Image, tokens_before: int) -> tuple[Source, float]:
        """Returns, once the embedding is ready, how it was obtained, and when its encoding began."""
        if self.cache.get(image.digest):
            return Source.CACHED, now_s()
        joined = image.digest in self._flights
        began_s = await self._flights.run(image.digest, lambda: self._encode(image, tokens_before))
        return Source.JOINED if joined else Source.ENCODED, began_s

    async def _encode(self, image: Image, tokens_before: int) -> float:
        tokens = image.num_tokens
        place = virtual_arrival_s(
            now_s(), tokens=tokens, tokens_before=tokens_before, tokens_per_s=self._speed.tokens_per_s
        )
        with self.in_flight.job(tokens, place):
            await asyncio.sleep(self._speeds.decode_s)
            self._speed.begin()
            done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
            self._queue.add(place, (tokens, done))
            self._start()
            began_s = await done
        self.cache.put(image.digest, True, image.num_bytes)
        return began_s

    def _start(self) -> None:
        while self._idle_devices and self._queue:
            tokens, done = self._queue.pop()
            self._idle_devices -= 1
            took_s = tokens / self._speeds.tokens_per_s
            self.busy_s += took_s
            asyncio.get_running_loop().call_later(took_s, self._finish, tokens, now_s(), done)

    def _finish(self, tokens: int, began_s: float, done: asyncio.Future[float]) -> None:
        self._speed.end(tokens)
        self._idle_devices += 1
        done.set_result(began_s)
        self._start()


@dataclass(eq=False)
class Prompt:
    """A prompt whose parts may be prefilled in order, each once it is ready."""

    parts: list[int]
    """Tokens of each part."""
    ready: list[bool]
    done: asyncio.Future[None]
    is_running: bool = False
    _read: int = field(default=0, init=False)

    def available(self) -> int:
        """Tokens that can be prefilled now."""
        tokens = 0
        for part, ready in zip(self.parts, self.ready, strict=True):
            if not ready:
                break
            tokens += part
        return tokens - self._read

    def read(self, tokens: int) -> None:
        self._read += tokens
        if self._read == sum(self.parts):
            self.done.set_result(None)


class LanguageModelNode:
    """A language model with `devices` devices: 1, more for a fleet that shares one queue."""

    def __init__(self, name: str, host: str, prefix_tokens: int, speeds: Speeds, *, devices: int = 1) -> None:
        """`prefix_tokens`: tokens of the prefix cache. With 0, the engine has lost the images of earlier turns,
        although its replica still reports the conversations that it has answered."""
        self.name, self.host = name, host
        self.prefixes: EmbeddingCache[tuple[int, int]] = EmbeddingCache(prefix_tokens)
        """Prefilled tokens and images by conversation."""
        self.load = PrefillLoad(has_prefix_cache=True)
        self.busy_s = 0.0
        self._speed = speeds.prefill_tokens_per_s
        self._waiting: list[Prompt] = []
        self._idle_devices = devices

    def add(self, parts: list[int], ready: list[bool]) -> Prompt:
        """Queues a prompt, whose `done` is set once it is prefilled. `set_ready` must be called for each part that is
        not ready."""
        prompt = Prompt(parts, ready, asyncio.get_running_loop().create_future())
        self._waiting.append(prompt)
        self._start()
        return prompt

    def set_ready(self, prompt: Prompt, part: int) -> None:
        prompt.ready[part] = True
        self._start()

    def _start(self) -> None:
        for prompt in self._waiting:
            if not self._idle_devices:
                return
            if not prompt.is_running and (tokens := min(prompt.available(), STEP_TOKENS)):
                self._idle_devices -= 1
                prompt.is_running = True
                took_s = tokens / self._speed
                self.busy_s += took_s
                asyncio.get_running_loop().call_later(took_s, self._finish, prompt, tokens)

    def _finish(self, prompt: Prompt, tokens: int) -> None:
        self._idle_devices += 1
        prompt.is_running = False
        prompt.read(tokens)
        if prompt.done.done():
            self._waiting.remove(prompt)
        self._start()


class Link:
    """One direction of a host's network card: transfers share it in order of their start."""

    def __init__(self, bytes_per_s: float) -> None:
        self.num_bytes = 0
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    def add(self, num_bytes: int) -> float:
        """Returns the time at which the link has transferred these bytes, after those before them."""
        self.num_bytes += num_bytes
        self._free_at_s = max(now_s(), self._free_at_s) + num_bytes / self._bytes_per_s
        return self._free_at_s
