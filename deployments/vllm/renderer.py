"""Items by reference in the renderers of vLLM 0.26 to 0.33: stand-ins for media, the connector that returns them, and
the processor cache that contains their headers.

A stand-in is never processed as the media: vLLM finds its header in the cache, or the request fails. An engine with its
own tower gets decoded images instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from PIL import Image
from vllm.multimodal.cache import BaseMultiModalProcessorCache
from vllm.multimodal.media import MediaWithBytes
from vllm.utils.cache import CacheInfo

from deployments.vllm.headers import CachedItem, cache_item
from deployments.vllm.references import DecodedImages, FetchRefusedError, References, UnknownReferenceError


class NamedImage(MediaWithBytes):  # type: ignore[misc]  # untyped: vLLM
    """An image that vLLM's caches know by its digest."""

    def __init__(self, digest: str, image: Image.Image) -> None:
        # vLLM passes the image on alone for modality "vision_chunk". No file that PIL opens has this attribute.
        setattr(image, "digest", digest)  # noqa: B010
        super().__init__(image, digest.encode())
        self.digest = digest


class ImageStandIn(NamedImage):
    def __init__(self, digest: str) -> None:
        super().__init__(digest, Image.new("RGB", (1, 1)))


class VideoStandIn(tuple[npt.NDArray[np.uint8], dict[str, Any]]):
    """One frame of one pixel, and no metadata."""

    digest: str

    @classmethod
    def of(cls, digest: str) -> VideoStandIn:
        stand_in = cls((np.zeros((1, 1, 1, 3), np.uint8), {}))
        stand_in.digest = digest
        return stand_in


class AudioStandIn(np.ndarray[tuple[int], np.dtype[np.float32]]):
    """One sample without a sampling rate, which vLLM does not resample."""

    digest: str

    @classmethod
    def of(cls, digest: str) -> AudioStandIn:
        stand_in = np.zeros(1, np.float32).view(cls)
        stand_in.digest = digest
        return stand_in


class _Connector:
    """Replaces vLLM's MediaConnector, and refuses everything that a subclass does not return.

    Deliberately not a subclass of it: it must not inherit what vLLM's own connector fetches in later versions.
    """

    async def fetch_image_async(self, image_url: str, **_options: object) -> NamedImage:
        image: NamedImage = self.fetch_image(image_url)
        return image

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as any method of MediaConnector
        if name.startswith("__"):  # of Python's protocols, such as copying
            raise AttributeError(name)
        return _refuse_async if name.endswith("_async") else _refuse


def _refuse(*_: object, **_options: object) -> Any:  # noqa: ANN401
    raise FetchRefusedError("media can only be sent as image, video and audio parts of messages")


async def _refuse_async(*_: object, **_options: object) -> Any:  # noqa: ANN401
    _refuse()


class ReferenceConnector(_Connector):
    """Returns stand-ins by key."""

    def __init__(self, references: References, **_settings: object) -> None:
        """Ignores vLLM's settings for fetching media."""
        self._references = references

    def fetch_image(self, image_url: str, **_options: object) -> NamedImage:
        return ImageStandIn(self._digest(image_url, "image"))

    def fetch_video(self, video_url: str, **_options: object) -> VideoStandIn:
        return VideoStandIn.of(self._digest(video_url, "video"))

    def fetch_audio(self, audio_url: str, **_options: object) -> AudioStandIn:
        """vLLM puts the key of an `input_audio` part into a data URL."""
        return AudioStandIn.of(self._digest(audio_url.rpartition(";base64,")[2], "audio"))

    async def fetch_video_async(self, video_url: str, **_options: object) -> VideoStandIn:
        return self.fetch_video(video_url)

    async def fetch_audio_async(self, audio_url: str, **_options: object) -> AudioStandIn:
        return self.fetch_audio(audio_url)

    def _digest(self, key: str, modality: str) -> str:
        header = self._references.header(key)
        if header.modality not in (modality, "vision_chunk"):
            raise UnknownReferenceError(f"the request names an item of modality {header.modality!r} as {modality!r}")
        return header.digest


class ImageConnector(_Connector):
    """Returns decoded images by key, for an engine with its own tower."""

    def __init__(self, images: DecodedImages, **_settings: object) -> None:
        self._images = images

    def fetch_image(self, image_url: str, **_options: object) -> NamedImage:
        if (found := self._images.get(image_url)) is None:
            raise UnknownReferenceError("the request names an image that it does not have")
        return NamedImage(*found)


def make_connector(items: References | DecodedImages) -> partial[ReferenceConnector] | partial[ImageConnector]:
    """Returns what vLLM calls for every request to create its connector to `items`."""
    return partial(ReferenceConnector, items) if isinstance(items, References) else partial(ImageConnector, items)


class HeaderCache(BaseMultiModalProcessorCache):  # type: ignore[misc]
    """vLLM's processor cache, which contains the items of the requests in flight and nothing else. A miss fails the
    request: vLLM would process the stand-in."""

    def __init__(self, references: References, processor: Any = None) -> None:  # noqa: ANN401 - vLLM's processors
        """`processor`: of the model, which computes the prompts of videos of vitray's own towers."""
        super().__init__()
        self._references, self._processor = references, processor

    def is_cached_item(self, mm_hash: str) -> bool:
        """Raises UnknownReferenceError on a miss: vLLM runs its processor on misses before it asks for the item."""
        self._references.header_by_digest(mm_hash)
        return True

    def get_and_update_item(self, mm_item: object, mm_hash: str) -> CachedItem:
        if mm_item is not None:
            raise FetchRefusedError("the language model replica processes no media")
        return cache_item(self._references.header_by_digest(mm_hash), self._processor)

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Does nothing: no item is evicted while a request refers to it."""

    def clear_cache(self) -> None:
        """Does nothing: vLLM clears its caches after a warm-up and on reset."""

    def make_stats(self, *, delta: bool = False) -> CacheInfo:
        return CacheInfo(hits=0, total=0)


def mm_uuids(mm_data: Mapping[str, Any], *_: object) -> dict[str, list[str]]:
    """Replaces `BaseRenderer._process_mm_uuids`: vLLM's identifier of each item is its digest. Raises FetchRefusedError
    for items that have none, such as embeddings, and for `null` items with the client's own identifier."""
    return {
        modality: [_digest_of(item) for item in (items if isinstance(items, list) else [items])]
        for modality, items in mm_data.items()
    }


def _digest_of(item: object) -> str:
    item = item.get("image") if isinstance(item, dict) else item  # of modality "vision_chunk"
    known = isinstance(item, NamedImage | VideoStandIn | AudioStandIn | Image.Image)
    digest = getattr(item, "digest", None) if known else None
    if isinstance(digest, str):
        return digest
    raise FetchRefusedError("media can only be sent as image, video and audio parts of messages")


def _refuse_processing(*_args: object, **_kwargs: object) -> NoReturn:
    """Replaces `_apply_hf_processor`, by which some models' processors bypass the cache."""
    raise FetchRefusedError("the language model replica processes no media; this model takes fewer items per request")


def install_references(renderer: Any, items: References | DecodedImages) -> None:  # noqa: ANN401 - vLLM's BaseRenderer
    """Makes a renderer take items by reference only. Call it after vLLM's `init_app_state`, whose warm-up processes an
    image. Raises AttributeError if this vLLM lacks a member that is replaced."""
    _replace(renderer, "_process_mm_uuids", mm_uuids)
    if not isinstance(items, References):
        _send_all_items(renderer)
        return
    cache = HeaderCache(items, renderer.mm_processor)
    processors = [renderer.mm_processor]
    if hasattr(renderer, "_mm_processor_only_cache"):
        _replace(renderer, "_mm_processor_cache", cache)
        _replace(renderer, "_mm_processor_only_cache", cache)
    else:  # before vLLM 0.32 the processors own the caches
        processors += filter(None, [renderer._readonly_mm_processor])  # noqa: SLF001
        for processor in processors:
            _replace(processor, "cache", cache)
    for processor in processors:
        _replace(processor, "_apply_hf_processor", _refuse_processing)


def _send_all_items(renderer: Any) -> None:  # noqa: ANN401 - vLLM's BaseRenderer
    """Makes vLLM send the engine each item with each request. With its own cache, it sends an image once and later only
    its hash, also if a count of tokens alone has seen the image; such a request fails with status 500."""
    if hasattr(renderer, "_mm_processor_only_cache"):
        _replace(renderer, "_mm_processor_cache", renderer._mm_processor_only_cache)  # noqa: SLF001
    elif renderer._readonly_mm_processor is not None:  # noqa: SLF001 - before vLLM 0.32
        _replace(renderer.mm_processor, "cache", renderer._readonly_mm_processor.cache)  # noqa: SLF001


def _replace(owner: object, name: str, value: object) -> None:
    if not hasattr(owner, name):
        raise AttributeError(f"this vLLM's {type(owner).__name__} has no {name}")
    setattr(owner, name, value)
