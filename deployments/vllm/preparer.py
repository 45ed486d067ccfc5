"""Decodes one item and runs vLLM's processor on it, in decode workers: the header, and the tower's inputs.

Answers to the parent process are JSON and vLLM's msgpack, never a pickle: a file that takes over its worker must not
reach the parent.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from pydantic import JsonValue

from deployments.vllm import import_shim
from encoder.images.load import MAX_PIXELS_DECODED, ImageError, load_rgb
from encoder.item_header import ItemHeader

logger = logging.getLogger(__name__)

MODALITIES = ("image", "audio")
"""Modalities whose files can be decoded here."""

VISION_CHUNK = "vision_chunk"
"""vLLM's modality for images and parts of videos of models that treat both alike, such as Kimi K2.5."""


class ItemError(ImageError):
    """An item cannot be decoded or processed; the text may be shown to a client."""


@dataclass(frozen=True)
class VllmInputs:
    """One prepared item."""

    header: ItemHeader
    inputs: bytes
    """The tower's inputs: vLLM's msgpack of a MultiModalKwargsItem."""

    @property
    def num_tokens(self) -> int:
        """Rows of the embedding, which are the cost of encoding the item."""
        return self.header.num_embeds

    def to_parts(self) -> tuple[bytes, bytes]:
        """Returns the header as JSON, and the inputs."""
        return msgspec.json.encode(self.header), self.inputs

    @classmethod
    def from_parts(cls, header: bytes, inputs: bytes) -> VllmInputs:
        """Raises ValueError if a worker sent anything else than `to_parts` returns."""
        return cls(msgspec.json.decode(header, type=ItemHeader), inputs)


class Preparer:
    """vLLM's processor of one checkpoint. For one thread.

    preparer = Preparer("gemma-3-4b-it")
    prepared = preparer.prepare(Path("cat.jpg").read_bytes(), "image", digest)
    prepared.header.num_embeds, prepared.inputs
    """

    def __init__(
        self,
        path: str | Path,
        engine_args: Mapping[str, JsonValue] | None = None,
        *,
        max_pixels_decoded: int = MAX_PIXELS_DECODED,
    ) -> None:
        """Loads configs and tokenizer, no weights.

        Raises:
            ValueError: `media_io_kwargs` has settings for images, which are decoded here and not by vLLM.
        """
        import_shim.activate()
        from vllm.engine.arg_utils import EngineArgs
        from vllm.multimodal import MULTIMODAL_REGISTRY
        from vllm.v1.serial_utils import MsgpackEncoder

        media_io: Any = (engine_args or {}).get("media_io_kwargs") or {}
        if "image" in media_io:
            raise ValueError(f"media_io_kwargs has settings for images, {media_io['image']}: remove them")
        arguments: dict[str, Any] = {**(engine_args or {}), "model": str(path)}
        self._processor = MULTIMODAL_REGISTRY.create_processor(EngineArgs(**arguments).create_model_config())
        self._encoder = MsgpackEncoder(size_threshold=2**62)  # one buffer, which contains every tensor
        self._audio_options = media_io.get("audio", {})
        self._max_pixels = max_pixels_decoded

    def prepare(self, data: bytes, modality: str, digest: str) -> VllmInputs:
        """Decodes and processes one item alone: some processors pad the items of a call to a common size.

        `data`: the file; its content determines the format. `digest`: digest of the embedding.

        Raises:
            ItemError, ImageError: the file cannot be decoded, or the model does not take it.
        """
        from vllm.multimodal.processing.context import TimingContext
        from vllm.multimodal.processing.inputs import ProcessorInputs

        from deployments.vllm.headers import declared_fields, header_of

        info = self._processor.info
        taken = info.get_supported_mm_limits()
        in_chunk = modality == "image" and VISION_CHUNK in taken
        if modality not in MODALITIES or not (in_chunk or modality in taken):
            raise ItemError(f"the model takes no {modality}")
        media = self._decode(data, modality)
        if in_chunk:
            modality, media = VISION_CHUNK, {"type": "image", "image": media, "uuid": None}
        try:
            items = info.parse_mm_data({modality: [media]})
            # `apply` would also look for the item's place in a prompt; there is no prompt here.
            result = self._processor._apply_hf_processor(  # noqa: SLF001 - checked per version
                ProcessorInputs([], items), TimingContext(enabled=False)
            )
        except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:
            logger.warning("vLLM's processor refused an item", exc_info=error)
            raise ItemError(f"the model's processor cannot process the {modality}") from error
        processed = result if hasattr(result, "prompt_updates") else result[1]  # a tuple before vLLM 0.32
        [inputs], [updates] = processed.kwargs[modality], processed.prompt_updates[modality]
        declared = declared_fields(self._processor, modality)
        [encoded] = self._encoder.encode(inputs)
        header = header_of(digest, modality, inputs, updates, declared, info.get_tokenizer())
        return VllmInputs(header, bytes(encoded))

    def _decode(self, data: bytes, modality: str) -> Any:  # noqa: ANN401 - an image, or samples with their rate
        """Returns what vLLM's own media loader would: `load_rgb` gives the same pixels, within bounds."""
        if modality == "image":
            return load_rgb(data, max_pixels_decoded=self._max_pixels)
        from vllm.multimodal.media.audio import AudioMediaIO

        try:
            return AudioMediaIO(**self._audio_options).load_bytes(data)
        except Exception as error:
            raise ItemError("the audio cannot be decoded") from error
