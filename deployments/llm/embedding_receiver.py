"""Receives embeddings for one engine: as soon as an image is encoded, acquires a lease on the encoder's shared memory,
or reads the embedding from another host into the receive buffer, and grants it to the engine, which loads it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import NoReturn

from ray.exceptions import ObjectLostError, RayActorError, RayTaskError, TaskCancelledError, WorkerCrashedError

from deployments.common.messages import Deferred, ImageRefused, Shape, SharedEmbedding, WireError
from deployments.common.replica_errors import TransferFailedError
from deployments.llm.prefix_cache_skip import Missing, MissingWatch
from deployments.llm.received import (
    EmbeddingMismatchError,
    EmbeddingSlot,
    Image,
    NotEncodedError,
    Peer,
    ReceivedEmbeddings,
    SlotState,
    TransferPath,
)
from deployments.telemetry.clocks import clamp_duration
from deployments.telemetry.metrics import Counter, Counters, Histogram, Histograms
from deployments.transfer import unix_socket
from deployments.transfer.header import Header
from deployments.transfer.receive_buffer import ReceiveBuffer, ReceivedEmbedding
from deployments.transfer.remote_reader import RemoteReader
from deployments.transfer.same_host import EmbeddingUnavailableError, Lease, ShmClient
from deployments.transfer.tcp import TcpError
from deployments.transfer.tcp_client import TcpClients
from deployments.vllm.connector.lease_table import EngineLease
from deployments.vllm.connector.link import Loaded
from deployments.vllm.connector.replica_link import ReplicaLink

Encoding = Awaitable[Image] | SharedEmbedding | Deferred
"""Future answer of an encoder, last known location of an embedding, or an embedding that the engine may not need."""

logger = logging.getLogger("ray.serve")


class LinkLostError(RuntimeError):
    """An engine process, or a thread that listens to one or reads embeddings, has ended."""


class EmbeddingReceiver:
    """Embeddings of one engine's requests. Used on one event loop; threads of the link call back.

    received = ReceivedEmbeddings(clock)
    await receiver.receive(encodings, [(num_embeds, width) for …], received)
    receiver.close(received)
    """

    def __init__(
        self,
        counts: Counters,
        times: Histograms,
        *,
        num_workers: int,
        receive_buffer: ReceiveBuffer,
        secret: bytes,
        remote_reader: RemoteReader | None = None,
    ) -> None:
        """`num_workers`: number of the engine's workers. `receive_buffer`: for embeddings that the engine cannot load
        from the encoder's memory. `secret`: of `tcp.get_secret`. `remote_reader`: reads by RDMA into that buffer."""
        self._counts, self._times = counts, times
        self._receive_buffer, self._remote_reader = receive_buffer, remote_reader
        self._tcp = TcpClients(secret, receive_buffer, on_error=self._count_tcp_error)
        self.missing = MissingWatch()
        self.link = ReplicaLink(
            num_workers,
            on_ended=self._end_engine_lease,
            on_loaded=self._count_load,
            on_missing=self.missing.report,
        )
        self._peers: dict[str, asyncio.Task[Peer]] = {}
        self._lock = threading.Lock()
        self._granted: dict[str, EmbeddingSlot] = {}
        self.num_loaded = 0
        """Copies of embeddings to devices, by all workers."""

    async def receive(
        self, encodings: Sequence[Encoding], shapes: Sequence[Shape], received: ReceivedEmbeddings
    ) -> None:
        """Receives each embedding as soon as it is encoded, and grants it to the engine. The first failure ends the
        wait for the others. Deferred embeddings are skipped, and those that are no longer at their last known location.

        `shapes`: shape `(num_tokens, width)` of each embedding that the language model expects; `num_tokens` is None if
        the embedding comes with its header.

        Raises:
            NotEncodedError: an encoder failed.
            EmbeddingMismatchError: an embedding does not fit the model; it was not granted.
            TransferFailedError: an embedding is not at its stated location.
        """
        received.slots = [EmbeddingSlot() for _ in encodings]

        async def receive_one(number: int) -> None:
            slot = received.slots[number]
            try:
                await self._receive(number, slot, encodings[number], shapes[number])
            except WireError as error:
                raise EmbeddingMismatchError(number, str(error)) from error
            if slot.state is SlotState.LEASED:
                self._grant(slot)

        try:
            async with asyncio.TaskGroup() as group:
                for number in range(len(encodings)):
                    group.create_task(receive_one(number))
        except BaseException as failed:
            self.close(received)
            error = failed.exceptions[0] if isinstance(failed, BaseExceptionGroup) else failed
            if isinstance(error, EmbeddingUnavailableError | OSError):
                raise TransferFailedError(str(error)) from error
            raise error from error.__cause__
        ready_at_s = [image.timings.ready_at_s for image in received.images if isinstance(image, SharedEmbedding)]
        if ready_at_s:
            received.transfer_s = clamp_duration(time.time() - max(ready_at_s), self._counts)

    async def receive_missing(
        self, missing: Missing, digests: Sequence[str | None], shapes: Sequence[Shape], received: ReceivedEmbeddings
    ) -> NoReturn:
        """Receives skipped embeddings from their last known location when the engine reports them as missing.

        `digests`, `shapes`: of each embedding of the request; a digest is None if the embedding comes with its header,
        for it is never skipped. Raises NotEncodedError for those that are stored nowhere.
        """
        lost: list[int] = []

        async def receive_one(number: int, slot: EmbeddingSlot) -> None:
            try:
                if slot.location is None:
                    raise EmbeddingUnavailableError("the embedding is not stored anywhere")
                slot.location.check(shapes[number])
                await self._acquire(slot, slot.location, direct_read=True)
                slot.image = slot.location
                self._grant(slot)
            except (EmbeddingUnavailableError, OSError, WireError):
                lost.append(number)

        async def receive_all() -> None:
            async with asyncio.TaskGroup() as group:
                for number, slot in enumerate(received.slots):
                    if slot.state is SlotState.SKIPPED and digests[number] in missing.digests:
                        group.create_task(receive_one(number, slot))

        while not lost:
            await missing.changed.wait()
            missing.changed.clear()
            await receive_all()  # a group of this coroutine's own would keep the request in a cycle
        raise NotEncodedError(*sorted(lost))

    def close(self, received: ReceivedEmbeddings) -> None:
        """Releases all leases; those granted to the engine are released when the engine reports their end."""
        engine_leases = []
        for slot in received.slots:
            if slot.state is SlotState.LEASED:
                self._release(slot)
            elif slot.state is SlotState.GRANTED:
                engine_leases.append(slot.engine_lease)
            slot.state = SlotState.RELEASED
        if engine_leases:
            try:
                self.link.release(engine_leases)
            except OSError:  # the engine has ended and reads nothing more
                for lease in engine_leases:
                    self._end_engine_lease(lease)

    def check(self) -> None:
        """Raises LinkLostError if embeddings no longer reach the engine. Must be called periodically: it also unmaps
        dead peers and closes unused connections."""
        if (lost := self.link.lost()) is not None:
            raise LinkLostError(lost)
        if self._remote_reader is not None and not self._remote_reader.is_alive:
            raise LinkLostError("the thread that reads embeddings by RDMA has ended")
        self.unmap_dead_peers()
        self._tcp.close_unused()

    def unmap_dead_peers(self) -> None:
        """Unmaps the memory of encoders that have ended, if no lease refers to it."""
        for address, task in list(self._peers.items()):
            if not task.done():
                continue
            if (peer := _connected(task)) is None:
                del self._peers[address]
            elif isinstance(peer.client, ShmClient) and not peer.client.is_alive and not peer.num_leases:
                del self._peers[address]
                if peer.in_engine:
                    self.link.unmap(address)

    def shut_down(self) -> None:
        self.link.close()
        for task in self._peers.values():
            if (peer := _connected(task)) is not None and isinstance(peer.client, ShmClient):
                peer.client.close()
        self._tcp.close()
        if self._remote_reader is not None:
            self._remote_reader.close()

    async def _receive(self, number: int, slot: EmbeddingSlot, encoding: Encoding, shape: Shape) -> None:
        if isinstance(encoding, Deferred):
            slot.state, slot.location = SlotState.SKIPPED, encoding.location
            return
        if isinstance(encoding, SharedEmbedding):
            encoding.check(shape)
            try:
                await self._acquire(slot, encoding, direct_read=True)
                slot.image = encoding
            except (EmbeddingUnavailableError, OSError):
                slot.state = SlotState.SKIPPED
            return
        try:
            image = await encoding
        except ObjectLostError as error:
            raise TransferFailedError(str(error)) from error
        except (RayTaskError, RayActorError, TaskCancelledError, WorkerCrashedError) as error:
            raise NotEncodedError(number) from error
        if isinstance(image, ImageRefused):
            slot.state, slot.image = SlotState.REJECTED, image
            return
        slot.image = image
        image.check(shape)
        await self._acquire(slot, image)

    async def _acquire(self, slot: EmbeddingSlot, image: SharedEmbedding, *, direct_read: bool = False) -> None:
        """Reads by RDMA what was published for it, leases what is in shared memory of this host if it can be opened and
        the engine can map it, and reads anything else by TCP. Raises EmbeddingUnavailableError or OSError."""
        same_host = False
        if image.remote is not None and self._remote_reader is not None:
            try:
                await self._hold(slot, self._remote_reader.receive(image), TransferPath.NIXL)
            except EmbeddingUnavailableError as error:
                logger.warning("an embedding is read by TCP, because RDMA failed: %s", error)
                self._counts.add(Counter.RDMA_FALLBACKS)
                direct_read = True
            else:
                return
        elif image.server and unix_socket.host_of(image.server) == unix_socket.host_id():
            same_host = True
            peer = await self._open(image.server)
            if peer is not None:
                await self._lease(slot, peer, image, direct_read=direct_read)
                return
        received = self._tcp.fetch(image.tcp, Header.of(image), direct_read=direct_read)
        await self._hold(slot, received, TransferPath.TCP)
        if same_host:  # counted only now: an encoder that has ended does not answer by TCP
            self._counts.add(Counter.EMBEDDING_SHM_FALLBACKS)

    async def _open(self, server: str) -> Peer | None:
        """Returns the encoder's memory if the engine can load from it."""
        try:
            peer = await self._get_peer(server, lambda: ShmClient(server))
        except (EmbeddingUnavailableError, OSError) as error:
            logger.warning("an encoder's memory cannot be opened; its embeddings are read by TCP: %s", error)
            return None
        assert isinstance(peer.client, ShmClient)
        return peer if peer.in_engine and peer.client.is_alive else None

    async def _lease(self, slot: EmbeddingSlot, peer: Peer, image: SharedEmbedding, *, direct_read: bool) -> None:
        assert isinstance(peer.client, ShmClient)
        self._add_num_leases(peer, 1)
        acquired = peer.client.acquire(Header.of(image), direct_read=direct_read)
        try:
            lease = await asyncio.shield(asyncio.wrap_future(acquired))
        except BaseException as failed:
            if isinstance(failed, asyncio.CancelledError):  # no other code releases a lease that arrives later
                acquired.add_done_callback(_release)
            self._add_num_leases(peer, -1)
            raise
        finally:
            del acquired  # or its error, whose traceback has this frame, would refer to itself
        slot.state, slot.path, slot.lease, slot.peer = SlotState.LEASED, TransferPath.ENGINE, lease, peer

    async def _hold(self, slot: EmbeddingSlot, received: Future[ReceivedEmbedding], path: TransferPath) -> None:
        """Waits for an embedding in the receive buffer. Raises EmbeddingUnavailableError."""
        buffer = self._receive_buffer
        limit_s = 2 * buffer.timeout_s if path is TransferPath.NIXL else None  # NIXL may block its thread
        try:
            async with asyncio.timeout(limit_s):
                lease = await asyncio.wrap_future(received)
        except TimeoutError as error:
            raise EmbeddingUnavailableError("the transfer of an embedding timed out") from error
        peer = await self._get_peer(buffer.address, lambda: buffer)
        self._add_num_leases(peer, 1)
        slot.state, slot.path, slot.lease, slot.peer = SlotState.LEASED, path, lease, peer

    async def _get_peer(self, address: str, connect: Callable[[], ShmClient | ReceiveBuffer]) -> Peer:
        task = self._peers.get(address)
        if task is None or (task.done() and _connected(task) is None):
            task = self._peers[address] = asyncio.create_task(self._connect_peer(address, connect))
        return await asyncio.shield(task)

    async def _connect_peer(self, address: str, connect: Callable[[], ShmClient | ReceiveBuffer]) -> Peer:
        client = await asyncio.to_thread(connect)
        try:
            futures = self.link.map(address, client.file, client.num_bytes)
            await asyncio.gather(*map(asyncio.wrap_future, futures))
        except (OSError, RuntimeError) as error:
            self.link.unmap(address)  # other workers may have mapped it
            if isinstance(client, ReceiveBuffer):
                raise EmbeddingUnavailableError(f"the engine cannot map the receive buffer: {error}") from error
            logger.warning("the engine cannot map an encoder's memory; its embeddings are read by TCP: %s", error)
            return Peer(client, in_engine=False)
        return Peer(client, in_engine=True)

    def _grant(self, slot: EmbeddingSlot) -> None:
        assert slot.lease is not None
        assert slot.peer is not None
        assert slot.path is not None
        assert isinstance(slot.image, SharedEmbedding)
        self._counts.add(Counter.EMBEDDINGS_RECEIVED, path=slot.path.value)
        self._counts.add(Counter.EMBEDDING_BYTES_RECEIVED, slot.image.num_bytes, path=slot.path.value)
        slot.engine_lease, address = secrets.token_hex(8), slot.peer.client.address
        with self._lock:
            self._granted[slot.engine_lease] = slot
        slot.state = SlotState.GRANTED
        ready_at_s = slot.image.timings.ready_at_s
        self.link.grant(EngineLease(slot.engine_lease, address, slot.lease.offset, slot.lease.header, ready_at_s))

    def _end_engine_lease(self, engine_lease: str) -> None:
        with self._lock:
            slot = self._granted.pop(engine_lease, None)
        if slot is not None:
            self._release(slot)

    def _release(self, slot: EmbeddingSlot) -> None:
        assert slot.lease is not None
        assert slot.peer is not None
        slot.lease.release()
        self._add_num_leases(slot.peer, -1)

    def _add_num_leases(self, peer: Peer, number: int) -> None:
        with self._lock:
            peer.num_leases += number

    def _count_tcp_error(self, error: TcpError) -> None:
        self._counts.add(Counter.TCP_ERRORS, reason=error.value)

    def _count_load(self, loaded: Loaded) -> None:
        if loaded.num_bytes:
            with self._lock:
                self.num_loaded += 1
            self._counts.add(Counter.EMBEDDINGS_LOADED)
            self._counts.add(Counter.EMBEDDING_BYTES_LOADED, loaded.num_bytes)
            self._times.observe(Histogram.EMBEDDING_LOAD_SECONDS, clamp_duration(loaded.seconds, self._counts))


def _connected(task: asyncio.Task[Peer]) -> Peer | None:
    """Returns the result of a task that has succeeded."""
    return task.result() if task.done() and not task.cancelled() and task.exception() is None else None


def _release(acquired: Future[Lease]) -> None:
    if not acquired.cancelled() and acquired.exception() is None:
        acquired.result().release()
