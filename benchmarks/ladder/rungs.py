"""The ladder's rungs, each a set of the encoder's switches, and the code that runs a batch of images on one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace

import torch
from torch import Tensor

from configs.encoder_config import EncoderConfig
from encoder.checkpoint.image_rules import ImageRules
from encoder.forwards import choose_forward
from encoder.metadata.geometry import Grid
from encoder.runner import TowerRunner
from encoder.towers.backends import BackendUnavailableError
from encoder.towers.tower import VisionTower

_SWITCHES: Mapping[str, Mapping[str, object]] = {
    "eager": {"fused_kernels": False, "cudagraph_mm_encoder": False},
    "compile": {"fused_kernels": False, "compile_mm_encoder": True, "cudagraph_mm_encoder": False},
    "cudagraph": {"fused_kernels": False, "compile_mm_encoder": True, "cudagraph_mm_encoder": True},
    # Fused kernels leave nothing to compile.
    "fusion": {"fused_kernels": True, "cudagraph_mm_encoder": True},
    "fp8": {"fused_kernels": True, "cudagraph_mm_encoder": True, "fp8": True},
}
RUNGS = tuple(_SWITCHES)
LABELS = {
    "eager": "eager",
    "compile": "torch compile",
    "cudagraph": "torch compile + cudagraph",
    "fusion": "cudagraph + layer fusion",
    "fp8": "cudagraph + layer fusion + fp8",
}
_UNLIMITED = 1e6
HOPPER_PACKAGES = ("quack", "flash_attn.cute", "vllm.vllm_flash_attn")


class RungUnavailableError(RuntimeError):
    """The rung is unavailable on this device or with these packages; the message gives the reason."""


@dataclass(frozen=True)
class Rung:
    """One rung, ready to run."""

    name: str
    run: Callable[[Tensor, Sequence[Grid]], list[Tensor]]
    """Maps patches `[num_patches, patch_dim]` and the grids of their images to `[num_tokens, width]` for each image."""
    build_s: float
    facts: Callable[[], dict[str, object]]
    """Returns the rung's choices and counts so far, for the record."""


def switches_of(name: str) -> dict[str, object]:
    """Returns the encoder's settings of a rung. Raises RungUnavailableError if the encoder lacks one."""
    known = {field.name for field in fields(EncoderConfig)}
    if unknown := set(_SWITCHES[name]) - known:
        raise RungUnavailableError(f"the encoder has no switch {', '.join(sorted(unknown))}")
    return dict(_SWITCHES[name])


def make_rung(name: str, tower: VisionTower, rules: ImageRules | None = None, *, limited: bool = False) -> Rung:
    """Builds a rung on a loaded eager tower, whose weights it shares if possible.

    Args:
        rules: those of the checkpoint, for the images that validate fp8.
        limited: fp8's error is limited as in a server; random weights exceed that limit.

    Raises:
        RungUnavailableError: a device, a package or a switch is missing.
    """
    config = EncoderConfig(warm_image_sizes=(), **switches_of(name))  # type: ignore[arg-type]
    if not limited:
        config = replace(config, fp8_max_error=_UNLIMITED)
    began = time.perf_counter()
    try:
        runner = TowerRunner.build(choose_forward(tower, config, rules), config)
    except (ValueError, BackendUnavailableError) as error:
        raise RungUnavailableError(str(error)) from error
    build_s = time.perf_counter() - began

    def facts() -> dict[str, object]:
        return {
            "switches": dict(_SWITCHES[name]),
            "forward": runner.forward.name,
            "attention": runner.forward.attention,
            "fp8": None if runner.forward.agreement is None else asdict(runner.forward.agreement),
            "budgets": list(runner.budgets) if runner.graph_bytes else [],
            "graph_bytes": runner.graph_bytes,
            "cost_table": None if runner.cost_table is None else asdict(runner.cost_table),
            "counts": asdict(runner.counts),
        }

    return Rung(name, lambda patches, grids: run_batches(runner, patches, grids), build_s, facts)


@torch.inference_mode()
def run_batches(runner: TowerRunner, patches: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
    """Plans and runs batches as the encoder does; returns the images' tokens in the order of `grids`."""
    unit = runner.forward.config.merge_unit
    counts = [t * h * w for t, h, w in grids]
    batches = runner.plan_batches(grids)
    rows = patches.split(counts) if len(batches) > 1 else ()
    found: dict[int, Tensor] = {}
    for batch in batches:
        # A single batch contains all images, whatever the order of its indices.
        indices = batch.indices if rows else tuple(range(len(grids)))
        values = torch.cat([rows[index] for index in indices]) if rows else patches
        output = runner.run(values, [grids[index] for index in indices], batch.budget)
        found.update(zip(indices, output.split([counts[index] // unit for index in indices]), strict=True))
    return [found[index] for index in range(len(grids))]
