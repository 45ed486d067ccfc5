"""Kernels that are launched while the kernel before them still runs (programmatic dependent launch, Hopper and newer).

A kernel that is launched so begins with `begin_after`, before it reads or writes anything that others use too. It must
not know what the kernels do.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

FIRST_CAPABILITY = (9, 0)
"""From which on a device has it."""


@triton.jit
def begin_after(OVERLAP: tl.constexpr) -> None:
    """Waits until all that came before is done and seen; from then on the next kernel may be put on the device."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


def overlapping(x: Tensor) -> dict[str, bool]:
    """What a kernel over `x` is launched with: its constant `OVERLAP`, and Triton's option where the device has it."""
    if x.is_cuda and _overlaps(x.device.index):
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


@lru_cache
def _overlaps(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY
