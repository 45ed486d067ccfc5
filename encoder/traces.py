"""Arrival traces, one request a line: the images' costs in windows, as a packer would meet them, or whole requests.

A line is a JSON object with `images`, each with `w` and `h` in pixels; whole requests have `t` in seconds,
`prompt_tokens` and `output_tokens` too, and their images may have an `id`, the same for the same image. It must not
know of budgets or times.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from encoder.image_rules import ImageRules
from encoder.image_size import grid_of, num_tokens
from encoder.planning import PAIRS_PER_UNIT, ImageCost

RULES: Mapping[str, ImageRules] = {
    # Sizes, patches and pixel bounds of the published preprocessor configs.
    "qwen3_vl": ImageRules(patch_size=16, min_pixels=65_536, max_pixels=16_777_216),
    "qwen2_5_vl": ImageRules(patch_size=14, min_pixels=3_136, max_pixels=12_845_056),
}

T = TypeVar("T")


class TraceError(ValueError):
    """A trace that cannot be read; the message names file and line."""


def read_lines(path: Path, make: Callable[[dict[str, Any]], T]) -> list[T]:
    """What `make` makes of each line of a trace.

    Raises:
        TraceError: a line is no JSON, or `make` raised ValueError, KeyError or TypeError of it.
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


def read_costs(path: Path, rules: ImageRules) -> list[ImageCost]:
    """What each image of the trace costs, in order of arrival; repeated images count every time.

    Raises:
        TraceError: the file is not such a trace, or holds no image.
    """
    lines = read_lines(path, lambda line: [image_cost(image, rules) for image in line["images"]])
    costs = [cost for line in lines for cost in line]
    if not costs:
        raise TraceError(f"{path.name} holds no image")
    return costs


@dataclass(frozen=True)
class Arrival:
    """One line of a trace, by what it brings to the encoders."""

    at_s: float
    images: tuple[ImageCost, ...]
    """Those that no earlier request had, each once; images without an `id` are all new."""
    num_tokens: int
    """Of all its images."""


def read_arrivals(path: Path, rules: ImageRules) -> list[Arrival]:
    """All requests as the file has them. Raises TraceError where it is not such a trace."""
    return read_lines(path, _arrivals(rules))


def _arrivals(rules: ImageRules) -> Callable[[dict[str, Any]], Arrival]:
    """Takes the lines of one trace in turn."""
    seen: set[object] = set()

    def arrival(line: dict[str, Any]) -> Arrival:
        new, visual = [], 0
        for image in line["images"]:
            cost = image_cost(image, rules)
            visual += cost.num_tokens
            if image.get("id") is None or image["id"] not in seen:
                new.append(cost)
                seen.add(image.get("id"))
        return Arrival(float(line["t"]), tuple(new), visual)

    return arrival


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
    arrival_of = _arrivals(rules)

    def request(line: dict[str, Any]) -> Request:
        arrival, prompt, output = arrival_of(line), int(line["prompt_tokens"]), int(line["output_tokens"])
        if not math.isfinite(arrival.at_s) or prompt < 0 or output < 1:
            raise TraceError(
                f"t is {arrival.at_s}, prompt_tokens {prompt} and output_tokens {output}; "
                "they must be a time, at least 0 and at least 1"
            )
        return Request(arrival.at_s, arrival.images, prompt + arrival.num_tokens, output)

    found = sorted(read_lines(path, request), key=lambda request: request.at_s)
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
