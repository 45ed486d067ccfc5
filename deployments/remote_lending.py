"""Embeddings lent to language models on other hosts, which read them where they lie: the encoder's side.

What is lent stays until its reader says that it has it, or for a bounded time; who reads later finds out by the header.
It must not know how bytes move.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from deployments.embedding_shelf import Bits, EmbeddingShelf
from deployments.nixl_memory import NotInstalledError
from deployments.remote_memory import RemoteMemory
from deployments.wire import EncodedImage, EncodeTimings, RemotePlace, SharedEmbedding

LENT_S = 10.0
"""From the encoder's answer to the end of the reading."""
STEP_S = 0.0002
"""Between looks at the network while something is lent."""

TRIAL_SHAPE = (4096, 1024)
"""16 MiB in float32: half a page of a document with Qwen3-VL-8B."""
TRIAL_DIGEST = "0" * 64


@dataclasses.dataclass(frozen=True)
class TrialAnswer:
    """What an encoder answers where a language model tries how its embeddings come fastest."""

    host: str
    image: EncodedImage | SharedEmbedding | None = None
    """The trial's embedding; None where only the host was asked for, or it cannot be lent."""
    why_not: str = ""


def trial_bits() -> npt.NDArray[np.float32]:
    """What is in the trial's embedding."""
    return np.arange(TRIAL_SHAPE[0] * TRIAL_SHAPE[1], dtype=np.float32).reshape(TRIAL_SHAPE)


class RemoteLender:
    """Lends from a shelf. May be asked on any thread; one of its own looks at the network."""

    def __init__(
        self,
        shelf: EmbeddingShelf,
        memory: RemoteMemory,
        *,
        lent_s: float = LENT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shelf, self._memory = shelf, memory
        self._lent_s, self._clock = lent_s, clock
        memory.register(shelf.arena.address, shelf.arena.num_bytes)
        self._introduction = memory.introduction()
        self._lent: dict[bytes, tuple[Bits, float]] = {}
        self._changed = threading.Condition()
        self._closed = False
        threading.Thread(target=self._run, name="lends-remotely", daemon=True).start()

    def __len__(self) -> int:
        """Embeddings that are lent now."""
        return len(self._lent)

    def lend(self, image: EncodedImage) -> SharedEmbedding | None:
        """What stands for the embedding on its way to a reader; None where it does not lie on the shelf."""
        found = self._shelf.lend(image.digest) if self._shelf.offer(image) else None
        if found is None:
            return None
        start, bits = found
        lease = secrets.token_bytes(8)
        with self._changed:
            self._lent[lease] = bits, self._clock() + self._lent_s
            self._changed.notify()
        place = RemotePlace(self._introduction, self._shelf.arena.address + start, lease)
        return dataclasses.replace(image.lent_by(""), remote=place)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lent or self._closed)
                if self._closed:
                    return
            self._take_back()
            time.sleep(STEP_S)

    def _take_back(self) -> None:
        told, now = self._memory.heard(), self._clock()
        with self._changed:
            over = [lease for lease, (_, until) in self._lent.items() if until <= now]
            ended = [self._lent.pop(lease, None) for lease in (*told, *over)]
        del ended  # outside of the lock: their leases of the shelf may end here


class RemoteLending:
    """A lender that is made when somebody on another host wants to read. For one event loop."""

    def __init__(self, shelf: EmbeddingShelf, make: Callable[[], RemoteMemory], *, at_once: bool = False) -> None:
        """Raises NotInstalledError where it is to be made `at_once`."""
        self._shelf, self._make = shelf, make
        self._lender = self._made() if at_once else None
        self._making: asyncio.Task[RemoteLender] | None = None

    async def lent(self, image: EncodedImage) -> SharedEmbedding | None:
        """What stands for the embedding on its way to a reader; None where it cannot be lent."""
        try:
            return (await self._made_once()).lend(image)
        except NotInstalledError:
            return None

    async def trial(self, host: str, lent: bool | None) -> TrialAnswer:
        """The trial's embedding, lent or itself; None for the host alone."""
        if lent is None:
            return TrialAnswer(host)
        try:
            lender = await self._made_once() if lent else None
        except NotInstalledError as error:
            return TrialAnswer(host, why_not=str(error))
        image = await asyncio.to_thread(self._trial_image)
        found = image if image is None or lender is None else lender.lend(image)
        return TrialAnswer(host, found, why_not="" if found is not None else "the encoder's shared memory is full")

    def close(self) -> None:
        if self._lender is not None:
            self._lender.close()

    async def _made_once(self) -> RemoteLender:
        if self._lender is None:
            if self._making is None:
                self._making = asyncio.create_task(asyncio.to_thread(self._made))
            self._lender = await asyncio.shield(self._making)
        return self._lender

    def _made(self) -> RemoteLender:
        return RemoteLender(self._shelf, self._make())

    def _trial_image(self) -> EncodedImage | None:
        room = self._shelf.room(*TRIAL_SHAPE, torch.float32)
        if room is None:
            return None
        room.numpy()[:] = trial_bits()
        timings = EncodeTimings(0.0, 0.0, 0.0, time.time(), cached=False)
        return EncodedImage.pack(room, (1, *TRIAL_SHAPE), TRIAL_DIGEST, timings)
