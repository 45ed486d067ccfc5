"""Keys for tensors in one LLM replica: unguessable, for one use, and the only media that vLLM gets.

A request body refers to an embedding by its key, which vLLM's media connector looks up here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class UnknownKeyError(ValueError):
    """The key was never issued, was used already, or was withdrawn. vLLM answers a ValueError with status 400."""


class FetchRefusedError(ValueError):
    """vLLM tried to fetch media itself."""


class KeyStore:
    """Tensors by key. Used on vLLM's event loop and its media threads; dict operations are atomic."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._tensors)

    def put(self, key: str, tensor: torch.Tensor) -> None:
        if key in self._tensors:
            raise ValueError(f"media key {key!r} is already in use")
        self._tensors[key] = tensor

    def pop(self, key: str) -> torch.Tensor:
        """Returns the tensor and removes its key. Raises UnknownKeyError."""
        tensor = self._tensors.pop(key, None)
        if tensor is None:
            raise UnknownKeyError("the request names an embedding that does not exist")
        return tensor

    def discard(self, keys: Iterable[str]) -> None:
        """Removes keys that were not taken."""
        for key in keys:
            self._tensors.pop(key, None)


class KeyedMediaConnector:
    """Replaces vLLM's MediaConnector: returns image embeddings by key and refuses everything else.

    Deliberately not a subclass: it must not inherit what vLLM's own connector fetches in later versions.
    """

    store: KeyStore

    def __init__(self, **_settings: object) -> None:
        """Ignores vLLM's settings for fetching media."""

    def fetch_image_embedding(self, data: str) -> torch.Tensor:
        return self.store.pop(data)

    async def fetch_image_embedding_async(self, data: str) -> torch.Tensor:
        return self.store.pop(data)

    def _refuse(self, *_args: object, **_kwargs: object) -> torch.Tensor:
        raise FetchRefusedError("media can only be sent as image_url parts of chat messages")

    async def _refuse_async(self, *_args: object, **_kwargs: object) -> torch.Tensor:
        return self._refuse()

    load_from_url = fetch_image = fetch_video = fetch_audio = fetch_video_embedding = fetch_audio_embedding = _refuse
    load_from_url_async = fetch_image_async = fetch_video_async = fetch_audio_async = _refuse_async
    fetch_video_embedding_async = fetch_audio_embedding_async = _refuse_async


def make_connector_class(store: KeyStore) -> type[KeyedMediaConnector]:
    """Returns a connector class bound to `store`; vLLM creates an instance for every request."""
    return type("BoundMediaConnector", (KeyedMediaConnector,), {"store": store})
