"""Embeddings on their way into the engine: fetched as soon as each is encoded, borrowed where they lie in the encoders'
shared memory, and loaded by the engine itself where it can, else handed to vLLM with the request.

It must not know of HTTP or of vLLM's requests.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass

from ray.exceptions import ObjectLostError, RayActorError, RayTaskError, TaskCancelledError, WorkerCrashedError

from deployments.arrived import Arrived, Image, NotEncodedError, Way, encoded_here
from deployments.engine_link import EngineLink, Loaded
from deployments.engine_table import Place
from deployments.landing import Landing
from deployments.lending import Borrowed, GoneError, Held
from deployments.metrics import Count, Counts
from deployments.remote_trial import RemoteWay
from deployments.replica_errors import TransferFailedError
from deployments.unsent import Missing, Unsent
from deployments.wire import NOWHERE, EncodedImage, ImageRefused, SharedEmbedding

Encoding = Awaitable[Image] | SharedEmbedding
"""What an encoder answers, or where an earlier answer lies."""

logger = logging.getLogger("ray.serve")


@dataclass
class _Lender:
    borrowed: Borrowed | Landing
    in_engine: bool
    num_leases: int = 0


class Incoming:
    """All that is borrowed for one engine. Used on one event loop, and told by the link's threads."""

    def __init__(self, counts: Counts, *, num_workers: int, remote: RemoteWay | None = None) -> None:
        """`remote` reads what encoders on other hosts lend; None: they lend nothing."""
        self._counts = counts
        self._remote = remote
        self._num_workers = num_workers
        self.unsent = Unsent()
        self.link = EngineLink(ended=self._lease_ended, loaded=self._loaded, missing=self.unsent.missing)
        self._engine_loads = False
        self.prefix_cached = False
        """Whether the engine is to be asked whether it can do without an embedding that is not to be had."""
        self._lenders: dict[str, asyncio.Task[_Lender]] = {}
        self._lock = threading.Lock()
        self._by_lease: dict[str, tuple[Held, _Lender]] = {}
        self.num_loaded = 0
        """Embeddings that workers have copied to their devices."""

    def __len__(self) -> int:
        """Embeddings that the engine may load now."""
        return len(self._by_lease)

    @property
    def pulls(self) -> bool:
        """Whether encoders on other hosts are to lend."""
        return self._remote is not None and self._remote.pulls

    def engine_started(self, *, timeout_s: float) -> bool:
        """Whether the engine has connectors that have called. From now on it loads by itself where it can."""
        self._engine_loads = self.link.connected(self._num_workers, timeout_s=timeout_s)
        return self._engine_loads

    def engine_fails(self) -> None:
        """The engine does not do what it should; from now on embeddings go with the requests."""
        self._engine_loads = False

    def expecting(self) -> Arrived:
        """For `arrive`, to which it is passed: nothing has arrived."""
        return Arrived(prefix_cached=self.prefix_cached and self._engine_loads)

    async def arrive(
        self, encodings: Sequence[Encoding], arrived: Arrived | None = None, *, one_by_one: bool = False
    ) -> Arrived:
        """Fetches what encoders answer, each as soon as it is there, and holds what lies in shared memory.

        The first that fails ends the wait for the others. `one_by_one`: the engine may load each before the others are
        there; whether it is to load any is told by `arrived.engine_loads` in the end.

        Raises:
            NotEncodedError: an encoder has failed, or an embedding is no more where an earlier request saw it and the
                engine is not to be asked whether it can do without.
            TransferFailedError: an embedding is not where it was said to lie.
        """
        arrived = arrived or self.expecting()
        lenders: dict[int, _Lender] = {}
        one_by_one = one_by_one and self._engine_loads

        async def fetch(number: int, encoding: Encoding) -> Image:
            image = await self._fetch(number, encoding, arrived, lenders)
            if one_by_one and number in lenders and lenders[number].in_engine:
                self._give(number, arrived, lenders)
            return image

        try:
            async with asyncio.TaskGroup() as group:
                fetched = [group.create_task(fetch(number, encoding)) for number, encoding in enumerate(encodings)]
            arrived.images = [task.result() for task in fetched]
            encoded = sum(not isinstance(image, ImageRefused) for image in arrived.images)
            if (
                self._engine_loads
                and 0 < len(arrived.held) + len(arrived.unsent) == encoded
                and all(lender.in_engine for lender in lenders.values())
            ):
                for number in sorted(arrived.held.keys() - arrived.leases.keys()):
                    self._give(number, arrived, lenders)
            elif arrived.unsent:  # vLLM takes all of a request's embeddings with the request, or none
                raise NotEncodedError(min(arrived.unsent))
            else:
                arrived.retired, arrived.leases = arrived.leases, {}
        except BaseException as failed:
            self.close(arrived)
            error = failed.exceptions[0] if isinstance(failed, BaseExceptionGroup) else failed
            if isinstance(error, GoneError | OSError):
                raise TransferFailedError(str(error)) from error
            raise error from error.__cause__
        self._count(arrived)
        if self._remote is not None and any(
            isinstance(image, EncodedImage) and not encoded_here(image) for image in arrived.images
        ):
            self._remote.by_the_object_store()
        return arrived

    async def _fetch(self, number: int, encoding: Encoding, arrived: Arrived, lenders: dict[int, _Lender]) -> Image:
        if isinstance(encoding, SharedEmbedding):
            try:
                if encoding.lender == NOWHERE:
                    raise GoneError("the embedding lies nowhere")
                await self._hold(number, encoding, arrived, lenders, unasked=True)
            except (GoneError, OSError) as error:
                if not arrived.prefix_cached:
                    raise NotEncodedError(number) from error
                arrived.unsent.add(number)
            return encoding
        try:
            image = await encoding
        except ObjectLostError as error:
            raise TransferFailedError(str(error)) from error
        except (RayTaskError, RayActorError, TaskCancelledError, WorkerCrashedError) as error:
            raise NotEncodedError(number) from error
        if isinstance(image, SharedEmbedding):
            await self._hold(number, image, arrived, lenders)
        return image

    def watched(self, arrived: Arrived) -> AbstractContextManager[Missing]:
        """To go to the engine without what is unsent; tells when it waits for one of them."""
        return self.unsent.watched(arrived.unsent_by_digest)

    def spared(self, arrived: Arrived) -> None:
        """The engine had no need of what is unsent."""
        self._counts.add(Count.EMBEDDINGS_SPARED, len(arrived.unsent))

    def close(self, arrived: Arrived) -> None:
        """Gives back what nothing reads any more; what the engine may still read it gives back itself."""
        while arrived.held:
            number, held = arrived.held.popitem()
            lease = arrived.leases.get(number, arrived.retired.get(number))
            if lease is None:
                held.release()
                continue
            try:
                self.link.withdraw(lease)
            except OSError:  # the engine has gone, and reads nothing
                self._lease_ended(lease)

    def forget_the_lost(self) -> None:
        """Unmaps the memory of encoders that have gone, where the engine needs nothing of it; to be called at times."""
        for address, task in list(self._lenders.items()):
            if not task.done():
                continue
            if task.cancelled() or task.exception() is not None:
                del self._lenders[address]
                continue
            lender = task.result()
            with self._lock:
                needed = lender.num_leases > 0
            if not lender.borrowed.alive and not needed:
                del self._lenders[address]
                if lender.in_engine:
                    self.link.forget(address)

    def shut_down(self) -> None:
        self.link.close()
        for task in self._lenders.values():
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().borrowed.close()
        if self._remote is not None:
            self._remote.close()

    async def _hold(
        self,
        number: int,
        image: SharedEmbedding,
        arrived: Arrived,
        lenders: dict[int, _Lender],
        *,
        unasked: bool = False,
    ) -> None:
        if image.remote is not None:
            await self._land(number, image, arrived, lenders)
            return
        lender = await self._opened(image.lender, lambda: Borrowed(image.lender))
        borrowed = lender.borrowed
        assert isinstance(borrowed, Borrowed)
        asked = borrowed.hold(image.digest, unasked=unasked)
        try:
            start = await asyncio.shield(asyncio.wrap_future(asked))
        except asyncio.CancelledError:  # the answer is on its way, and nobody will want what it brings
            asked.add_done_callback(lambda done: _give_back(borrowed, image.digest, done))
            raise
        arrived.held[number] = Held(image, borrowed, start)
        lenders[number] = lender

    async def _land(self, number: int, image: SharedEmbedding, arrived: Arrived, lenders: dict[int, _Lender]) -> None:
        if self._remote is None:
            raise GoneError("this language model does not read from other hosts")
        landed, landing = await self._remote.fetch(image)
        lenders[number] = await self._opened(landing.address, lambda: landing)
        arrived.held[number] = Held(dataclasses.replace(image, lender=landing.address), landed, landed.start)

    async def _opened(self, address: str, borrow: Callable[[], Borrowed | Landing]) -> _Lender:
        task = self._lenders.get(address)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._lenders[address] = asyncio.create_task(self._open(address, borrow))
        return await asyncio.shield(task)

    async def _open(self, address: str, borrow: Callable[[], Borrowed | Landing]) -> _Lender:
        borrowed = await asyncio.to_thread(borrow)
        if not self._engine_loads:
            return _Lender(borrowed, in_engine=False)
        try:
            futures = self.link.map(address, borrowed.file, borrowed.num_bytes)
            await asyncio.gather(*map(asyncio.wrap_future, futures))
        except (OSError, RuntimeError) as error:
            logger.warning("the engine cannot map an encoder's memory; embeddings go with the requests: %s", error)
            return _Lender(borrowed, in_engine=False)
        return _Lender(borrowed, in_engine=True)

    def _give(self, number: int, arrived: Arrived, lenders: dict[int, _Lender]) -> None:
        held, lease = arrived.held[number], secrets.token_hex(8)
        place = Place(lease, held.image.lender, held.start, held.header, held.image.timings.ready_at_s)
        with self._lock:
            self._by_lease[lease] = held, lenders[number]
            lenders[number].num_leases += 1
        arrived.leases[number] = lease
        self.link.give(place)

    def _lease_ended(self, lease: str) -> None:
        with self._lock:
            found = self._by_lease.pop(lease, None)
            if found is not None:
                found[1].num_leases -= 1
        if found is not None:
            found[0].release()

    def _loaded(self, loaded: Loaded) -> None:
        if loaded.num_bytes:
            with self._lock:
                self.num_loaded += 1
            self._counts.add(Count.EMBEDDINGS_LOADED)
            self._counts.add(Count.EMBEDDING_BYTES_LOADED, loaded.num_bytes)
            self._counts.add(Count.LOAD_MS, round(loaded.seconds * 1e3))

    def _count(self, arrived: Arrived) -> None:
        for number, image in enumerate(arrived.images):
            if isinstance(image, ImageRefused) or number in arrived.unsent:
                continue
            way = Way.OBJECT_STORE if isinstance(image, EncodedImage) else Way.REQUEST
            way = Way.ENGINE if arrived.engine_loads else Way.LOCAL if encoded_here(image) else way
            way = Way.NIXL if isinstance(image, SharedEmbedding) and image.remote is not None else way
            self._counts.add(Count.EMBEDDINGS_ARRIVED, reason=way.value)
            self._counts.add(Count.EMBEDDING_BYTES_ARRIVED, image.num_bytes, reason=way.value)


def _give_back(borrowed: Borrowed, digest: str, asked: Future[int]) -> None:
    if not asked.cancelled() and asked.exception() is None:
        borrowed.release(digest)
