"""Embeddings of one request at the LLM replica: one record per image, with its state."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING

from deployments.common.messages import ImageRefused, SharedEmbedding
from deployments.telemetry import tracing
from deployments.transfer.receive_buffer import ReceiveBuffer, ReceivedEmbedding
from deployments.transfer.same_host import Lease, ShmClient
from deployments.vllm.compat import FirstTokenClock
from encoder.item_header import ItemHeader

if TYPE_CHECKING:
    from opentelemetry.context import Context

Image = SharedEmbedding | ImageRefused


class TransferPath(Enum):
    """How an embedding reached the engine. A request with several paths is labelled with the first in this order."""

    NIXL = "nixl"
    """Read by RDMA into the receive buffer, from which the engine loaded it."""
    TCP = "tcp"
    """Read by TCP into the receive buffer, from which the engine loaded it."""
    ENGINE = "engine_loads"
    """The engine loaded it from the encoder's memory."""
    PREFIX = "prefix_cache"
    """It was not transferred: vLLM's prefix cache covers it."""


class NotEncodedError(RuntimeError):
    """An encoder failed to encode an image, or the engine needs skipped embeddings that are stored nowhere. The ingress
    has the same reference to the encoder's answer and knows the reason."""

    def __init__(self, *images: int) -> None:
        """`images`: indices of the images in the request."""
        super().__init__(f"images {images} were not encoded")
        self.images = images


class EmbeddingMismatchError(RuntimeError):
    """An embedding does not have the shape or dtype that the language model expects."""

    def __init__(self, image: int, reason: str) -> None:
        """`image`: index of the image in the request."""
        super().__init__(f"embedding of image {image}: {reason}")
        self.image = image


class SlotState(Enum):
    PENDING = auto()
    """The encoder has not answered, or a lease is being acquired."""
    REJECTED = auto()
    """The encoder refused the image."""
    LEASED = auto()
    """This replica holds a lease on the embedding."""
    GRANTED = auto()
    """The engine may load the embedding by that lease, which is released when the engine reports its end."""
    SKIPPED = auto()
    """Not received: vLLM's prefix cache is expected to cover it."""
    RELEASED = auto()
    """The request has ended."""


@dataclass
class Peer:
    """Memory from which the engine loads embeddings: one encoder's, or the receive buffer."""

    client: ShmClient | ReceiveBuffer
    in_engine: bool
    """Whether all workers of the engine have mapped it."""
    num_leases: int = 0
    """Leases that are held or being acquired, including those granted to the engine."""


@dataclass
class EmbeddingSlot:
    """State of one image of a request."""

    state: SlotState = SlotState.PENDING
    image: SharedEmbedding | ImageRefused | None = None
    """The encoder's answer, or the location that it is read from; None before that."""
    location: SharedEmbedding | None = None
    """Last known location of a skipped embedding."""
    path: TransferPath | None = None
    """Set once LEASED."""
    lease: Lease | ReceivedEmbedding | None = None
    """Set once LEASED, as is `peer`."""
    peer: Peer | None = None
    engine_lease: str = ""
    """Name of the engine's lease once GRANTED."""


@dataclass
class ReceivedEmbeddings:
    """All images of one request, and when they were received. Pass it to `EmbeddingReceiver.close` when the request has
    ended or failed."""

    clock: FirstTokenClock = field(default_factory=FirstTokenClock)
    slots: list[EmbeddingSlot] = field(default_factory=list)
    transfer_s: float | None = None
    """Seconds from when the last embedding was ready until all were received; None without embeddings."""
    received_epoch_s: float = 0.0
    received_at_s: float = 0.0
    """`time.perf_counter()` when all were received."""
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    trace: Context | None = field(default_factory=tracing.current_context)

    def mark_complete(self) -> None:
        self.received_epoch_s, self.received_at_s = time.time(), time.perf_counter()
        self.complete.set()

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the embeddings to the first token, None before it; 0 if vLLM had the prompt in its prefix cache
        and needed no embedding."""
        first = self.clock.first_token_at_s
        return None if first is None else max(0.0, first - self.received_at_s)

    @property
    def images(self) -> list[SharedEmbedding | ImageRefused | None]:
        """Answer of an encoder or location that was read, of each image; None for one that was skipped."""
        return [slot.image for slot in self.slots]

    def header(self, number: int) -> ItemHeader:
        """Returns the header that came with an embedding that was received."""
        image = self.slots[number].image
        assert isinstance(image, SharedEmbedding) and isinstance(image.header, ItemHeader)  # noqa: PT018
        return image.header

    @property
    def num_skipped(self) -> int:
        return sum(slot.state is SlotState.SKIPPED for slot in self.slots)

    def list_transfers(self) -> list[tuple[SharedEmbedding, TransferPath]]:
        """Returns each received embedding with its path."""
        return [
            (slot.image, slot.path)
            for slot in self.slots
            if slot.path is not None and isinstance(slot.image, SharedEmbedding)
        ]

    @property
    def num_bytes(self) -> int:
        """Total bytes of the received embeddings."""
        return sum(image.num_bytes for image, _ in self.list_transfers())

    @property
    def path(self) -> TransferPath | None:
        """Path of a request; None for one whose embeddings were all refused, or which has none."""
        paths = {path for _, path in self.list_transfers()}
        nothing = TransferPath.PREFIX if self.num_skipped else None
        return next((path for path in TransferPath if path in paths), nothing)

    @property
    def locations(self) -> tuple[SharedEmbedding | None, ...]:
        """Location of each embedding that was read and is in an encoder's shared memory, None for the others. It is
        without the one for RDMA, by which an embedding is read once."""
        read = (TransferPath.ENGINE, TransferPath.TCP)
        images = [slot.image if slot.path in read else None for slot in self.slots]
        return tuple(
            replace(image, remote=None) if isinstance(image, SharedEmbedding) and image.server else None
            for image in images
        )
