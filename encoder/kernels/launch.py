"""How a width is cut into the powers of two that blocks must be."""

from __future__ import annotations


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number` (at least 1)."""
    return 1 << max(number - 1, 0).bit_length()


def parts(width: int, smallest_tail: int = 1) -> tuple[int, int]:
    """`width` as a power of two plus a power of two that covers the rest, 0 if there is none.

    One block over 1152 features would idle on 896 lanes of 2048: 1024 + 128 idles on none. The tail is at least
    `smallest_tail`, since a matrix product has a smallest depth.
    """
    head = 1 << (width.bit_length() - 1)
    return (width, 0) if width == head else (head, max(smallest_tail, next_power_of_2(width - head)))
