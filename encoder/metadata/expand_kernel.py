"""`encoder.metadata.expand.expand` in one launch: each program writes some rows of every table of the batch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from encoder.checkpoint.vision_config import VisionConfig
from encoder.kernels.launch import OPTIONS
from encoder.metadata.expand import Expanded
from encoder.metadata.grid_numbers import num_columns

_BLOCK = 256


@triton.jit
def _image_of(first_ptr: tl.tensor, index: tl.tensor, slots: int, UNIT: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Returns the image of each index, `slots` past the last: the number of later borders that are at most the
    index."""
    image = tl.zeros([BLOCK], tl.int32)
    for slot in range(1, slots + 1):
        image += (tl.load(first_ptr + slot) // UNIT <= index).to(tl.int32)
    return image


# Sizes differ between graphs; without specialisation on them one compiled kernel serves all graphs.
@triton.jit(do_not_specialize=["slots", "tokens", "windows"])
def _expand_kernel(
    arena_ptr: tl.tensor,
    description_ptr: tl.tensor,
    rope_ptr: tl.tensor,
    taps_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    order_ptr: tl.tensor,
    inverse_ptr: tl.tensor,
    windows_ptr: tl.tensor,
    slots: int,
    tokens: int,
    windows: int,
    UNIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first_patch_ptr = description_ptr + slots + 1
    first_window_ptr = first_patch_ptr + slots + 1
    total = tl.load(first_patch_ptr + slots)

    inside = index < total
    mask = index < tokens * UNIT
    image = _image_of(first_patch_ptr, index, slots, 1, BLOCK)
    place = tl.load(description_ptr + image, mask=inside, other=0)
    first = tl.load(first_patch_ptr + image, mask=inside, other=0)
    source_ptr = arena_ptr + place + (index - first) * COLUMNS
    for column in tl.static_range(2):
        tl.store(rope_ptr + 2 * index + column, tl.load(source_ptr + column, mask=inside, other=0), mask=mask)
    if COLUMNS > 2:
        for tap in tl.static_range(4):
            number = tl.load(source_ptr + 2 + tap, mask=inside, other=0)
            tl.store(taps_ptr + 4 * index + tap, number, mask=mask)
            number = tl.load(source_ptr + 6 + tap, mask=inside, other=0)
            tl.store(weights_ptr + 4 * index + tap, number, mask=mask)

    if WINDOWED:
        inside = index < total // UNIT
        mask = index < tokens
        image = _image_of(first_patch_ptr, index, slots, UNIT, BLOCK)
        place = tl.load(description_ptr + image, mask=inside, other=0)
        first = tl.load(first_patch_ptr + image, mask=inside, other=0)
        end = tl.load(first_patch_ptr + image + 1, mask=inside, other=0)
        source_ptr = arena_ptr + place + (end - first) * COLUMNS + 2 * (index - first // UNIT)
        order = tl.load(source_ptr, mask=inside, other=0) + first // UNIT
        inverse = tl.load(source_ptr + 1, mask=inside, other=0) + first // UNIT
        tl.store(order_ptr + index, tl.where(inside, order, index), mask=mask)
        tl.store(inverse_ptr + index, tl.where(inside, inverse, index), mask=mask)

        inside = index < tl.load(first_window_ptr + slots)
        image = _image_of(first_window_ptr, index, slots, 1, BLOCK)
        place = tl.load(description_ptr + image, mask=inside, other=0)
        first = tl.load(first_patch_ptr + image, mask=inside, other=0)
        end = tl.load(first_patch_ptr + image + 1, mask=inside, other=0)
        first_window = tl.load(first_window_ptr + image, mask=inside, other=0)
        skipped = (end - first) * COLUMNS + 2 * ((end - first) // UNIT)
        border = tl.load(arena_ptr + place + skipped + index - first_window, mask=inside, other=0) + first
        tl.store(windows_ptr + index, tl.where(inside, border, total), mask=index < windows + 1)


def expand(
    arena: Tensor, description: Tensor, config: VisionConfig, tokens: int, windows: int
) -> tuple[Expanded, Tensor | None]:
    """See `encoder.metadata.expand.Expand`. No synchronisation."""
    patches = tokens * config.merge_unit
    table, windowed = bool(config.num_position_embeddings), bool(config.window_size)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=arena.device)

    rope = empty(patches, 2)
    taps = empty(patches, 4) if table else None
    weights = empty(patches, 4) if table else None
    order = empty(tokens) if windowed else None
    inverse = empty(tokens) if windowed else None
    borders = empty(windows + 1) if windowed else None
    _expand_kernel[(triton.cdiv(max(patches, windows + 1), _BLOCK),)](
        arena,
        description,
        rope,
        # Stand-ins for tables that the tower does not have; the kernel does not write them.
        *(rope if tensor is None else tensor for tensor in (taps, weights, order, inverse, borders)),
        description.shape[1] - 1,
        tokens,
        windows,
        UNIT=config.merge_unit,
        COLUMNS=num_columns(config),
        WINDOWED=windowed,
        BLOCK=_BLOCK,
        num_warps=4,
        **OPTIONS,
    )
    weights = None if weights is None else weights.view(torch.float32)
    return Expanded(rope, taps, weights, order, inverse), borders
