"""Arrival traces, one request a line: the images' costs in windows, as a packer would meet them, or whole requests.

A line is a JSON object with `images`, each with `w` and `h` in pixels; whole requests have `t` in seconds,
`prompt_tokens` and `output_tokens` too, and their images may have an `id`, the same for the same image. It must not
know of budgets or times.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from encoder.image_rules import ImageRules
from encoder.image_size import grid_of, num_tokens
from encoder.planning import PAIRS_PER_UNIT, ImageCost

RULES: Mapping[str, ImageRules] = {
    # Sizes, patches and pixel bounds of the published preprocessor configs.
    "qwen3_vl": ImageRules(patch_size=16, min_pixels=65_536, max_pixels=16_777_216),
    "qwen2_5_vl": ImageRules(patch_size=14, min_pixels=3_136, max_pixels=12_845_056),
}


class TraceError(ValueError):
    """A trace that cannot be read; the message names file and line."""


def read_costs(path: Path, rules: ImageRules) -> list[ImageCost]:
    """What each image of the trace costs, in order of arrival; repeated images count every time.

    Raises:
        TraceError: the file is not such a trace, or holds no image.
    """
    costs: list[ImageCost] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            for image in json.loads(line)["images"]:
                costs.append(image_cost(image, rules))
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{path.name}, line {number}: {error!r}") from error
    if not costs:
        raise TraceError(f"{path.name} holds no image")
    return costs


@dataclass(frozen=True)
class Request:
    """One line of a trace."""

    at_s: float
    images: tuple[ImageCost, ...]
    """Those that no earlier request had."""
    num_tokens: int
    """Of the prompt: text, and all images."""
    output_tokens: int


def read_requests(path: Path, rules: ImageRules) -> list[Request]:
    """The whole requests, in order of arrival.

    Raises:
        TraceError: the file is not such a trace, or its requests do not come at two different times.
    """
    found: list[Request] = []
    seen: set[object] = set()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            asked = json.loads(line)
            at_s, prompt, output = float(asked["t"]), int(asked["prompt_tokens"]), int(asked["output_tokens"])
            new, visual = [], 0
            for image in asked["images"]:
                cost = image_cost(image, rules)
                visual += cost.num_tokens
                if image.get("id") is None or image["id"] not in seen:
                    new.append(cost)
                    seen.add(image.get("id"))
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{path.name}, line {number}: {error!r}") from error
        if not math.isfinite(at_s) or prompt < 0 or output < 1:
            raise TraceError(
                f"{path.name}, line {number}: t is {at_s}, prompt_tokens {prompt} and output_tokens {output}; "
                "they must be a time, at least 0 and at least 1"
            )
        found.append(Request(at_s, tuple(new), prompt + visual, output))
    found.sort(key=lambda request: request.at_s)
    if not found or found[0].at_s == found[-1].at_s:
        raise TraceError(f"{path.name} holds {len(found)} requests; at least 2 at different times `t` are needed")
    return found


def image_cost(image: Mapping[str, int], rules: ImageRules) -> ImageCost:
    """Of an image as a trace names it. Raises KeyError without `w` and `h`, ValueError for sizes that cannot be."""
    grid = grid_of(int(image["w"]), int(image["h"]), rules)
    pairs = grid[0] * (grid[1] * grid[2]) ** 2
    return ImageCost(num_tokens(grid, rules.merge_size), pairs / PAIRS_PER_UNIT)


def windows(costs: list[ImageCost], size: int) -> list[list[ImageCost]]:
    """Consecutive windows of `size` images; the last one may hold fewer."""
    return [costs[begin : begin + size] for begin in range(0, len(costs), size)]


def halves(costs: list[ImageCost], size: int) -> tuple[list[ImageCost], list[ImageCost]]:
    """The first and the second half, cut between two windows of `size` images."""
    middle = max(1, len(costs) // 2 // size) * size
    return costs[:middle], costs[middle:]
