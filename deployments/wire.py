"""The values that travel between deployments: an image on its way to an encoder, an embedding on its way to vLLM.

Everything here is a plain value that Ray can ship without copying its bytes twice. This module must not know how images
are decoded or encoded, nor anything of HTTP or vLLM.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from encoder.image_size import PixelBounds
from encoder.run_counts import Ran

if TYPE_CHECKING:  # what only passes these values on does not load it
    import torch

_BITS = {"bfloat16": np.uint16, "float32": np.float32}
"""By the embedding's dtype: how numpy can hold it."""


class WireError(ValueError):
    """An embedding whose header and bytes disagree; says which field and both values."""


@dataclass(frozen=True)
class ImageJob:
    """One image to encode."""

    data: bytes
    """The file as the client sent it: JPEG, PNG, …"""
    bounds: PixelBounds | None
    """Pixel bounds asked for; None takes the checkpoint's own."""
    digest: str
    """64 hex characters; keys the caches."""
    identity: str
    """Of the encoder that the digest was made for; another encoder refuses the job."""
    size: tuple[int, int]
    """Upright width and height in pixels, as the file's header states them."""
    num_tokens: int
    """Visual tokens that it comes to: what it is to encode."""
    tokens_before: int = 0
    """Of the images before it in its request: a large request's later images yield to small requests by as much."""
    read_on: tuple[str, ...] = ()
    """The hosts whose language models may get the embedding (`packets.host_name`), where shared memory is wanted."""
    pulled: bool = False
    """The language models read from encoders on other hosts."""


@dataclass(frozen=True)
class EncodeTimings:
    """Where an image's time went, in milliseconds, and when it was ready (seconds since the epoch)."""

    preprocess_ms: float
    queue_ms: float
    encode_ms: float
    ready_at_s: float
    cached: bool
    replica: str = ""
    """Serve's name of the encoder replica; empty outside of Serve."""
    ran: Ran | None = None
    """How the batch ran that it was encoded in, where that is known."""
    local: bool = False
    """Whether the language model replica encoded it by itself."""


@dataclass(frozen=True)
class EncodedImage:
    """An embedding in host memory with a header that its receiver checks."""

    digest: str
    grid_thw: tuple[int, int, int]
    dtype: str
    """ "bfloat16" or "float32"."""
    bits: npt.NDArray[np.generic]
    """`[num_tokens, width]`: float32 as it is, bfloat16 as uint16, which numpy can hold."""
    timings: EncodeTimings

    @property
    def num_bytes(self) -> int:
        return self.bits.nbytes

    @property
    def num_tokens(self) -> int:
        return int(self.bits.shape[0])

    @classmethod
    def pack(
        cls, tokens: torch.Tensor, grid_thw: tuple[int, int, int], digest: str, timings: EncodeTimings
    ) -> EncodedImage:
        """From `tokens` `[num_tokens, width]` in host memory."""
        import torch

        dtype = str(tokens.dtype).removeprefix("torch.")
        if dtype not in _BITS:
            raise WireError(f"embedding dtype {dtype!r} cannot travel; known: {', '.join(_BITS)}")
        bits = tokens.contiguous().view(torch.uint16 if dtype == "bfloat16" else tokens.dtype)
        return cls(digest, grid_thw, dtype, bits.numpy(), timings)

    def lent_by(self, lender: str) -> SharedEmbedding:
        """What stands for it where it lies in the lender's shared memory."""
        rows, width = self.bits.shape
        return SharedEmbedding(self.digest, self.grid_thw, self.dtype, (rows, width), self.timings, lender)

    def unpack(self, *, width: int, merge_size: int) -> torch.Tensor:
        """`[num_tokens, width]` in the dtype of the header, sharing memory with `bits`.

        Raises:
            WireError: shape, dtype, width or grid are not what the language model takes. A wrong width would kill its
                engine.
        """
        if not isinstance(self.bits, np.ndarray) or not self.bits.flags.c_contiguous:
            raise WireError(f"embedding bits are {type(self.bits).__name__}, expected a contiguous array")
        _check(self.dtype, self.bits.shape, self.grid_thw, width=width, merge_size=merge_size)
        if self.bits.dtype != _BITS[self.dtype]:
            expected = np.dtype(_BITS[self.dtype])
            raise WireError(f"embedding bits are {self.bits.dtype}, expected {expected} for {self.dtype}")
        import torch

        with warnings.catch_warnings():
            # Memory of the object store is read-only; vLLM only reads it, and a copy would cost tens of megabytes.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(self.bits).view(_torch_dtype(self.dtype))


@dataclass(frozen=True)
class RemotePlace:
    """Where another host's language model reads an embedding, once."""

    introduction: bytes
    """Of the encoder's process, for `RemoteMemory.read`."""
    address: int
    """Of the embedding's header there."""
    lease: bytes
    """What the reader tells at its end."""


NOWHERE = ""
"""The lender of an embedding that only vLLM's prefix cache may make up for."""


@dataclass(frozen=True)
class SharedEmbedding:
    """An embedding that waits in shared memory of the encoder's host. Whoever wants it asks its lender, or reads it
    from another host."""

    digest: str
    grid_thw: tuple[int, int, int]
    dtype: str
    """ "bfloat16" or "float32"."""
    shape: tuple[int, int]
    """Tokens, width."""
    timings: EncodeTimings
    lender: str
    """Address for `packets.connect`, on the encoder's host, or NOWHERE."""
    remote: RemotePlace | None = None
    """Where it is lent to one reader of another host."""

    @property
    def num_tokens(self) -> int:
        return self.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * np.dtype(_BITS[self.dtype]).itemsize

    def check(self, *, width: int, merge_size: int) -> None:
        """Raises WireError as `EncodedImage.unpack` does."""
        _check(self.dtype, self.shape, self.grid_thw, width=width, merge_size=merge_size)


def tensor_of_bytes(flat: torch.Tensor, dtype: str, shape: tuple[int, int]) -> torch.Tensor:
    """`shape` in `dtype`, sharing memory with `flat`, uint8 `[num_bytes]`."""
    return flat.view(_torch_dtype(dtype)).view(shape)


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def _check(dtype: object, shape: object, grid: object, *, width: int, merge_size: int) -> None:
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise WireError(f"embedding dtype {dtype!r} is unknown; known: {', '.join(_BITS)}")
    if not isinstance(grid, tuple) or [type(side) for side in grid] != [int] * 3:
        raise WireError(f"grid_thw {grid!r} is not three integers")
    t, h, w = grid
    if min(t, h, w) < 1 or h % merge_size or w % merge_size:
        raise WireError(f"grid_thw {grid} is not positive multiples of the merge size {merge_size}")
    expected = (t * h * w // merge_size**2, width)
    if shape != expected:
        raise WireError(f"embedding shape {shape} does not fit grid {grid}: expected {expected}")


@dataclass(frozen=True)
class ImageRefused:
    """The encoder's answer to an image it cannot take: a value, so that one bad image fails only its own request."""

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
    joined: bool = False
    """Whether the answer's head may bring the body's beginning: an ingress of a version before it does not ask."""


@dataclass(frozen=True)
class ImagePlace:
    """Where the request body names an image, by two keys that work once."""

    tokens_key: str
    grid_key: str
    image: int
    """Which of the embeddings that come with the request the keys stand for."""
    label: str
    """For error messages: "image 2 of 3"."""
    grid_thw: tuple[int, int, int] | None = None
    """What the embedding's is going to be, by the file's header; an ingress of a version before it does not tell."""


@dataclass(frozen=True)
class Accepted:
    """What a language model replica sends back first: the request and its embeddings have arrived."""

    reads_on: str | None = None
    """Its host, where it takes embeddings from shared memory of that host."""
    read_from: tuple[SharedEmbedding | None, ...] = ()
    """Of each of the request's embeddings, where in shared memory it lies; None for one that came otherwise."""
    pulls: bool = False
    """Whether it reads from encoders on other hosts."""


@dataclass(frozen=True)
class NotEncoded:
    """What a language model replica sends instead of all else, where an encoder has failed at an image."""

    image: int
    """Which of the embeddings, as in ImagePlace."""


@dataclass(frozen=True)
class ResponseHead:
    """What a language model replica sends back next; body chunks (bytes) follow."""

    status: int
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""
    """What was there of the body when the head was sent, where that was asked for."""
    complete: bool = False
    """Whether that is all of it: the end of the answer need not be waited for."""


Piece = Accepted | NotEncoded | ResponseHead | bytes
"""Of an answer of a language model replica: first Accepted, or NotEncoded and nothing more, a head, body chunks."""
