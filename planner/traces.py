"""Request traces: arrival time, images and token counts of each request.

A line is a JSON object with `images`, each with `w` and `h` in pixels, `t` in seconds, `prompt_tokens` (text only) and
`output_tokens`. Images may have an `id`; equal ids are the same image.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from encoder.checkpoint.image_rules import ImageRules
from encoder.images.size import image_grid
from encoder.packing import costs
from encoder.packing.cost_based import ImageCost

RULES: Mapping[str, ImageRules] = {
    # Sizes, patches and pixel bounds of the published preprocessor configs.
    "qwen3_vl": ImageRules(patch_size=16, min_pixels=65_536, max_pixels=16_777_216),
    "qwen2_5_vl": ImageRules(patch_size=14, min_pixels=3_136, max_pixels=12_845_056),
}

T = TypeVar("T")


class TraceError(ValueError):
    """A trace cannot be read; the message names file and line."""


def read_lines(path: Path, make: Callable[[dict[str, Any]], T]) -> list[T]:
    """Returns `make(line)` for the JSON of each line.

    Raises:
        TraceError: a line is not JSON, or `make` raised ValueError, KeyError or TypeError.
    """
    found: list[T] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            found.append(make(json.loads(line)))
        except TraceError as error:
            raise TraceError(f"{path.name}, line {number}: {error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{path.name}, line {number}: {error!r}") from error
    return found


@dataclass(frozen=True)
class Request:
    """One line of a trace."""

    at_s: float
    images: tuple[ImageCost, ...]
    """Images that no earlier request had."""
    num_tokens: int
    """Tokens of the prompt: text and all images."""
    output_tokens: int


def read_requests(path: Path, rules: ImageRules) -> list[Request]:
    """Reads the requests of a trace, in order of arrival.

    Raises:
        TraceError: the file is not a trace, or its requests do not have at least two different arrival times.
    """
    seen: set[object] = set()

    def request(line: dict[str, Any]) -> Request:
        images, visual = new_images(line["images"], rules, seen)
        at_s, prompt, output = float(line["t"]), int(line["prompt_tokens"]), int(line["output_tokens"])
        if not math.isfinite(at_s) or prompt < 0 or output < 1:
            raise TraceError(
                f"t is {at_s}, prompt_tokens {prompt} and output_tokens {output}; "
                "they must be a finite time, at least 0 and at least 1"
            )
        return Request(at_s, images, prompt + visual, output)

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
    new, tokens = [], 0
    for image in images:
        cost = image_cost(image, rules)
        tokens += cost.num_tokens
        if image.get("id") is None or image["id"] not in seen:
            new.append(cost)
            seen.add(image.get("id"))
    return tuple(new), tokens


def image_cost(image: Mapping[str, int], rules: ImageRules) -> ImageCost:
    """Returns the cost of an image of a trace. Raises KeyError without `w` or `h`, ValueError for an invalid size."""
    return costs.image_cost(image_grid(int(image["w"]), int(image["h"]), rules), rules.merge_size**2)
