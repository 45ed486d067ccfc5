"""What `vitray budgets` and `vitray plan` both have to know: a model's images, and measured times of its tower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from deployments.commands.config_option import PROJECT_ROOT
from training.architectures import ARCHITECTURES

if TYPE_CHECKING:
    from encoder.image_rules import ImageRules

R = TypeVar("R")
RESULTS = PROJECT_ROOT / "benchmarks" / "results"
# Layers and width of the towers whose times are shipped.
_MEASURED = {"qwen3_vl": (27, 1152, "Qwen3-VL-8B"), "qwen2_5_vl": (32, 1280, "Qwen2.5-VL-7B")}


@dataclass(frozen=True)
class Geometry:
    """What decides how many tokens an image has."""

    arch: str
    rules: ImageRules


def geometry(model: str | None, arch: str | None, *, own_costs: bool) -> Geometry:
    """Of the checkpoint, or as published for `arch`. Raises ClickException, also for a tower that nobody measured."""
    from encoder.traces import RULES

    if arch is not None:
        return Geometry(arch, RULES[arch])
    if model is None:
        raise click.UsageError("--model names the checkpoint, or --arch its architecture as published")
    from encoder.hub import resolve_checkpoint
    from encoder.image_rules import ImageRules
    from encoder.vision_config import VisionConfig

    try:
        folder = resolve_checkpoint(model, weights=False)
        tower, rules = VisionConfig.from_checkpoint(folder), ImageRules.from_checkpoint(folder)
    except (ValueError, OSError) as error:
        raise click.ClickException(
            f"{error}; --arch {'|'.join(ARCHITECTURES)} goes by the published settings"
        ) from error
    layers, width, name = _MEASURED[tower.architecture]
    if not own_costs and (tower.depth, tower.hidden_size) != (layers, width):
        raise click.ClickException(
            f"{model} has a tower of {tower.depth} layers of {tower.hidden_size}; the shipped times are of {name}'s, "
            f"{layers} of {width}: give --costs with times of this one (--help says in which form)"
        )
    return Geometry(tower.architecture, rules)


def shipped(arch: str) -> Path:
    """Times of our encoder on one H200."""
    return RESULTS / f"encoder_h200_{arch}.json"


def read(option: str, path: Path, reader: Callable[[Path, str], R], arch: str) -> R:
    """What `reader` finds in the file. Raises ClickException that names the option by which another one is given."""
    try:
        return reader(path, arch)
    except FileNotFoundError as error:
        raise click.ClickException(
            f"{path} is not there: measured times come with a clone of the repository, or by {option}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise click.ClickException(f"{option}: {path.name} holds no measured times as expected: {reason}") from error
