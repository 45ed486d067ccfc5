"""The resize of `encoder.pixels.kernels` in plain torch: the integer sums that its weights define."""

from __future__ import annotations

import torch
from torch import Tensor

from encoder.pixels.resize_weights import taps


def resize_bytes(values: Tensor, height: int, width: int) -> Tensor:
    """Resizes uint8 `[3, H, W]` to `[3, height, width]` as `encoder.pixels.resize_weights` says, rows first. Slow."""
    return _resized_last(_resized_last(values, width).transpose(1, 2), height).transpose(1, 2)


def _resized_last(values: Tensor, num_out: int) -> Tensor:
    num_in = values.shape[-1]
    if num_in == num_out:
        return values
    found = taps(num_in, num_out)
    first, weights = (torch.from_numpy(part).to(values.device) for part in (found.first, found.weights))
    total = torch.full(
        (*values.shape[:-1], num_out), 1 << (found.precision - 1), dtype=torch.int32, device=values.device
    )
    for tap in range(weights.shape[1]):
        place = (first + tap).clamp_(max=num_in - 1)  # weights past the end are 0
        total += values[..., place].to(torch.int32) * weights[:, tap]
    return (total >> found.precision).clamp_(0, 255).to(torch.uint8)
