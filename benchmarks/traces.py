"""Arrival traces, one request a line: the images' costs in windows, as a packer would meet them.

A line is a JSON object with `images`, each with `w` and `h` in pixels; what else it holds is not looked at. It must not
know of budgets or times.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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
                grid = grid_of(int(image["w"]), int(image["h"]), rules)
                pairs = grid[0] * (grid[1] * grid[2]) ** 2
                costs.append(ImageCost(num_tokens(grid, rules.merge_size), pairs / PAIRS_PER_UNIT))
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"{path.name}, line {number}: {error!r}") from error
    if not costs:
        raise TraceError(f"{path.name} holds no image")
    return costs


def windows(costs: list[ImageCost], size: int) -> list[list[ImageCost]]:
    """Consecutive windows of `size` images; the last one may hold fewer."""
    return [costs[begin : begin + size] for begin in range(0, len(costs), size)]


def halves(costs: list[ImageCost], size: int) -> tuple[list[ImageCost], list[ImageCost]]:
    """The first and the second half, cut between two windows of `size` images."""
    middle = max(1, len(costs) // 2 // size) * size
    return costs[:middle], costs[middle:]
