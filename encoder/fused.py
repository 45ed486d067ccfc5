"""A loaded tower made fast: fused kernels and the attention backends that measure best, behind the tower's contract.

The eager tower stays the reference. Needs CUDA and Triton. It must not know graphs, batches of requests or images.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from encoder.attention import AttentionBackend, BackendChoice
from encoder.attention_plan import check_plan, measure_backends
from encoder.fused_attention import AttentionPlan
from encoder.fused_qwen3 import FusedQwen3Forward
from encoder.fused_qwen25 import FusedQwen25Forward
from encoder.geometry import Grid
from encoder.metadata import MetadataBuilder, TowerMetadata
from encoder.products import TorchProducts
from encoder.qwen3_vl import Qwen3VisionTower
from encoder.vision_config import VisionConfig
from encoder.weights import VisionTower

logger = logging.getLogger(__name__)


class FusedTower:
    """As the tower it was made of: patches to embeddings `[num_tokens, width]`.

    The forward is a pure function of the patches and of the metadata's tensors, so that it can be captured. Metadata
    may hold padding: rows past the last border of `frames` belong to no segment, and whatever is in them, NaN
    included, the rows of the images come out the same.
    """

    def __init__(self, tower: VisionTower, plan: AttentionPlan, products: TorchProducts) -> None:
        # Not the tower itself: what was repacked here may go when its owner lets it go.
        self._config, self._dtype, self._device = tower.config, tower.dtype, tower.device
        self._metadata = MetadataBuilder(tower.config)
        self._forward: FusedQwen3Forward | FusedQwen25Forward
        if isinstance(tower, Qwen3VisionTower):
            self._forward = FusedQwen3Forward(tower, plan, products)
        else:
            self._forward = FusedQwen25Forward(tower, plan, products)
        self.attention_plan, self.products = plan, products

    @property
    def config(self) -> VisionConfig:
        """The checkpoint's facts."""
        return self._config

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights and of the output."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are and the metadata goes."""
        return self._device

    @property
    def attention_choice(self) -> BackendChoice:
        """The backend of the longest segments."""
        return BackendChoice(self.attention_plan.ways[-1].backend)

    def prepare(self, grid_thw: Sequence[Grid]) -> TowerMetadata:
        """`grid_thw`: `(t, h, w)` in patches for each image. Raises `ValueError` for an impossible grid."""
        metadata = self._metadata.build(grid_thw, device=self._device, backend=AttentionBackend.VARLEN)
        plan, frames, windows = self.attention_plan, metadata.frames, metadata.windows
        return replace(
            metadata,
            frames=replace(frames, backend=plan.way(frames.max_seqlen).backend),
            windows=None if windows is None else replace(windows, backend=plan.way(windows.max_seqlen).backend),
        )

    @torch.inference_mode()
    def __call__(self, patches: Tensor, metadata: TowerMetadata) -> Tensor:
        """`patches`: `[num_patches, patch_dim]`, any float dtype. Returns `[num_tokens, width]`, the tower's dtype."""
        out = patches.new_empty(metadata.num_tokens, self.config.width, dtype=self.dtype)
        self.into(patches, metadata, out)
        return out

    @torch.inference_mode()
    def into(self, patches: Tensor, metadata: TowerMetadata, out: Tensor) -> None:
        """The same into `out`, contiguous."""
        metadata.check(patches, self.config.patch_dim)
        with torch.cuda.device(self.device):
            self._forward(patches.to(self.dtype), metadata, out)


def fuse(tower: VisionTower, plan: AttentionPlan | None = None, products: TorchProducts | None = None) -> FusedTower:
    """The fast form of a loaded tower on a CUDA device.

    `plan`: None measures the attention backends that are installed. `products`: None takes QuACK's where they are
    installed and fit, else cuBLAS's.
    Shares the tower's weights, except those that have to be padded or put together: who drops the tower frees those.

    Raises:
        ValueError: the tower is on another device.
        BackendUnavailableError: the plan names a backend that is not installed or does not fit, or none does.
    """
    if tower.device.type != "cuda":
        raise ValueError(f"the fused forward needs a CUDA device, and the tower is on {tower.device}")
    config = tower.config
    if plan is None:
        plan = measure_backends(config.num_heads, config.head_dim, tower.dtype, tower.device)
    else:
        check_plan(plan, config.head_dim, tower.dtype, tower.device)
    return FusedTower(tower, plan, products or best_products(tower.dtype, tower.device))


def best_products(dtype: torch.dtype, device: torch.device) -> TorchProducts:
    """QuACK's products for bfloat16 on Hopper where the package is there, else cuBLAS's."""
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) == (9, 0):
        try:
            from encoder.quack_products import QuackProducts
        except ImportError:
            logger.info("products by cuBLAS; QuACK's, which come with FlashAttention-4, would be faster here")
        else:
            return QuackProducts(device)
    return TorchProducts()
