"""Shared by all launches: Triton's options, and the split of a width into powers of two, which block sizes must be."""

from __future__ import annotations

import triton

OPTIONS = {"enable_fp_fusion": True}
"""Options of every launch. A multiplication and an addition become one instruction, rounded once. Triton does so by
default only up to version 3.9; the kernels' speed and their exact results depend on it."""


def parts(width: int, smallest_tail: int = 1) -> tuple[int, int]:
    """Splits `width` into a power of two and a power of two that covers the rest, 0 if there is none.

    One block over 1152 features would idle on 896 of 2048 lanes; 1024 + 128 idles on none. The tail is at least
    `smallest_tail`, since a matrix product has a minimum depth.
    """
    head = 1 << (width.bit_length() - 1)
    return (width, 0) if width == head else (head, max(smallest_tail, triton.next_power_of_2(width - head)))
