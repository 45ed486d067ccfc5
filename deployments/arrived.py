"""The embeddings of one request at the language model replica, and what may go wrong on their way there.

It must not know where they come from, nor of HTTP or of vLLM's requests.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from deployments.embedding_header import WrongEmbeddingError
from deployments.lending import Held
from deployments.replica_errors import TransferFailedError
from deployments.wire import NOWHERE, EncodedImage, ImageRefused, SharedEmbedding

Image = EncodedImage | SharedEmbedding | ImageRefused


class Way(Enum):
    """How an embedding came to the engine."""

    ENGINE = "engine_loads"
    """The engine copied it from the encoder's memory."""
    REQUEST = "in_request"
    """From the encoder's memory into vLLM's request."""
    NIXL = "nixl"
    """Read from the encoder's memory on another host, then as one of the two above."""
    OBJECT_STORE = "object_store"
    """From Ray's object store into vLLM's request."""
    PREFIX = "prefix_cache"
    """Not at all: vLLM had in its prefix cache what comes of it."""
    LOCAL = "local"
    """Encoded where the language model is, and handed over in vLLM's request."""


def encoded_here(image: Image) -> bool:
    """Whether the language model replica has encoded it by itself."""
    return isinstance(image, EncodedImage) and image.timings.local


class NotEncodedError(RuntimeError):
    """An encoder has failed at an image; why is with whoever called it, who has the same reference. Or the image's
    embedding is not where it lay lately."""

    def __init__(self, image: int) -> None:
        """`image`: which of the request's."""
        super().__init__(f"image {image} was not encoded")
        self.image = image


@dataclass
class Arrived:
    """The embeddings of one request. `close` it when the request has ended, whatever became of it."""

    images: list[Image] = field(default_factory=list)
    held: dict[int, Held] = field(default_factory=dict)
    """By the image's number."""
    leases: dict[int, str] = field(default_factory=dict)
    """Likewise, where the engine loads by itself: all of them or none, once everything has arrived."""
    retired: dict[int, str] = field(default_factory=dict)
    """Leases that were given while others were on their way, of a request that the engine is not to load for."""
    unsent: set[int] = field(default_factory=set)
    """Images whose embeddings are nowhere near, in the hope that vLLM's prefix cache covers them."""
    prefix_cached: bool = False
    """Whether a later request may come without the embeddings."""

    @property
    def engine_loads(self) -> bool:
        return bool(self.leases)

    @property
    def num_bytes(self) -> int:
        """Of all that has arrived."""
        return sum(
            image.num_bytes
            for number, image in enumerate(self.images)
            if not isinstance(image, ImageRefused) and number not in self.unsent
        )

    @property
    def unsent_by_digest(self) -> dict[str, int]:
        """The image of each embedding that is not there."""
        images = ((number, self.images[number]) for number in sorted(self.unsent, reverse=True))
        return {image.digest: number for number, image in images if isinstance(image, SharedEmbedding)}

    @property
    def read_from(self) -> tuple[SharedEmbedding | None, ...]:
        """Where in shared memory each lies, until further notice; NOWHERE for what only the engine may have."""
        return tuple(map(self._read_from, range(len(self.images)), self.images))

    def _read_from(self, number: int, image: Image) -> SharedEmbedding | None:
        if number in self.held and isinstance(image, SharedEmbedding) and image.remote is None:
            return image
        if not self.prefix_cached or isinstance(image, ImageRefused):
            return None
        if isinstance(image, EncodedImage):
            return image.lent_by(NOWHERE)
        return dataclasses.replace(image, lender=NOWHERE, remote=None)

    @property
    def way(self) -> Way:
        """Of those that lie in shared memory, or of all where none does."""
        if self.unsent and not self.held:
            return Way.PREFIX
        if any(held.image.remote is not None for held in self.held.values()):
            return Way.NIXL
        if self.engine_loads:
            return Way.ENGINE
        if self.held:
            return Way.REQUEST
        return Way.LOCAL if any(map(encoded_here, self.images)) else Way.OBJECT_STORE

    def tensor(self, number: int, image: EncodedImage | SharedEmbedding, *, width: int, merge_size: int) -> Tensor:
        """What vLLM gets with the request: the embedding `[num_tokens, width]`, or one without columns in its place.

        Raises WireError for an embedding that does not fit the model, TransferFailedError for another one's bytes.
        """
        if isinstance(image, EncodedImage):
            return image.unpack(width=width, merge_size=merge_size)
        image.check(width=width, merge_size=merge_size)
        if number in self.unsent:
            return torch.empty((image.num_tokens, 0))
        try:
            found = self.held[number].tensor()
        except WrongEmbeddingError as error:
            raise TransferFailedError(str(error)) from error
        return found[:, :0] if self.engine_loads else found
