"""Decodes one item and runs vLLM's processor on it, in decode workers: the header, and the tower's inputs.

Answers to the parent process are JSON and vLLM's msgpack, never a pickle: a file that takes over its worker must not
reach the parent.
"""

from __future__ import annotations

import logging
import math
import os
import random
import wave
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pybase64
from PIL import Image
from pydantic import JsonValue

from configs.schema import AudioConfig, VideoConfig
from deployments.common.messages import MODEL_SAMPLING, VideoSampling
from deployments.vllm import import_shim
from encoder.images.generic_identity import MEASURED_FRAMES, MEASURED_SECONDS, MEASURED_SIDE, MEASURED_SIDES
from encoder.images.load import MAX_PIXELS_DECODED, ImageError, load_rgb
from encoder.item_header import ItemHeader
from encoder.video.bounds import VideoBounds, VideoError
from encoder.video.header import read_header

logger = logging.getLogger(__name__)

Size = tuple[int, int]
Apply = Callable[[Callable[[Size], int], Iterable[Size]], Iterable[int]]

MODALITIES = ("image", "audio", "video")
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
        audio: AudioConfig = AudioConfig(),  # noqa: B008 - frozen
        video: VideoConfig = VideoConfig(),  # noqa: B008 - frozen
    ) -> None:
        """Loads configs and tokenizer, no weights. `audio`: limits of sounds, which become vLLM's in this process.
        `video`: limits of videos.

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
        self._model_config = EngineArgs(**arguments).create_model_config()
        self._processor = MULTIMODAL_REGISTRY.create_processor(self._model_config)
        self._encoder = MsgpackEncoder(size_threshold=2**62)  # one buffer, which contains every tensor
        self._audio_options, self._video_options = media_io.get("audio", {}), media_io.get("video", {})
        self._max_pixels = max_pixels_decoded
        self._audio, self._video = audio, video
        taken = self._processor.info.get_supported_mm_limits()
        self._in_chunk = VISION_CHUNK in taken
        self.modalities = tuple(
            modality for modality in MODALITIES if modality in taken or (modality == "image" and self._in_chunk)
        )
        """Media of the model that can be decoded here."""

    def prepare(
        self,
        data: bytes,
        modality: str,
        digest: str,
        sampling: VideoSampling = MODEL_SAMPLING,
    ) -> VllmInputs:
        """Decodes and processes one item alone: some processors pad the items of a call to a common size.

        `data`: the file; its content determines the format. A list of frames is its base64 with commas. `digest`:
        digest of the embedding.

        Raises:
            ItemError, ImageError: the file cannot be decoded, or the model does not take it.
        """
        from vllm.multimodal.processing.context import TimingContext
        from vllm.multimodal.processing.inputs import ProcessorInputs

        from deployments.vllm.headers import declared_fields, header_of

        info = self._processor.info
        if modality not in self.modalities:
            raise ItemError(f"the model takes no {modality}")
        media = self._load_video(data, sampling) if modality == "video" else self._decode(data, modality)
        if modality == "image" and self._in_chunk:
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
        declared = declared_fields(self._processor, inputs, modality)
        [encoded] = self._encoder.encode(inputs)
        header = header_of(digest, modality, inputs, updates, declared, info.get_tokenizer())
        return VllmInputs(header, bytes(encoded))

    def _decode(self, data: bytes, modality: str) -> Any:  # noqa: ANN401 - an image, or samples with their rate
        """Returns what vLLM's own media loader would: `load_rgb` gives the same pixels, within bounds."""
        if modality == "image":
            return load_rgb(data, max_pixels_decoded=self._max_pixels)
        from vllm.multimodal.media.audio import AudioMediaIO

        limits = self._audio
        bounded = f"within the limits of {limits.max_seconds:g} s and {limits.max_samples} samples"
        os.environ |= {  # vLLM has no other way to set them
            "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB": str(math.ceil(limits.max_bytes / 2**20)),
            "VLLM_MAX_AUDIO_DECODE_DURATION_S": str(math.ceil(limits.max_seconds)),
            "VLLM_MAX_AUDIO_DECODE_BYTES": str(4 * limits.max_samples),
        }
        try:
            samples, rate = AudioMediaIO(**self._audio_options).load_bytes(data)
        except (MemoryError, ImportError):
            raise
        except Exception as error:  # decoders raise arbitrary exceptions on malformed data
            logger.warning("a sound cannot be decoded", exc_info=error)
            raise ItemError(f"the sound cannot be decoded {bounded}") from error
        if not 0 < len(samples) <= min(limits.max_samples, limits.max_seconds * rate):
            raise ItemError(f"the sound has {len(samples)} samples at {rate:g} Hz, not {bounded}")
        return samples, rate

    def _load_video(self, data: bytes, sampling: VideoSampling) -> Any:  # noqa: ANN401 - frames with their metadata
        """Returns the frames that vLLM's loader chooses for the model's processor, within bounds."""
        from vllm.multimodal.media import MediaConnector
        from vllm.transformers_utils.processor import get_video_processor_cls_name

        limits, chosen = self._video, {key: value for key, value in vars(sampling).items() if value is not None}
        frames = data.startswith(b"/9j/")
        # fps and num_frames bound each other: one that the request sets replaces both of the operator's, as in vLLM.
        options = {key: value for key, value in self._video_options.items() if not chosen or key not in vars(sampling)}
        text = (data if frames else pybase64.b64encode(data)).decode()
        try:
            read_header(data, VideoBounds.of(limits))
            connector = MediaConnector(media_io_kwargs={"video": {**options, **chosen}})
            name = get_video_processor_cls_name(self._model_config)
            url = f"data:video/{'jpeg' if frames else 'mp4'};base64,{text}"
            video = connector.fetch_video(url, video_processor=name)
            pixels = getattr(video, "media", video)[0]
        except (MemoryError, ImportError, VideoError):
            raise
        except Exception as error:  # decoders raise arbitrary exceptions on malformed data
            logger.warning("a video cannot be decoded", exc_info=error)
            raise ItemError("the video cannot be decoded") from error
        if len(pixels) > limits.max_frames:
            raise ItemError(f"{len(pixels)} frames of the video would be encoded, the limit is {limits.max_frames}")
        return video


def count_video_tokens(num_tokens: Callable[[bytes], int]) -> int:
    """Returns `GenericIdentity.video_tokens`, 0 if videos are refused. `num_tokens`: tokens of a list of frames. If
    their number or size is over the operator's limits, fewer or smaller ones are counted, in proportion."""
    for smaller, fewer in product((1, 2, 4), (1, 2, 4, 8)):
        with suppress(ImageError):
            counted = num_tokens(blank_frames(MEASURED_FRAMES // fewer, MEASURED_SIDE // smaller))
            return math.ceil(counted * smaller**2 * fewer)
    return 0


def blank_frames(number: int, side: int) -> bytes:
    """Returns a list of JPEG frames."""
    Image.new("RGB", (side, side)).save(file := BytesIO(), "JPEG")
    return b",".join([pybase64.b64encode(file.getvalue())] * number)


def count_audio_tokens(num_tokens: Callable[[bytes], int]) -> tuple[int, ...]:
    """Returns `GenericIdentity.audio_tokens`, empty if sounds are refused. `num_tokens`: tokens of a file. Durations
    over the operator's limit are refused; they get the tokens of the one before, in proportion."""
    counts: list[int] = []
    for number, seconds in enumerate(MEASURED_SECONDS):
        try:
            counts.append(num_tokens(silence(seconds)))
        except ImageError:
            if not counts:
                return ()
            counts.append(math.ceil(counts[-1] * seconds / MEASURED_SECONDS[number - 1]))
    return tuple(counts)


def silence(seconds: int) -> bytes:
    """Returns a WAV file."""
    with wave.open(file := BytesIO(), "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(16_000)
        writer.writeframes(bytes(32_000 * seconds))
    return file.getvalue()


def sample(modality: str) -> bytes:
    """Returns a small file of the modality."""
    return {"image": blank_image(64, 64), "audio": silence(1), "video": blank_frames(4, 64)}[modality]


def count_tokens(num_tokens: Callable[[bytes], int], apply: Apply = map) -> tuple[tuple[int, ...], ...]:
    """Returns `GenericIdentity.token_counts`. Takes seconds. `num_tokens`: visual tokens of a file; a size that it
    refuses gets the largest count; empty if it refuses all. `apply` calls it as `map` does."""

    def count(size: tuple[int, int]) -> int:
        try:
            return num_tokens(blank_image(*size))
        except ImageError:
            return 0

    counts = list(apply(count, product(MEASURED_SIDES, MEASURED_SIDES)))
    if not any(counts):
        return ()
    rows = range(0, len(counts), len(MEASURED_SIDES))
    return tuple(tuple(one or max(counts) for one in counts[row : row + len(MEASURED_SIDES)]) for row in rows)


def blank_image(width: int, height: int) -> bytes:
    """Returns a PNG file."""
    Image.new("RGB", (width, height)).save(file := BytesIO(), "PNG", compress_level=1)
    return file.getvalue()


def noise_image(side: int, seed: int) -> bytes:
    """Returns a square PNG file of random pixels, the same for the same seed."""
    pixels = random.Random(seed).randbytes(3 * side * side)
    Image.frombytes("RGB", (side, side), pixels).save(file := BytesIO(), "PNG", compress_level=1)
    return file.getvalue()


def sample_header(path: str, engine_args: Mapping[str, JsonValue], digest: str) -> ItemHeader:
    """Returns the header of a small item of the model's first modality. Raises ItemError if the model takes none."""
    preparer = Preparer(path, engine_args)
    for modality in preparer.modalities:
        return preparer.prepare(sample(modality), modality, digest).header
    raise ItemError(f"the model takes none of {', '.join(MODALITIES)}")
