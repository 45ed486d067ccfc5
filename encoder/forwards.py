"""Chooses the forward of a tower (eager, compiled by torch, fused, fp8) and its attention backend; resolves "auto".

The eager tower is the reference: a fused forward whose error is too large beside the eager tower's is not used.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor, nn

from configs.encoder_config import EncoderConfig
from encoder.checkpoint.image_rules import ImageRules
from encoder.checkpoint.vision_config import VisionConfig
from encoder.device_errors import check_device
from encoder.fp8.tower import build_fp8_tower, check_fp8
from encoder.fp8.validation import Agreement
from encoder.fused.gemm import Gemm
from encoder.metadata.device_tables import GridTables, Layout, batch_metadata
from encoder.metadata.expand import Expand, expand
from encoder.metadata.geometry import Grid
from encoder.metadata.segments import AttentionBackend
from encoder.metadata.tower_metadata import TowerMetadata
from encoder.packing.run_counts import Fallback
from encoder.start_check import BATCHES, MAX_TOLERANCE, TOLERANCES, FusionError, StartCheck, rounding_tolerance
from encoder.towers.attention import choose_backend
from encoder.towers.backends import BackendUnavailableError, check_backend, unsupported_reason
from encoder.towers.tower import VisionTower

logger = logging.getLogger(__name__)

Run = Callable[[Tensor, TowerMetadata], Tensor]

# With 8 bits, images of the start's check may have larger errors than trial images.
_FP8_ERRORS = 2.0


@dataclass(frozen=True)
class TowerForward:
    """The forward chosen for a tower."""

    name: str
    """"eager", "compiled", "fused" or "fp8"; the embeddings of different forwards differ by rounding."""
    run: Run
    """Computes `[num_tokens, width]` from patches `[num_patches, patch_dim]` and their metadata."""
    config: VisionConfig
    dtype: torch.dtype
    device: torch.device
    backend: AttentionBackend
    """The backend named in metadata; a fused tower follows its own plan instead."""
    attention: str
    """Description of the attention backends, for logs."""
    expand: Expand = expand
    length_classes: tuple[int, ...] = ()
    """Segment lengths in patches above which attention uses another kernel."""
    tolerance: float = TOLERANCES[torch.float32]
    """Largest accepted ‖one - other‖ / ‖other‖ of an image between two correct forwards."""
    run_into: Callable[[Tensor, TowerMetadata, Tensor], None] | None = None
    """Like `run`, into memory of the caller; None if the forward does not support it."""
    agreement: Agreement | None = None
    """Errors of the 8-bit forward on trial images; None without 8 bits."""
    fallback: Fallback | None = None
    """Why the forward is not fused although the settings and the device call for it; else None."""
    same_rows_tolerance: float | None = None
    """Like `tolerance`, for two runs with equal row counts, on which 8-bit results depend; None without 8 bits."""

    @property
    def may_compile(self) -> bool:
        """Whether the first call of a shape may compile, which must not happen during a capture."""
        return self.name == "compiled"

    def on_device(self) -> AbstractContextManager[object]:
        """Makes the device the current one, on which kernels are launched; does nothing on the CPU."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def run_grids(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Computes `[num_tokens, width]` from `[num_patches, patch_dim]` and their grids, in a new arena."""
        with self.on_device():
            return self.run(patches, batch_metadata(grids, self.config, self.device, self.backend, self.expand))

    def exact_metadata(self, tables: GridTables, layout: Layout) -> TowerMetadata:
        """Expands the metadata of a batch without padding."""
        return tables.metadata(layout, self.backend, self.expand)


def choose_forward(tower: VisionTower, config: EncoderConfig, rules: ImageRules | None = None) -> TowerForward:
    """Returns the forward that the settings ask for on the tower's device.

    `rules`: the checkpoint's image rules, for trial images; None uses the processor's defaults.

    Raises:
        ValueError: fused kernels or 8-bit GEMMs are required and not available for this device or tower.
        FusionError: fused kernels are required, and the error of their embeddings is too large.
        Fp8RefusedError: 8-bit GEMMs are required, and their errors are larger than the settings allow.
        BackendUnavailableError: the attention backend that the settings name is not available.
        torch.AcceleratorError: a fused kernel left the device unusable.
    """
    if config.fp8:
        check_fp8(tower.device, tower.dtype)
    if config.fused_kernels is True and tower.device.type != "cuda":
        raise ValueError(f"fused_kernels is true, and the device is {tower.device}: fused kernels need a GPU")
    fallback: Fallback | None = None
    eager_only = config.compile_mm_encoder or config.attention_backend == "sdpa"
    automatic = config.fused_kernels == "auto" and not eager_only and _on_gpu(tower)
    if automatic and (unsupported := _fused_unsupported_reason(tower)) is not None:
        fallback = Fallback.UNSUPPORTED
        logger.warning("no fused kernels: %s", unsupported)
    elif automatic or config.fused_kernels is True:
        try:
            return _fused(tower, config, rules)
        except Exception as error:  # kernel compilers raise exceptions of their own classes
            asked_for = isinstance(error, BackendUnavailableError) and config.attention_backend != "auto"
            if config.fused_kernels is True or config.fp8 or asked_for:
                raise
            check_device(tower.device)
            fallback = _fallback(error)
            logger.warning("no fused kernels: %s", error)
    if config.fp8:
        raise ValueError("fp8 is true, and fused kernels, which it needs, are not available for this tower")
    backend = _eager_backend(tower, config)
    run: Run = _compiled(tower) if config.compile_mm_encoder else tower
    name = "compiled" if config.compile_mm_encoder else "eager"
    tolerance = rounding_tolerance(tower) if _on_gpu(tower) else TOLERANCES[tower.dtype]
    return TowerForward(
        name,
        run,
        tower.config,
        tower.dtype,
        tower.device,
        backend,
        backend.value,
        tolerance=tolerance,
        fallback=fallback,
    )


def _fallback(error: Exception) -> Fallback:
    if isinstance(error, FusionError):
        return Fallback.DIFFERS
    return Fallback.BACKEND if isinstance(error, BackendUnavailableError) else Fallback.KERNELS


def _on_gpu(tower: VisionTower) -> bool:
    return tower.device.type == "cuda"


def _fused_unsupported_reason(tower: VisionTower) -> str | None:
    """Returns why fused kernels cannot run this tower on its GPU; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    capability = torch.cuda.get_device_capability(tower.device)
    return unsupported_reason(AttentionBackend.TRITON, capability, tower.dtype, tower.config.head_dim)


def _fused(tower: VisionTower, config: EncoderConfig, rules: ImageRules | None) -> TowerForward:
    from encoder.fused.compile_ahead import compile_processes
    from encoder.fused.tower import best_gemm

    gemm = best_gemm(tower.dtype, tower.device)
    with compile_processes() if gemm.rotates else nullcontext():
        return _fused_with(gemm, tower, config, rules)


def _fused_with(gemm: Gemm, tower: VisionTower, config: EncoderConfig, rules: ImageRules | None) -> TowerForward:
    from encoder.fused.rope_attention import AttentionKernel, AttentionPlan
    from encoder.fused.tower import fuse
    from encoder.kernels.short_attention import LONGEST
    from encoder.metadata.expand_kernel import expand as expand_in_one_launch

    plan = None
    if config.attention_backend == "triton":
        triton = AttentionBackend.TRITON
        plan = AttentionPlan((LONGEST,), (AttentionKernel(triton, rotates=True), AttentionKernel(triton)))
    elif config.attention_backend != "auto":
        plan = AttentionPlan.single(AttentionKernel(AttentionBackend(config.attention_backend)))
    fused = fuse(tower, plan, gemm)
    fused.compile_kernels(BATCHES)
    check = StartCheck(tower)
    kernels = fused.attention_plan.kernels
    bounds = fused.attention_plan.lengths[: len(kernels) - 1]
    changes = tuple(
        bound for bound, one, following in zip(bounds, kernels, kernels[1:], strict=False) if one != following
    )
    forward = TowerForward(
        "fused",
        fused,
        tower.config,
        tower.dtype,
        tower.device,
        AttentionBackend.VARLEN,
        str(fused.attention_plan),
        expand_in_one_launch,
        changes,
        check.tolerance,
        fused.into,
    )
    check(forward.run_grids)
    if not config.fp8:
        return forward
    fused, agreement = build_fp8_tower(tower, fused, config, rules)
    tolerance = max(forward.tolerance, min(_FP8_ERRORS * agreement.whole_error, MAX_TOLERANCE))
    forward = replace(
        forward,
        name="fp8",
        run=fused,
        run_into=fused.into,
        tolerance=tolerance,
        same_rows_tolerance=forward.tolerance,
        agreement=agreement,
    )
    check(forward.run_grids, tolerance)
    return forward


def _eager_backend(tower: VisionTower, config: EncoderConfig) -> AttentionBackend:
    if config.attention_backend == "auto":
        return choose_backend(tower.device, tower.dtype, tower.config.head_dim)
    backend = AttentionBackend(config.attention_backend)
    if backend is AttentionBackend.SDPA:
        return backend
    if tower.device.type != "cuda":
        raise BackendUnavailableError(f"attention backend {backend.value!r} needs a GPU; the device is {tower.device}")
    check_backend(backend, tower.dtype, tower.config.head_dim, tower.device)
    return backend


def _compiled(tower: VisionTower) -> VisionTower:
    """Returns a copy of the tower with each block compiled for any number of rows. It shares its weights with `tower`,
    which does not change.

    Compiles per block, since all blocks have the same code.
    """
    shared = {id(tensor): tensor for tensor in chain(tower.parameters(), tower.buffers())}
    compiled = copy.deepcopy(tower, shared)
    for block in compiled.blocks:
        assert isinstance(block, nn.Module)
        block.compile(dynamic=True)
    return compiled
