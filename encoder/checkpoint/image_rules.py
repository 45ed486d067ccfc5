"""Image preprocessing that a checkpoint defines (`ImageRules`), and bounds that a request may set (`PixelBounds`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PixelBounds:
    """Bounds of a request on the pixels (width times height) of a resized image; None keeps the checkpoint's bound.

    Each bound replaces the checkpoint's, as `min_pixels` and `max_pixels` do in a call of transformers' processor. It
    may widen or narrow the range; the caller limits how far a client may go. If `max_pixels` is below the checkpoint's
    minimum, larger images are shrunk to `max_pixels`, and smaller ones are still enlarged to that minimum. Raises
    ValueError for a bound below 1, and for a minimum above the maximum.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        for name, bound in (("min_pixels", self.min_pixels), ("max_pixels", self.max_pixels)):
            if bound is not None and (type(bound) is not int or bound < 1):
                raise ValueError(f"{name} is {bound!r}; it must be an integer of at least 1")
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels is {self.min_pixels}; it must not be over max_pixels, {self.max_pixels}")


@dataclass(frozen=True)
class ImageRules:
    """Settings of a checkpoint's image processor. The defaults are those of the processor's class.

    Lengths are in pixels, `merge_size` is in patches, mean and std are for R, G, B. A pixel becomes
    `(value * rescale_factor - mean) / std`. `dataclasses.asdict` returns values that JSON can represent, and
    `ImageRules(**values)` restores the rules.
    """

    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    rescale_factor: float = 1 / 255

    def __post_init__(self) -> None:
        for name in ("image_mean", "image_std"):  # JSON has lists; the rules must be hashable
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def factor(self) -> int:
        """Both sides of a resized image are multiples of this number of pixels."""
        return self.patch_size * self.merge_size

    @classmethod
    def from_checkpoint(cls, path: Path) -> ImageRules:
        """Reads the image processor's settings in the folder `path`, in every spelling that Qwen checkpoints use.

        The settings are `image_processor` in processor_config.json, else preprocessor_config.json, in transformers'
        order. Absent and null settings get the defaults. Raises FileNotFoundError, and ValueError with file, key and
        value for an unsupported setting.
        """
        combined, single = path / "processor_config.json", path / "preprocessor_config.json"
        if combined.is_file() and (settings := read_json_object(combined).get("image_processor")) is not None:
            return parse_rules(settings, combined.name, cls())
        return parse_rules(read_json_object(single), single.name, cls())


# Settings of transformers' processor with the values that this project implements.
_SUPPORTED: Mapping[str, tuple[bool | int | str, ...]] = {
    "image_processor_type": ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2_5_VLImageProcessor"),
    "do_resize": (True,),
    "do_rescale": (True,),
    "do_normalize": (True,),
    "do_convert_rgb": (True, False),  # images are converted to RGB before
    "do_center_crop": (False,),
    "do_pad": (False,),
    "resample": (3,),  # bicubic
    "data_format": ("channels_first",),
}
# Keys of the bounds at the top level and within `size`. The top level takes precedence, as in transformers.
_BOUNDS = {"min_pixels": ("shortest_edge", "min_pixels"), "max_pixels": ("longest_edge", "max_pixels")}


def parse_rules(settings: object, file: str, default: ImageRules) -> ImageRules:
    """Parses a processor's settings; absent and null ones are those of `default`. Raises ValueError with file, key and
    value for an unsupported setting."""

    def fail(key: str, value: object, wanted: str) -> ValueError:
        return ValueError(f"{file}: {key} is {value!r}; {wanted}")

    def whole(key: str, value: object) -> int:
        if type(value) is not int or value < 1:
            raise fail(key, value, "it must be an integer of at least 1")
        return value

    def channels(key: str, value: object) -> tuple[float, float, float]:
        match value:
            case [int() | float() as r, int() | float() as g, int() | float() as b]:
                return float(r), float(g), float(b)
        raise fail(key, value, "it must be three numbers")

    if not isinstance(settings, dict):
        raise fail("image_processor", settings, "it must be an object")
    given = {key: value for key, value in settings.items() if value is not None}
    for key, supported in _SUPPORTED.items():
        if key in given and not any(type(given[key]) is type(value) and given[key] == value for value in supported):
            raise fail(key, given[key], f"supported: {', '.join(map(str, supported))}")

    size = given.get("size", {"shortest_edge": default.min_pixels, "longest_edge": default.max_pixels})
    edges = {key: value for key, value in size.items() if value is not None} if isinstance(size, dict) else {}
    bounds = {}
    for name, (edge, alias) in _BOUNDS.items():
        value = given.get(name, edges.get(edge, edges.get(alias)))
        if value is None or edges.keys() - {key for pair in _BOUNDS.values() for key in pair}:
            raise fail("size", size, "it must give shortest_edge and longest_edge, in pixels of area")
        bounds[name] = whole(name, value)
    if bounds["min_pixels"] > bounds["max_pixels"]:
        raise fail("min_pixels", bounds["min_pixels"], f"it must not be over max_pixels, {bounds['max_pixels']}")

    rescale_factor = given.get("rescale_factor", default.rescale_factor)
    if not isinstance(rescale_factor, float) or rescale_factor <= 0:
        raise fail("rescale_factor", rescale_factor, "it must be a number over 0")
    image_std = channels("image_std", given.get("image_std", list(default.image_std)))
    if min(image_std) <= 0:
        raise fail("image_std", image_std, "it must be over 0")
    return ImageRules(
        patch_size=whole("patch_size", given.get("patch_size", default.patch_size)),
        temporal_patch_size=whole("temporal_patch_size", given.get("temporal_patch_size", default.temporal_patch_size)),
        merge_size=whole("merge_size", given.get("merge_size", default.merge_size)),
        min_pixels=bounds["min_pixels"],
        max_pixels=bounds["max_pixels"],
        image_mean=channels("image_mean", given.get("image_mean", list(default.image_mean))),
        image_std=image_std,
        rescale_factor=rescale_factor,
    )


def read_json_object(file: Path) -> dict[str, object]:
    """Raises ValueError if the file does not hold a JSON object."""
    content: object = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{file.name}: it must hold a JSON object")
    return content
