"""Programmatic dependent launch (Hopper and newer): a kernel is launched while the kernel before it still runs.

Such a kernel begins with `begin_after`, before it accesses any memory that other kernels use. This module is
independent of what the kernels compute.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FIRST_CAPABILITY = (9, 0)
"""First compute capability with programmatic dependent launch."""


@triton.jit
def begin_after(OVERLAP: tl.constexpr) -> None:
    """Waits until preceding kernels have finished and their writes are visible; then the next kernel may launch."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


def overlapping(x: Tensor) -> dict[str, bool]:
    """Returns the launch arguments of a kernel over `x`: its constant `OVERLAP`, and Triton's option if supported."""
    if x.is_cuda and _overlaps(x.device.index):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


@lru_cache
def _overlaps(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY
