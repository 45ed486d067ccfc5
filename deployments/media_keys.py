"""Keys that stand for tensors inside one language model replica: unguessable, for one use, all the media vLLM gets.

A request body names an embedding by a key; vLLM's media connector asks here and nowhere else. This module must not know
of HTTP, Ray or the encoder.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

KEY_PREFIX = "vitray:"


class UnknownKeyError(ValueError):
    """A key that was never given out, was used already, or was withdrawn. vLLM answers a ValueError with status 400."""


class FetchRefusedError(ValueError):
    """vLLM tried to fetch media by itself."""


def new_key() -> str:
    """128 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(16)


class KeyStore:
    """Tensors by key. Used from vLLM's event loop and its media threads; dict operations are atomic."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._tensors)

    def put(self, key: str, tensor: torch.Tensor) -> None:
        if key in self._tensors:
            raise ValueError(f"media key {key!r} is already in use")
        self._tensors[key] = tensor

    def take(self, key: str) -> torch.Tensor:
        """The tensor, once."""
        tensor = self._tensors.pop(key, None)
        if tensor is None:
            raise UnknownKeyError("the request names an embedding that does not exist")
        return tensor

    def withdraw(self, keys: Iterable[str]) -> None:
        """Forgets keys that nobody took."""
        for key in keys:
            self._tensors.pop(key, None)


class KeyedMediaConnector:
    """Stands in for vLLM's MediaConnector: image embeddings by key, everything else refused.

    Deliberately not a subclass: what vLLM's own connector learns to fetch in a later version is not inherited.
    """

    store: KeyStore

    def __init__(self, **_settings: object) -> None:
        """vLLM passes settings of its own fetching, which does not take place here."""

    def fetch_image_embedding(self, data: str) -> torch.Tensor:
        return self.store.take(data)

    async def fetch_image_embedding_async(self, data: str) -> torch.Tensor:
        return self.store.take(data)

    def _refuse(self, *_args: object, **_kwargs: object) -> torch.Tensor:
        raise FetchRefusedError("media can only be sent as image_url parts of chat messages")

    async def _refuse_async(self, *_args: object, **_kwargs: object) -> torch.Tensor:
        return self._refuse()

    load_from_url = fetch_image = fetch_video = fetch_audio = fetch_video_embedding = fetch_audio_embedding = _refuse
    load_from_url_async = fetch_image_async = fetch_video_async = fetch_audio_async = _refuse_async
    fetch_video_embedding_async = fetch_audio_embedding_async = _refuse_async


def connector_class(store: KeyStore) -> type[KeyedMediaConnector]:
    """A connector bound to `store`; vLLM makes an instance for every request."""
    return type("BoundMediaConnector", (KeyedMediaConnector,), {"store": store})
