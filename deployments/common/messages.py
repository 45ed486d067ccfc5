"""Messages between deployments: images and sounds sent to an encoder, embeddings sent to vLLM, requests and responses.

All are plain values that Ray serializes without a second copy of their bytes.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from encoder.images.size import PixelBounds
from encoder.item_header import ChunkHeader, ItemHeader
from encoder.packing.run_counts import RunRecord
from encoder.video.size import VideoChunk

if TYPE_CHECKING:  # processes that only forward these values do not load torch
    import torch
    from ray import ObjectRef

PROTOCOL_VERSION = 4
"""Version of what encoders and language models are called with and return, and of the transfer of embeddings. Each
change raises it: in a rolling update, an ingress calls only those of its own version."""
KEY_PREFIX = "vitray:"
NOT_STORED = ""
"""Stands for a server's address: the embedding is in private memory of the encoder replica."""
Shape = tuple[int | None, int]
"""Expected rows, None if the header with the embedding states them, and width of an embedding."""
_BITS = {"bfloat16": np.uint16, "float32": np.float32}
"""The numpy dtype that holds an embedding, by the embedding's dtype."""


def new_key() -> str:
    """Returns a key of 128 random bits for one reference to an item in an LLM replica."""
    return KEY_PREFIX + secrets.token_urlsafe(16)


class WireError(ValueError):
    """The header and the bytes of an embedding disagree; the message names the field and both values."""


@dataclass(frozen=True)
class VideoSampling:
    """How a request chooses a video's frames, as vLLM's `media_io_kwargs`; None leaves it to the model."""

    fps: float | None = None
    num_frames: int | None = None


MODEL_SAMPLING = VideoSampling()


@dataclass(frozen=True)
class ImageJob:
    """One image, sound or video to encode."""

    data: bytes
    """The file as the client sent it: JPEG, PNG, WAV, …"""
    bounds: PixelBounds | None
    """Requested pixel bounds; None: the checkpoint's."""
    digest: str
    """64 hexadecimal characters, the key of the caches."""
    identity: str
    """Identity of the encoder that the digest was computed for; an encoder with another identity rejects the job."""
    size: tuple[int, int]
    """Width and height of the upright image in pixels, from the file header; zeros for other media."""
    num_tokens: int
    """Visual tokens of the image, which are the cost of encoding it."""
    tokens_before: int = 0
    """Visual tokens of the images before it in its request; they delay it in the fair queue
    (`fair_queue.virtual_arrival_s`). Of all its other images if vLLM begins with the request only after the last."""
    tower: str = ""
    """Fingerprint of the encoder's tower, which LLM replicas of the same checkpoint expect
    (`EncoderIdentity.tower`)."""
    modality: str = "image"
    sampling: VideoSampling = MODEL_SAMPLING
    in_chunks: bool = False
    """Whether it is a video of vitray's own towers that is to be planned: other jobs encode it chunk by chunk."""
    chunk: ChunkOfVideo | None = None


@dataclass(frozen=True)
class StoredFile:
    """A file that is put into Ray's object store once, when it is first sent to a replica."""

    data: bytes

    @cached_property
    def ref(self) -> ObjectRef[bytes]:
        import ray

        return ray.put(self.data)


@dataclass(frozen=True)
class ChunkOfVideo:
    """The part of a video that a job encodes."""

    video: str
    """Digest of the whole video. All its jobs are routed by it, so that one decoder goes through the file once."""
    indices: tuple[int, ...]
    """Indices in the file of the video's sampled frames."""
    part: VideoChunk
    file: StoredFile | ObjectRef[bytes]
    """The file, which all jobs of the video share; a reference at the encoder. `ImageJob.data` is empty."""


@dataclass(frozen=True)
class PlannedVideo:
    """What an encoder has read in a video's container."""

    header: ItemHeader
    indices: tuple[int, ...]
    chunks: tuple[VideoChunk, ...]


@dataclass(frozen=True, slots=True)
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
    frames: tuple[int, int] | None = None
    """First and last of a video's sampled frames, counted from 1, that the embedding is of."""


@dataclass(frozen=True)
class EncodedImage:
    """An embedding in memory of its encoder replica."""

    digest: str
    dtype: str
    """ "bfloat16" or "float32"."""
    bits: npt.NDArray[np.generic]
    """`[num_tokens, width]`: float32, or bfloat16 viewed as uint16, because numpy has no bfloat16."""
    timings: EncodeTimings
    header: ItemHeader | ChunkHeader | None = None
    """The item's header; None if the ingress computes headers itself."""

    @property
    def num_bytes(self) -> int:
        return self.bits.nbytes

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

    def to_shared(
        self, server: str = NOT_STORED, tcp: str = "", remote: RemoteLocation | None = None
    ) -> SharedEmbedding:
        """Returns where readers find this embedding: the shared memory of `server`, the TCP server `tcp`."""
        return SharedEmbedding(self.digest, self.dtype, self.shape, self.timings, server, tcp, remote, self.header)


@dataclass(frozen=True)
class RemoteLocation:
    """Where an LLM replica on another host reads an embedding, once."""

    agent_metadata: bytes
    """NIXL agent metadata of the encoder's RDMA process, for `RdmaProcess.read`."""
    address: int
    """Address of the embedding's header in that process."""
    lease: bytes
    """Notification that the reader sends after the read; it releases the lease."""


@dataclass(frozen=True, slots=True)
class SharedEmbedding:
    """Where an embedding is: the encoder's answer, by which each reader chooses its path. On the encoder's host it
    acquires a lease on shared memory from `server`; else it reads from `tcp`, or from `remote`, if that is set."""

    digest: str
    dtype: str
    """ "bfloat16" or "float32"."""
    shape: tuple[int, int]
    """(tokens, width)."""
    timings: EncodeTimings
    server: str
    """Address for `same_host.ShmClient` on the encoder's host, which it names, or NOT_STORED."""
    tcp: str = ""
    """Address for `tcp_client.TcpClient`, `HOST:PORT`."""
    remote: RemoteLocation | None = None
    """Location for one read by RDMA."""
    header: ItemHeader | ChunkHeader | None = None
    """As in EncodedImage."""

    @property
    def num_tokens(self) -> int:
        return self.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * np.dtype(_BITS[self.dtype]).itemsize

    def check(self, shape: Shape) -> None:
        """Raises WireError if the embedding is not what the language model expects: `shape` is (rows, width), without
        rows if they are to be those of the header that came with it. A wrong width would end its engine."""
        if not isinstance(self.dtype, str) or self.dtype not in _BITS:
            raise WireError(f"embedding dtype {self.dtype!r} is unknown; known: {', '.join(_BITS)}")
        rows, width = shape
        if rows is None:
            if self.header is None:
                raise WireError("the embedding came without its header")
            rows = self.header.num_embeds
        if self.shape != (rows, width):
            raise WireError(f"embedding shape {self.shape} is not the expected {(rows, width)}")


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
    modality: str = "image"


@dataclass(frozen=True)
class Accepted:
    """First message of an LLM replica: the request and its embeddings have arrived."""

    locations: tuple[SharedEmbedding | None, ...] = ()
    """For each embedding of the request, its location in an encoder's shared memory; None for one that is not there."""


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
    """The part of the body that was available when the head was sent, at most a piece."""
    complete: bool = False
    """Whether `body` is the whole body; no end-of-stream message needs to be awaited then."""


Piece = Accepted | NotEncoded | TooEarly | ResponseHead | bytes
"""One message of an LLM replica's response: Accepted, a head, body chunks; or a single NotEncoded or TooEarly."""
