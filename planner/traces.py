"""Request traces: arrival time, images, videos and token counts of each request.

A line is a JSON object with `images`, each with `w` and `h` in pixels, `t` in seconds, `prompt_tokens` (text only) and
`output_tokens`. It may have `videos`, each with `w`, `h`, `frames` and `seconds` as the file's header states them.
Images and videos may have an `id`; equal ids are the same image, and the same video.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from configs.schema import VideoConfig
from encoder.checkpoint.image_rules import ImageRules
from encoder.checkpoint.video_rules import VideoRules
from encoder.images.size import image_grid
from encoder.packing import costs
from encoder.packing.cost_based import ImageCost
from encoder.video.bounds import VideoBounds
from encoder.video.header import VideoHeader
from encoder.video.plan import VideoPlan

_QWEN3_VL = ImageRules(patch_size=16, min_pixels=65_536, max_pixels=16_777_216)
RULES: Mapping[str, ImageRules] = {
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_2b": _QWEN3_VL,
    "qwen2_5_vl": ImageRules(patch_size=14, min_pixels=3_136, max_pixels=12_845_056),
}
"""Patches and pixel bounds of the published preprocessor configs, by the benchmarks' name of the tower."""

MAX_TOKENS = 2**31
"""Maximum number of tokens of a request's text, and of its answer."""

T = TypeVar("T")


class TraceError(ValueError):
    """A trace cannot be read; the message names file and line."""


def read_lines(path: Path, make: Callable[[dict[str, Any]], T]) -> list[T]:
    """Returns `make(line)` for the JSON of each line.

    Raises:
        TraceError: the file is not UTF-8, a line is not JSON, or `make` raised an error of a value.
    """
    found: list[T] = []
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            lines = list(file)  # a line may hold other separators, such as U+2028
    except UnicodeDecodeError as error:
        raise TraceError(f"{path.name}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(make(json.loads(line)))
        except TraceError as error:
            raise TraceError(f"{path.name}, line {number}: {error}") from error
        except KeyError as error:
            raise TraceError(f"{path.name}, line {number}: the key {error} is missing") from error
        except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise TraceError(f"{path.name}, line {number}: {error!r}") from error
    return found


@dataclass(frozen=True)
class Request:
    """One line of a trace."""

    at_s: float
    images: tuple[ImageCost, ...]
    """Images, and chunks of videos, that no earlier request had."""
    num_tokens: int
    """Tokens of the prompt: text, all images and all videos."""
    output_tokens: int


def read_requests(path: Path, rules: ImageRules, video_rules: VideoRules | None = None) -> list[Request]:
    """Reads the requests of a trace, in order of arrival. `video_rules`: None refuses a trace with videos.

    Raises:
        TraceError: the file is not a trace, or its requests do not have at least two different arrival times.
    """
    seen: set[object] = set()

    def request(line: dict[str, Any]) -> Request:
        images, of_images = new_images(line["images"], rules, seen)
        chunks, of_videos = _new_videos(line.get("videos", []), video_rules, seen)
        at_s, prompt, output = float(line["t"]), int(line["prompt_tokens"]), int(line["output_tokens"])
        if not (math.isfinite(at_s) and 0 <= prompt <= MAX_TOKENS and 1 <= output <= MAX_TOKENS):
            raise TraceError(
                f"t is {at_s}, prompt_tokens {prompt} and output_tokens {output}; "
                f"they must be a finite time, 0 to {MAX_TOKENS} and 1 to {MAX_TOKENS}"
            )
        return Request(at_s, images + chunks, prompt + of_images + of_videos, output)

    found = sorted(read_lines(path, request), key=lambda request: request.at_s)
    if not found or found[0].at_s == found[-1].at_s:
        raise TraceError(f"{path.name} has {len(found)} request(s); it must have at least 2 with different times `t`")
    return found


def new_images(
    images: Sequence[Mapping[str, int]], rules: ImageRules, seen: set[object]
) -> tuple[tuple[ImageCost, ...], int]:
    """Returns the costs of images not seen before, each once, and the number of tokens of all images. Images without an
    `id` are always new. `seen`: ids of earlier requests, to which new ids are added.
    """
    return _new_items([(image.get("id"), [image_cost(image, rules)]) for image in images], seen)


def _new_videos(
    videos: Sequence[Mapping[str, Any]], rules: VideoRules | None, seen: set[object]
) -> tuple[tuple[ImageCost, ...], int]:
    """Returns the costs of the chunks of new videos, and the number of tokens of all videos, as `new_images` does."""
    if rules is None:
        if videos:
            raise TraceError("a request has videos, whose sampling is read from the model's files: leave --arch out")
        return (), 0
    names = [None if video.get("id") is None else ("video", video["id"]) for video in videos]
    return _new_items([(name, video_costs(video, rules)) for name, video in zip(names, videos, strict=True)], seen)


def _new_items(
    items: Sequence[tuple[object, Sequence[ImageCost]]], seen: set[object]
) -> tuple[tuple[ImageCost, ...], int]:
    """`items`: name, None for one that is always new, and costs of what is encoded of it."""
    new: list[ImageCost] = []
    for name, parts in items:
        if name is None or name not in seen:
            new += parts
            seen.add(name)
    return tuple(new), sum(part.num_tokens for _, parts in items for part in parts)


def video_costs(video: Mapping[str, Any], rules: VideoRules) -> list[ImageCost]:
    """Returns the costs of a video's chunks, with the default limits of `ingress.video`. Raises KeyError for a missing
    value, VideoError for a video that these limits refuse."""
    frames, seconds = int(video["frames"]), float(video["seconds"])
    if frames < 1 or not seconds > 0:
        raise TraceError(f"a video has {frames} frames and {seconds} seconds; both must be over 0")
    bounds = VideoBounds.of(VideoConfig())
    bounds.check_seconds(seconds)
    bounds.check_pixels(int(video["w"]), int(video["h"]))
    header = VideoHeader("mp4", "", int(video["w"]), int(video["h"]), frames, frames, frames / seconds, seconds)
    plan = VideoPlan.make(header, rules, bounds)
    return [costs.image_cost(chunk.grid_thw, rules.frames.merge_size**2) for chunk in plan.chunks]


def image_cost(image: Mapping[str, int], rules: ImageRules) -> ImageCost:
    """Returns the cost of an image of a trace. Raises KeyError without `w` or `h`, ValueError for an invalid size."""
    width, height = int(image["w"]), int(image["h"])
    if min(width, height) < 1:
        raise ValueError(f"image of {width}x{height} pixels; both must be at least 1")
    return costs.image_cost(image_grid(width, height, rules), rules.merge_size**2)
