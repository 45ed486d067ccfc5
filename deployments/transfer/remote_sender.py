"""Encoder's side of RDMA: LLM replicas on other hosts read embeddings from the encoder's memory.

A published embedding is kept until its reader's notification arrives or the store ends the offer; a later reader
detects from the header that the memory was reused.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time

from deployments.common.messages import EncodedImage, RemoteLocation
from deployments.transfer.rdma_process import RdmaProcess
from deployments.transfer.shared_store import EmbeddingStore

logger = logging.getLogger("ray.serve")

POLL_S = 0.0002
"""Pause between polls of the network in the first RECENT_S after an embedding was published: most are read then."""
RECENT_S = 10.0
SLOW_POLL_S = 0.002
"""Pause between later polls while any embedding is published. Its reader may have left, or still wait for a slot."""
ERROR_PAUSE_S = 1.0
"""Pause after a failed poll."""


class RemoteSender:
    """Publishes embeddings of a store. Thread-safe; its own thread polls the network."""

    def __init__(self, store: EmbeddingStore, rdma: RdmaProcess) -> None:
        """`rdma`: not started. Raises NotInstalledError if NIXL cannot be used."""
        self._store, self._rdma = store, rdma
        rdma.start(store.arena)
        self._leases: set[bytes] = set()
        self._published_at_s = 0.0  # the last time
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="remote-sender", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """False if the polling thread died; True after `close`."""
        return self._closed or self._thread.is_alive()

    def publish(self, image: EncodedImage) -> RemoteLocation | None:
        """Offers the embedding to one reader. Returns None if it is not in the shared memory, or while there is no
        RDMA process."""
        lease, offset, endpoint = secrets.token_bytes(8), self._store.offset_of(image), self._rdma.endpoint()
        if endpoint is None or offset is None or not self._store.offer(image, reader=lease.hex()):
            return None
        with self._changed:
            self._leases.add(lease)
            self._published_at_s = time.monotonic()
            self._changed.notify()
        return RemoteLocation(endpoint.agent_metadata, endpoint.address + offset, lease)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._leases or self._closed)
                if self._closed:
                    break
            try:
                self._process_notifications()
            except Exception:
                logger.exception("notifications of readers on other hosts could not be read")
                time.sleep(ERROR_PAUSE_S)
            with self._changed:
                is_recent = time.monotonic() - self._published_at_s < RECENT_S
                self._changed.wait(POLL_S if is_recent else SLOW_POLL_S)
        self._rdma.close()

    def _process_notifications(self) -> None:
        for lease in self._rdma.get_notifications():
            self._store.end_offer(lease.hex())
        with self._changed:  # the store also ends offers, by timeout or for their memory
            self._leases = {lease for lease in self._leases if self._store.is_offered(lease.hex())}
