"""Which forward runs a tower: eager, compiled by torch, or fused; and by which attention. "auto" is resolved here.

The eager tower is the reference: a fused one that does not equal it is not used. It must not know graphs or batches.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from configs.encoder_config import EncoderConfig
from encoder.attention import AttentionBackend, choose_backend
from encoder.attention_backends import BackendUnavailableError, load, unfit
from encoder.expansion import Expand, expand, metadata
from encoder.fp8_tower import check_fp8, narrowed
from encoder.fp8_trial import Agreement
from encoder.geometry import Grid
from encoder.grid_tables import GridTables, Layout
from encoder.image_rules import ImageRules
from encoder.metadata import TowerMetadata
from encoder.vision_config import VisionConfig
from encoder.weights import VisionTower

logger = logging.getLogger(__name__)

Run = Callable[[Tensor, TowerMetadata], Tensor]

# Two correct forwards round in different places: 1e-2 apart in bfloat16, where wrong ones were 0.4 and more apart.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 4e-2}
# Weights that make much of roundings get more, up to here: by how much a change of the input by one rounding grows.
_GROWN_ROUNDINGS, _MOST_TOLERANCE = 4.0, 0.2
# The trial images' error with 8 bits is not the largest there is.
_GROWN_FP8 = 2.0
_TRIAL: list[Grid] = [(1, 16, 20), (1, 8, 8), (1, 4, 30), (2, 6, 8)]


@dataclass(frozen=True)
class TowerForward:
    """A tower as it is run."""

    name: str
    """"eager", "compiled", "fused" or "fp8": embeddings of two of them differ by rounding."""
    run: Run
    """`[num_patches, patch_dim]` and the metadata to `[num_tokens, width]`."""
    config: VisionConfig
    dtype: torch.dtype
    device: torch.device
    backend: AttentionBackend
    """What metadata names; a fused tower goes by its own plan."""
    attention: str
    """In words, for a log."""
    expand: Expand = expand
    length_classes: tuple[int, ...] = ()
    """Bounds on an image's patches at which attention changes its kernel."""
    tolerance: float = TOLERANCES[torch.float32]
    """Of two correct ways to run it: ‖one - other‖ / ‖other‖ of an image."""
    run_into: Callable[[Tensor, TowerMetadata, Tensor], None] | None = None
    """As `run`, into memory of the caller's; None where it cannot."""
    agreement: Agreement | None = None
    """Of one in 8 bits with the same in bfloat16, on trial images."""

    @property
    def compiles(self) -> bool:
        """Whether the first call of a shape may compile, which a capture must not see."""
        return self.name == "compiled"

    @property
    def reads_borders(self) -> bool:
        """Whether attention reads its borders on the device, as a graph needs it to."""
        return self.backend is not AttentionBackend.SDPA

    def metadata(
        self,
        arena: Tensor,
        described: Tensor,
        *,
        tokens: int,
        frames: int,
        windows: int,
        max_seqlen: int,
        image_tokens: tuple[int, ...],
    ) -> TowerMetadata:
        """Laid out on the device from the batch's description; sizes are capacities. Waits for nothing."""
        expanded = self.expand(arena, described, self.config, tokens, windows)
        return metadata(
            expanded,
            described,
            self.config,
            tokens=tokens,
            frames=frames,
            max_seqlen=max_seqlen,
            image_tokens=image_tokens,
            backend=self.backend,
        )

    def exact_metadata(self, tables: GridTables, layout: Layout) -> TowerMetadata:
        """Of a batch at its own size."""
        return self.metadata(
            tables.arena,
            layout.described(layout.slots, tables.device),
            tokens=layout.num_tokens,
            frames=layout.num_frames,
            windows=layout.num_windows,
            max_seqlen=layout.max_seqlen,
            image_tokens=layout.image_tokens,
        )


def choose_forward(tower: VisionTower, config: EncoderConfig, rules: ImageRules | None = None) -> TowerForward:
    """The forward that the settings ask for on the tower's device.

    `rules`: of the checkpoint's images, for what is tried on images; None takes the processor's defaults.

    Raises:
        ValueError: fused kernels or 8-bit products are asked for on a device that has none. FusionError: fused kernels
            are, and do not give what the eager tower gives. Fp8RefusedError: 8 bits are, and differ by too much.
            BackendUnavailableError: an attention backend is asked for and cannot be had.
    """
    if config.fp8:
        check_fp8(tower.device, tower.dtype)
    if config.fusion is True and tower.device.type != "cuda":
        raise ValueError(f"fusion is true, and the device is {tower.device}: fused kernels need a GPU")
    if config.fusion is True or (config.fusion == "auto" and not config.compile_mm_encoder and _can_fuse(tower)):
        try:
            return _fused(tower, config, rules)
        except Exception as error:  # kernels' compilers have errors of their own
            asked_for = isinstance(error, BackendUnavailableError) and config.attention_backend != "auto"
            if config.fusion is True or config.fp8 or asked_for:
                raise
            logger.warning("no fused kernels: %s", error)
    if config.fp8:
        raise ValueError("fp8 is true, and fused kernels, which it needs, cannot be had for this tower")
    backend = _eager_backend(tower, config)
    run: Run = _compiled(tower) if config.compile_mm_encoder else tower
    name = "compiled" if config.compile_mm_encoder else "eager"
    tolerance = _tolerance(tower) if tower.device.type == "cuda" else TOLERANCES[tower.dtype]
    return TowerForward(name, run, tower.config, tower.dtype, tower.device, backend, backend.value, tolerance=tolerance)


class FusionError(ValueError):
    """A fused forward that does not give what the eager one gives."""


def _can_fuse(tower: VisionTower) -> bool:
    """Heads that no matrix product fits are for the eager tower."""
    return (
        tower.device.type == "cuda"
        and importlib.util.find_spec("triton") is not None
        and unfit(
            AttentionBackend.TRITON, torch.cuda.get_device_capability(tower.device), tower.dtype, tower.config.head_dim
        )
        is None
    )


def _fused(tower: VisionTower, config: EncoderConfig, rules: ImageRules | None) -> TowerForward:
    from encoder.fused import fuse
    from encoder.fused_attention import AttentionPlan, Way
    from encoder.kernels.expand import expand as expand_in_one_launch
    from encoder.kernels.short_attention import LONGEST

    plan = None
    if config.attention_backend == "triton":
        triton = AttentionBackend.TRITON
        plan = AttentionPlan((LONGEST,), (Way(triton, turns=True), Way(triton)))
    elif config.attention_backend != "auto":
        plan = AttentionPlan.single(Way(AttentionBackend(config.attention_backend)))
    fused = fuse(tower, plan)
    tolerance = _tolerance(tower)
    eager = tower.prepare(_TRIAL)
    patches = torch.randn(eager.num_patches, tower.config.patch_dim, device=tower.device)
    with torch.inference_mode():
        error = largest_error(fused(patches, fused.prepare(_TRIAL)), tower(patches, eager), eager.image_tokens)
    if not error <= tolerance:
        raise FusionError(f"they differ from the eager tower by {error:.2e}, the limit is {tolerance:.2e}")
    agreement = None
    if config.fp8:
        fused, agreement = narrowed(tower, fused, config, rules)
        # A graph and an eager run of fewer rows may fall on two sides of the rows from which on 8 bits are used.
        tolerance = min(max(tolerance, _GROWN_FP8 * agreement.largest_error), _MOST_TOLERANCE)
    ways = fused.attention_plan.ways
    bounds = fused.attention_plan.lengths[: len(ways) - 1]
    changes = tuple(bound for bound, way, following in zip(bounds, ways, ways[1:], strict=False) if way != following)
    return TowerForward(
        "fused" if agreement is None else "fp8",
        fused,
        tower.config,
        tower.dtype,
        tower.device,
        AttentionBackend.VARLEN,
        str(fused.attention_plan),
        expand_in_one_launch,
        changes,
        tolerance,
        fused.into,
        agreement,
    )


@torch.inference_mode()
def _tolerance(tower: VisionTower) -> float:
    """The dtype's, or more where the tower makes more of roundings. Waits for the device."""
    metadata = tower.prepare(_TRIAL)
    patches = torch.randn(metadata.num_patches, tower.config.patch_dim, device=tower.device)
    rounded = patches * (1 + torch.finfo(tower.dtype).eps * (torch.rand_like(patches) - 0.5))
    grown = largest_error(tower(rounded, metadata), tower(patches, metadata), metadata.image_tokens)
    return min(max(TOLERANCES[tower.dtype], _GROWN_ROUNDINGS * grown), _MOST_TOLERANCE)


def _eager_backend(tower: VisionTower, config: EncoderConfig) -> AttentionBackend:
    if config.attention_backend == "auto":
        return choose_backend(tower.device, tower.dtype, tower.config.head_dim).backend
    backend = AttentionBackend(config.attention_backend)
    if backend is AttentionBackend.SDPA:
        return backend
    if tower.device.type != "cuda":
        raise BackendUnavailableError(f"attention backend {backend.value!r} needs a GPU; the device is {tower.device}")
    reason = unfit(backend, torch.cuda.get_device_capability(tower.device), tower.dtype, tower.config.head_dim)
    if reason is not None:
        raise BackendUnavailableError(f"attention backend {backend.value!r}: {reason}")
    load(backend)
    return backend


def _compiled(tower: VisionTower) -> VisionTower:
    """The tower with each block compiled, for any number of rows; it shares its weights with `tower`, which stays.

    Block by block, since all blocks are one piece of code to compile.
    """
    shared = {id(tensor): tensor for tensor in chain(tower.parameters(), tower.buffers())}
    compiled = copy.deepcopy(tower, shared)
    for block in compiled.blocks:
        assert isinstance(block, nn.Module)
        block.compile(dynamic=True)
    return compiled


def largest_error(found: Tensor, expected: Tensor, image_tokens: tuple[int, ...]) -> float:
    """The largest ‖found - expected‖ / ‖expected‖ of an image. Waits for the device."""
    return float(largest_error_on_device(found, expected, image_tokens))


def largest_error_on_device(found: Tensor, expected: Tensor, image_tokens: tuple[int, ...]) -> Tensor:
    """The same as a float32 scalar, infinite for NaN. Nothing is waited for."""
    errors = [
        (ours - theirs).norm() / theirs.norm()
        for ours, theirs in zip(
            found.float().split(list(image_tokens)), expected.float().split(list(image_tokens)), strict=True
        )
    ]
    # NaN must win over every number.
    return torch.stack(errors).nan_to_num(float("inf"), posinf=float("inf")).max()
