"""Video preprocessing that a checkpoint defines (`VideoRules`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from encoder.checkpoint.image_rules import ImageRules, parse_rules, read_json_object
from encoder.checkpoint.vision_config import Architecture


@dataclass(frozen=True)
class VideoRules:
    """Settings of a checkpoint's video processor. `dataclasses.asdict` returns values that JSON can represent, and
    `VideoRules(**values)` restores the rules."""

    loader: Literal["qwen2_vl", "qwen3_vl"]
    """vLLM's name of the loader that belongs to the processor: it samples frames as the processor does."""
    frames: ImageRules
    """Patches and normalisation, equal to those of images. The bounds are on the pixels of one frame for "qwen2_vl", of
    all frames together for "qwen3_vl"."""
    fps: float = 2.0
    """Frames per second that the processor of Qwen3-VL samples where the loader has taken every frame."""
    min_frames: int = 4
    max_frames: int = 768
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 0
    """Used with `cap_pixels_per_frame`: tokens of all frames ("qwen2_vl") or of one ("qwen3_vl")."""

    def __post_init__(self) -> None:
        if isinstance(self.frames, dict):  # from JSON
            object.__setattr__(self, "frames", ImageRules(**self.frames))

    @classmethod
    def from_checkpoint(cls, path: Path, architecture: Architecture, images: ImageRules) -> VideoRules:
        """Reads the settings in the folder `path`, from the files and with the defaults of transformers.

        images: the rules of images. Raises ValueError with file, key and value for an unsupported setting, and if
        patches or normalisation differ from those of images.
        """
        processor, default = _DEFAULTS[architecture]
        settings, file = _read(path)
        given = {key: value for key, value in settings.items() if value is not None}
        if (kind := given.get("video_processor_type", processor)) != processor:
            raise ValueError(f"{file}: video_processor_type is {kind!r}; supported: {processor}")
        frames = parse_rules(given, file, default.frames)
        for name in ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std", "rescale_factor"):
            if getattr(frames, name) != getattr(images, name):
                raise ValueError(
                    f"{file}: {name} is {getattr(frames, name)} for videos and {getattr(images, name)} for images"
                )
        numbers: dict[str, Any] = {}
        for name in ("fps", "min_frames", "max_frames", "max_video_tokens"):
            usual = getattr(default, name)
            value = given.get(name, usual)
            if not isinstance(value, int | float) or value <= 0:
                raise ValueError(f"{file}: {name} is {value!r}; it must be a number over 0")
            numbers[name] = type(usual)(value)
        return replace(default, frames=frames, cap_pixels_per_frame=bool(given.get("cap_pixels_per_frame")), **numbers)


_HALF = (0.5, 0.5, 0.5)
_DEFAULTS: Mapping[Architecture, tuple[str, VideoRules]] = {
    "qwen2_5_vl": (
        "Qwen2VLVideoProcessor",
        VideoRules("qwen2_vl", ImageRules(min_pixels=128 * 28**2, max_pixels=768 * 28**2), max_video_tokens=128_000),
    ),
    "qwen3_vl": (
        "Qwen3VLVideoProcessor",
        VideoRules("qwen3_vl", ImageRules(16, 2, 2, 128 * 32**2, 768 * 32**2, _HALF, _HALF), max_video_tokens=768),
    ),
}
"""For each architecture, transformers' class of its video processor and the settings that the class starts from."""


def _read(path: Path) -> tuple[Mapping[str, object], str]:
    """Returns the processor's settings and the name of their file, in transformers' order of files."""
    combined = path / "processor_config.json"
    if combined.is_file():
        settings = read_json_object(combined).get("video_processor")
        if isinstance(settings, dict):
            return settings, combined.name
    for name in ("video_preprocessor_config.json", "preprocessor_config.json"):
        if (path / name).is_file():
            return read_json_object(path / name), name
    raise FileNotFoundError(f"{path.name} has no video_preprocessor_config.json and no preprocessor_config.json")
