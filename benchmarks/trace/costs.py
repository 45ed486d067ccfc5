"""Costs of a trace's images: in order of arrival, in windows as for a packer, or by request."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encoder.checkpoint.image_rules import ImageRules
from encoder.packing.cost_based import ImageCost
from planner.traces import TraceError, image_cost, new_images, read_lines


def read_image_costs(path: Path, rules: ImageRules) -> list[ImageCost]:
    """Returns the cost of each image of the trace in order of arrival, including repeated images.

    Raises:
        TraceError: the file is not a trace, or contains no image.
    """
    lines = read_lines(path, lambda line: [image_cost(image, rules) for image in line["images"]])
    costs = [cost for line in lines for cost in line]
    if not costs:
        raise TraceError(f"{path.name} has no image")
    return costs


def windows(costs: list[ImageCost], size: int) -> list[list[ImageCost]]:
    """Returns consecutive windows of `size` images; the last may be shorter."""
    return [costs[begin : begin + size] for begin in range(0, len(costs), size)]


@dataclass(frozen=True)
class Arrival:
    """A request of a trace, reduced to the images that encoders receive."""

    at_s: float
    images: tuple[ImageCost, ...]
    """Distinct images that no earlier request had."""


def read_arrivals(path: Path, rules: ImageRules) -> list[Arrival]:
    """Returns all requests in the file's order. Raises TraceError if it is not a trace."""
    seen: set[object] = set()

    def arrival(line: dict[str, Any]) -> Arrival:
        return Arrival(float(line["t"]), new_images(line["images"], rules, seen)[0])

    return read_lines(path, arrival)
