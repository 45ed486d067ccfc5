"""How embeddings come from encoders on other hosts: NIXL where it measured faster than Ray's object store, else that.

Tried between this language model and encoders that run, once an embedding has come through the object store. It must
not know of requests.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import cast

import numpy as np
import numpy.typing as npt
from ray import serve

from deployments.embedding_header import Header
from deployments.landing import Landed, Landing
from deployments.lending import GoneError
from deployments.metrics import Count, Counts
from deployments.nixl_memory import NotInstalledError
from deployments.remote_lending import TrialAnswer, trial_bits
from deployments.remote_memory import RemoteMemory
from deployments.wire import EncodedImage, SharedEmbedding

logger = logging.getLogger("ray.serve")

TRIAL_ROUNDS = 5
"""Each way, after one that connects."""
TRIAL_S = 60.0
AGAIN_S = 60.0
"""After which a choice against NIXL is looked at again."""
FAILURES = 3
"""In a row, after which embeddings go through the object store."""


class Chosen(Enum):
    """The choice and why; the metrics' tag `reason`."""

    FASTER = "nixl_faster"
    SLOWER = "object_store_nixl_slower"
    ONE_HOST = "object_store_no_other_host"
    NOT_INSTALLED = "object_store_no_nixl"
    FAILED = "object_store_nixl_failed"


Ask = Callable[[bool | None], Awaitable[TrialAnswer]]
"""Asks an encoder for the trial's embedding: True lent by NIXL, False by the object store, None for its host alone."""


def ask_an_encoder() -> Ask:
    """To be called in a replica."""
    handle = serve.get_deployment_handle("Encoder", serve.get_replica_context().app_name)
    trial = handle.options(method_name="transfer_trial", _by_reference=True)

    async def ask(lent: bool | None) -> TrialAnswer:
        return cast(TrialAnswer, await trial.remote(lent))

    return ask


class RemoteWay:
    """One language model's reading from other hosts. For one event loop."""

    def __init__(
        self,
        counts: Counts,
        make: Callable[[], RemoteMemory],
        *,
        num_bytes: int,
        always: bool = False,
        host: str,
        ask: Callable[[], Ask] = ask_an_encoder,
        clock: Callable[[], float] = time.monotonic,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`num_bytes` bounds what is in flight. `always`: without a trial, and for encoders of this host too.

        Raises NotInstalledError where `always`.
        """
        self._counts, self._make, self._num_bytes, self._always = counts, make, num_bytes, always
        self._host, self._ask, self._clock, self._timer = host, ask, clock, timer
        self.landing: Landing | None = Landing(make(), num_bytes) if always else None
        self.pulls = always
        """Whether encoders are to lend by NIXL."""
        self._chosen: Chosen | None = None
        self._trial: asyncio.Task[None] | None = None
        self._next_trial = 0.0
        self._failures = 0

    async def fetch(self, image: SharedEmbedding) -> tuple[Landed, Landing]:
        """The embedding and the memory that it is in. Raises GoneError."""
        if self.landing is None:
            raise GoneError("this language model does not read from other hosts")
        try:
            async with asyncio.timeout(2 * self.landing.patience_s):  # it keeps its own, unless NIXL blocks its thread
                landed = await asyncio.wrap_future(self.landing.fetch(image))
        except (GoneError, TimeoutError) as error:
            self._failures += 1
            if self._failures >= FAILURES and self.pulls and not self._always:
                self._choose(Chosen.FAILED, str(error))
            raise GoneError(str(error) or "reading from another host takes too long") from error
        self._failures = 0
        return landed, self.landing

    def by_the_object_store(self) -> None:
        """An embedding came that way: there is an encoder that a trial may ask."""
        if self._always or self.pulls or self._clock() < self._next_trial:
            return
        if self._trial is None or self._trial.done():
            self._trial = asyncio.create_task(self._try())

    def close(self) -> None:
        if self._trial is not None:
            self._trial.cancel()
        if self.landing is not None:
            self.landing.close()

    async def _try(self) -> None:
        try:
            async with asyncio.timeout(TRIAL_S):
                chosen, why = await self._tried(self._ask())
        except NotInstalledError as error:
            chosen, why = Chosen.NOT_INSTALLED, str(error)
        except Exception as error:  # of Serve's many; whatever it is, there is another way
            chosen, why = Chosen.FAILED, f"{type(error).__name__}: {error}"
        self._choose(chosen, why)

    async def _tried(self, ask: Ask) -> tuple[Chosen, str]:
        if (await ask(None)).host == self._host:
            return Chosen.ONE_HOST, "an encoder of this host was asked"
        if self.landing is None:
            self.landing = await asyncio.to_thread(lambda: Landing(self._make(), self._num_bytes))
        took: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(1 + TRIAL_ROUNDS):
            for lent in (False, True):
                began = self._timer()
                answer = await ask(lent)
                if answer.host == self._host:
                    continue
                if answer.image is None:
                    return Chosen.NOT_INSTALLED, answer.why_not
                bits = await self._bits(answer.image)
                took[lent].append(self._timer() - began)
                if not np.array_equal(bits, trial_bits()):
                    return (
                        Chosen.FAILED,
                        f"the trial's embedding came wrong, by {'NIXL' if lent else 'the object store'}",
                    )
                del bits, answer
        if min(map(len, took.values())) < 2:
            return Chosen.ONE_HOST, "encoders of this host answered"
        nixl_ms, store_ms = (statistics.median(took[lent][1:]) * 1e3 for lent in (True, False))
        faster = nixl_ms < store_ms
        why = f"16 MiB took {nixl_ms:.1f} ms by NIXL, {store_ms:.1f} ms by the object store"
        return (Chosen.FASTER if faster else Chosen.SLOWER), why

    async def _bits(self, image: EncodedImage | SharedEmbedding) -> npt.NDArray[np.generic]:
        if isinstance(image, EncodedImage):
            return image.bits
        landed, _ = await self.fetch(image)
        header = Header(image.digest, image.dtype, image.shape, image.grid_thw)
        return landed.tensor(landed.start, header).numpy()

    def _choose(self, chosen: Chosen, why: str) -> None:
        self.pulls = chosen is Chosen.FASTER
        self._failures = 0
        self._next_trial = self._clock() + AGAIN_S
        if chosen is self._chosen:
            return
        self._chosen = chosen
        self._counts.add(Count.REMOTE_WAYS_CHOSEN, reason=chosen.value)
        way = "by NIXL" if self.pulls else "through Ray's object store"
        logger.info("embeddings of encoders on other hosts come %s: %s", way, why)
