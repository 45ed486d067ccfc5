"""Embeddings of one request at the LLM replica: one record per image, with its state."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import Tensor

from deployments.common.messages import PREFIX_CACHE_ONLY, EncodedImage, ImageRefused, SharedEmbedding
from deployments.common.replica_errors import TransferFailedError
from deployments.transfer.header import WrongEmbeddingError
from deployments.transfer.remote_receiver import ReceiveBuffer
from deployments.transfer.same_host import EmbeddingLease, ShmClient

Image = EncodedImage | SharedEmbedding | ImageRefused


class TransferPath(Enum):
    """How an embedding reached the engine. A request with several paths is labelled with the first in this order."""

    NIXL = "nixl"
    """By RDMA into the receive buffer, then by one of the next two paths."""
    ENGINE = "engine_loads"
    """The engine loaded it from the encoder's memory."""
    REQUEST = "in_request"
    """It was sent from the encoder's memory with vLLM's request."""
    OBJECT_STORE = "object_store"
    """It was sent from Ray's object store with vLLM's request."""
    PREFIX = "prefix_cache"
    """It was not transferred: vLLM's prefix cache covers it."""


class NotEncodedError(RuntimeError):
    """An encoder failed to encode an image, or the embedding is no longer at its last known location. The ingress has
    the same reference to the encoder's answer and knows the reason."""

    def __init__(self, image: int) -> None:
        """`image`: index of the image in the request."""
        super().__init__(f"image {image} was not encoded")
        self.image = image


class SlotState(Enum):
    PENDING = auto()
    """The encoder has not answered, or a lease is being acquired."""
    REJECTED = auto()
    """The encoder refused the image."""
    BY_VALUE = auto()
    """The embedding was received through the object store."""
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
    """Memory from which embeddings are read: one encoder's, or the RDMA receive buffer."""

    client: ShmClient | ReceiveBuffer
    in_engine: bool
    """Whether all workers of the engine have mapped it."""
    num_leases: int = 0
    """Leases that are held or being acquired, including those granted to the engine."""


@dataclass
class EmbeddingSlot:
    """State of one image of a request."""

    state: SlotState = SlotState.PENDING
    image: Image | None = None
    """The encoder's answer, or the last known location; None before that."""
    lease: EmbeddingLease | None = None
    """Set once LEASED, as is `peer`."""
    peer: Peer | None = None
    engine_lease: str = ""
    """Name of the engine's lease once GRANTED."""

    @property
    def is_leased(self) -> bool:
        return self.state in (SlotState.LEASED, SlotState.GRANTED)

    @property
    def in_engine(self) -> bool:
        """Whether the engine can load the embedding."""
        return self.is_leased and self.peer is not None and self.peer.in_engine


@dataclass
class ReceivedEmbeddings:
    """All images of one request. Pass it to `EmbeddingReceiver.close` when the request has ended or failed."""

    slots: list[EmbeddingSlot] = field(default_factory=list)
    engine_loads: bool = False
    """Whether the engine loads all embeddings by leases; otherwise all are sent with vLLM's request."""
    can_skip: bool = False
    """Whether this and later requests may skip unavailable embeddings, which vLLM's prefix cache may cover."""
    transfer_s: float | None = None
    """Seconds from when the last embedding was ready until all were received; None without embeddings."""

    @property
    def images(self) -> list[Image]:
        """Answers of encoders or last known locations, complete once all are received."""
        return [slot.image for slot in self.slots if slot.image is not None]

    @property
    def has_rejected(self) -> bool:
        return any(slot.state is SlotState.REJECTED for slot in self.slots)

    @property
    def skipped(self) -> dict[str, int]:
        """Index of the first image of each skipped embedding, by digest."""
        found: dict[str, int] = {}
        for number, slot in enumerate(self.slots):
            if slot.state is SlotState.SKIPPED and isinstance(slot.image, SharedEmbedding):
                found.setdefault(slot.image.digest, number)
        return found

    @property
    def num_skipped(self) -> int:
        return sum(slot.state is SlotState.SKIPPED for slot in self.slots)

    def list_transfers(self) -> list[tuple[EncodedImage | SharedEmbedding, TransferPath]]:
        """Returns each received embedding with its path."""
        return [
            (slot.image, self._get_path(slot.image))
            for slot in self.slots
            if slot.state is not SlotState.SKIPPED and isinstance(slot.image, EncodedImage | SharedEmbedding)
        ]

    @property
    def num_bytes(self) -> int:
        """Total bytes of the received embeddings."""
        return sum(image.num_bytes for image, _ in self.list_transfers())

    @property
    def path(self) -> TransferPath:
        paths = {path for _, path in self.list_transfers()}
        nothing = TransferPath.PREFIX if self.num_skipped else TransferPath.OBJECT_STORE
        return next((path for path in TransferPath if path in paths), nothing)

    def _get_path(self, image: EncodedImage | SharedEmbedding) -> TransferPath:
        if isinstance(image, EncodedImage):
            return TransferPath.OBJECT_STORE
        if image.remote is not None:
            return TransferPath.NIXL
        return TransferPath.ENGINE if self.engine_loads else TransferPath.REQUEST

    @property
    def locations(self) -> tuple[SharedEmbedding | None, ...]:
        """Location of each embedding in shared memory; PREFIX_CACHE_ONLY if only the engine may have it, else None."""
        return tuple(map(self._locate, self.slots))

    def _locate(self, slot: EmbeddingSlot) -> SharedEmbedding | None:
        image = slot.image
        if slot.is_leased and isinstance(image, SharedEmbedding) and image.remote is None:
            return image
        if not self.can_skip or not isinstance(image, EncodedImage | SharedEmbedding):
            return None
        if isinstance(image, EncodedImage):
            return image.to_shared(PREFIX_CACHE_ONLY)
        return dataclasses.replace(image, server=PREFIX_CACHE_ONLY, remote=None)

    def tensor(self, number: int, *, width: int, merge_size: int) -> Tensor:
        """Returns the embedding `[num_tokens, width]` for vLLM's request, or a placeholder `[num_tokens, 0]`.

        Raises WireError if it does not fit the model, TransferFailedError if its memory holds another embedding.
        """
        slot = self.slots[number]
        assert isinstance(slot.image, EncodedImage | SharedEmbedding)
        if isinstance(slot.image, EncodedImage):
            return slot.image.unpack(width=width, merge_size=merge_size)
        slot.image.check(width=width, merge_size=merge_size)
        if slot.state is SlotState.SKIPPED:
            return torch.empty((slot.image.num_tokens, 0))
        assert slot.lease is not None
        try:
            embedding = slot.lease.tensor()
        except WrongEmbeddingError as error:
            raise TransferFailedError(str(error)) from error
        return embedding[:, :0] if self.engine_loads else embedding
