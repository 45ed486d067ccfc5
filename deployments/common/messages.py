"""Messages between deployments: images sent to an encoder, embeddings sent to vLLM, requests and responses.

All are plain values that Ray serializes without a second copy of their bytes.
"""

from __future__ import annotations

import secrets
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from encoder.images.size import PixelBounds
from encoder.packing.run_counts import RunRecord

if TYPE_CHECKING:  # processes that only forward these values do not load torch
    import torch

KEY_PREFIX = "vitray:"
_BITS = {"bfloat16": np.uint16, "float32": np.float32}
"""The numpy dtype that holds an embedding, by the embedding's dtype."""


def new_key() -> str:
    """Returns a key of 128 random bits for one reference to an item in an LLM replica."""
    return KEY_PREFIX + secrets.token_urlsafe(16)


class WireError(ValueError):
    """The header and the bytes of an embedding disagree; the message names the field and both values."""


@dataclass(frozen=True)
class ImageJob:
    """One image to encode."""

    data: bytes
    """The image file as the client sent it: JPEG, PNG, …"""
    bounds: PixelBounds | None
    """Requested pixel bounds; None: the checkpoint's."""
    digest: str
    """64 hexadecimal characters, the key of the caches."""
    identity: str
    """Identity of the encoder that the digest was computed for; an encoder with another identity rejects the job."""
    size: tuple[int, int]
    """Width and height of the upright image in pixels, from the file header."""
    num_tokens: int
    """Visual tokens of the image, which are the cost of encoding it."""
    tokens_before: int = 0
    """Visual tokens of the images before it in its request; they delay it in the fair queue
    (`fair_queue.virtual_arrival_s`)."""
    reader_hosts: tuple[str, ...] = ()
    """Hosts (`unix_socket.host_id`) whose LLM replicas may receive the embedding, if shared memory is to be used."""
    remote_read: bool = False
    """Whether the LLM replicas read embeddings from encoders on other hosts."""
    tower: str = ""
    """Fingerprint of the encoder's tower, which LLM replicas of the same checkpoint expect
    (`EncoderIdentity.tower`)."""


@dataclass(frozen=True)
class EncodeTimings:
    """Durations of an image's stages in milliseconds, and when it was ready, in seconds since the epoch."""

    preprocess_ms: float
    queue_ms: float
    encode_ms: float
    ready_at_s: float
    cached: bool
    replica: str = ""
    """Serve's name of the encoder replica; empty outside Serve."""
    ran: RunRecord | None = None
    """How its batch ran; None if unknown."""


@dataclass(frozen=True)
class EncodedImage:
    """An embedding in host memory, with a header that the receiver checks."""

    digest: str
    dtype: str
    """ "bfloat16" or "float32"."""
    bits: npt.NDArray[np.generic]
    """`[num_tokens, width]`: float32, or bfloat16 viewed as uint16, because numpy has no bfloat16."""
    timings: EncodeTimings

    @property
    def num_bytes(self) -> int:
        return self.bits.nbytes

    @property
    def num_tokens(self) -> int:
        return int(self.bits.shape[0])

    @property
    def shape(self) -> tuple[int, int]:
        """(tokens, width)."""
        rows, width = self.bits.shape
        return rows, width

    @classmethod
    def pack(cls, tokens: torch.Tensor, digest: str, timings: EncodeTimings) -> EncodedImage:
        """Packs `tokens`, `[num_tokens, width]` in host memory, without a copy if contiguous. Raises WireError for
        another dtype than bfloat16 and float32."""
        import torch

        dtype = str(tokens.dtype).removeprefix("torch.")
        if dtype not in _BITS:
            raise WireError(f"embedding dtype {dtype!r} cannot travel; known: {', '.join(_BITS)}")
        bits = tokens.contiguous().view(torch.uint16 if dtype == "bfloat16" else tokens.dtype)
        return cls(digest, dtype, bits.numpy(), timings)

    def to_shared(self, server: str) -> SharedEmbedding:
        """Returns the location of this embedding in the shared memory of `server`."""
        return SharedEmbedding(self.digest, self.dtype, self.shape, self.timings, server)

    def check(self, shape: tuple[int, int]) -> None:
        """Raises WireError if the embedding is not what the language model expects: `shape` is (rows, width). A wrong
        width would end its engine."""
        if not isinstance(self.bits, np.ndarray) or not self.bits.flags.c_contiguous:
            raise WireError(f"embedding bits are {type(self.bits).__name__}, expected a contiguous array")
        _check(self.dtype, self.bits.shape, shape)
        if self.bits.dtype != _BITS[self.dtype]:
            expected = np.dtype(_BITS[self.dtype])
            raise WireError(f"embedding bits are {self.bits.dtype}, expected {expected} for {self.dtype}")

    def unpack(self) -> torch.Tensor:
        """Returns `[num_tokens, width]` in `dtype`; the tensor shares memory with `bits`."""
        import torch

        with warnings.catch_warnings():
            # Object store memory is read-only. vLLM only reads it, and a copy would cost tens of megabytes.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(self.bits).view(_torch_dtype(self.dtype))


@dataclass(frozen=True)
class RemoteLocation:
    """Where an LLM replica on another host reads an embedding, once."""

    agent_metadata: bytes
    """NIXL agent metadata of the encoder's process, for `NixlMemory.read`."""
    address: int
    """Address of the embedding's header in that process."""
    lease: bytes
    """Notification that the reader sends after the read; it releases the lease."""


NOT_STORED = ""
"""Stands for a server's address: the embedding is in no encoder's shared memory."""


@dataclass(frozen=True)
class SharedEmbedding:
    """Location of an embedding in shared memory of the encoder's host. Readers there acquire a lease from its server; a
    reader on another host uses `remote`."""

    digest: str
    dtype: str
    """ "bfloat16" or "float32"."""
    shape: tuple[int, int]
    """(tokens, width)."""
    timings: EncodeTimings
    server: str
    """Address for `same_host.ShmClient` on the encoder's host, or NOT_STORED."""
    remote: RemoteLocation | None = None
    """Location for one reader on another host."""

    @property
    def num_tokens(self) -> int:
        return self.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * np.dtype(_BITS[self.dtype]).itemsize

    def check(self, shape: tuple[int, int]) -> None:
        """Raises WireError under the conditions of `EncodedImage.check`."""
        _check(self.dtype, self.shape, shape)


def tensor_of_bytes(flat: torch.Tensor, dtype: str, shape: tuple[int, int]) -> torch.Tensor:
    """Views `flat`, uint8 `[num_bytes]`, as `shape` in `dtype`; the result shares its memory."""
    return flat.view(_torch_dtype(dtype)).view(shape)


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def _check(dtype: object, shape: object, expected: tuple[int, int]) -> None:
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise WireError(f"embedding dtype {dtype!r} is unknown; known: {', '.join(_BITS)}")
    if shape != expected:
        raise WireError(f"embedding shape {shape} is not the expected {expected}")


@dataclass(frozen=True)
class Deferred:
    """An embedding that is sent only if vLLM's scheduler asks for it: the prefix cache should cover its image."""

    location: SharedEmbedding | None = None
    """Its last known location, from which the LLM replica reads it then."""


@dataclass(frozen=True)
class ImageRefused:
    """The encoder rejected an image: a returned value, so that one bad image fails only its own request."""

    message: str
    """Safe to show to the client."""


@dataclass(frozen=True)
class HttpRequest:
    """A request for vLLM's application."""

    method: str
    path: str
    query_string: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    root_path: str = ""
    body_in_head: bool = False
    """Whether the response head may carry the first body chunk. An ingress of an older version does not set it."""
    early_prefill: bool = False
    """Whether the request may be sent for early prefill, before its images are encoded; the reply may be TooEarly."""
    cache_salt: str | None = None
    """Salt of the prompt in vLLM's prefix cache, which the body holds as well; None for a client without a tenant."""


@dataclass(frozen=True)
class ItemReference:
    """A reference to an item in the request body, where `key` is its URL."""

    key: str
    """Key of this reference, `new_key`, valid in one LLM replica until its request ends."""
    item: int
    """Index of the item among the headers and embeddings sent with the request."""
    label: str
    """For error messages: "image 2 of 3"."""


@dataclass(frozen=True)
class Accepted:
    """First message of an LLM replica: the request and its embeddings have arrived."""

    shm_host: str | None = None
    """Host of the replica, if it reads embeddings from the shared memory of that host."""
    locations: tuple[SharedEmbedding | None, ...] = ()
    """For each embedding of the request, its location in shared memory; None for one that was sent otherwise."""
    remote_read: bool = False
    """Whether the replica reads from encoders on other hosts."""


@dataclass(frozen=True)
class NotEncoded:
    """The only message of an LLM replica when an encoder failed on an image, or when the engine needs embeddings that
    were deferred and are stored nowhere."""

    images: tuple[int, ...]
    """Indices of the embeddings, as in ItemReference."""


@dataclass(frozen=True)
class TooEarly:
    """The only message of an LLM replica that cannot accept another early prefill."""


@dataclass(frozen=True)
class ResponseHead:
    """Second message of an LLM replica; body chunks (bytes) follow."""

    status: int
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""
    """The part of the body that was available when the head was sent, if `HttpRequest.body_in_head` asked for it."""
    complete: bool = False
    """Whether `body` is the whole body; no end-of-stream message needs to be awaited then."""


Piece = Accepted | NotEncoded | TooEarly | ResponseHead | bytes
"""One message of an LLM replica's response: Accepted, a head, body chunks; or a single NotEncoded or TooEarly."""
