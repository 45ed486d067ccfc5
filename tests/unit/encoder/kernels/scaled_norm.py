"""`norm` in 8 bits, with the scales of its rows."""

from __future__ import annotations

import torch
from torch import Tensor

from encoder.kernels.norm import norm


def norm_scaled(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, **options: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns float8_e4m3fn `[rows, width]` and float32 `[rows, 1]`. `options`: those of `norm`."""
    scales = x.new_empty(x.shape[0], 1, dtype=torch.float32)
    return norm(x, weight, bias, eps, **options, scales=scales), scales
