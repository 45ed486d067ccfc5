"""What QuACK's products do before they write: small functions over the accumulator, compiled into the product.

Values are float32; `acc_pair` holds two features that lie side by side.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from quack.epilogue.frontend import gemm_epilogue, pack, unpack
from quack.epilogue.ops import ColVecLoad, RowVecLoad


@gemm_epilogue(
    ops={
        "row": ColVecLoad("row"),
        "column": ColVecLoad("column"),
        "frequency": RowVecLoad("frequency"),
        "bias": RowVecLoad("bias"),
    },
    mode="acc_pair",
)
def turn(acc: Any, row: Any, column: Any, frequency: Any, bias: Any) -> dict[str, Any]:  # noqa: ANN401
    """Adds the bias and turns each pair by the angle of its patch; see `rotation.pair_frequencies`.

    Angles stay below some hundreds, where the device's fast sine is 2e-5 off, a two-hundredth of a bfloat16 rounding.
    """
    first, second = unpack(acc + bias)
    by_row, by_column = unpack(frequency)
    angle = cute.math.fma(row, by_row, column * by_column)
    sin = cute.math.sin(angle, fastmath=True)
    cos = cute.math.cos(angle, fastmath=True)
    return {"D": pack(first * cos - second * sin, second * cos + first * sin)}


@gemm_epilogue()
def add(acc: Any, c: Any) -> dict[str, Any]:  # noqa: ANN401
    """Adds what is there already."""
    return {"D": acc + c}


@gemm_epilogue()
def keep(acc: Any) -> dict[str, Any]:  # noqa: ANN401
    """The sum as it is, in the output's dtype."""
    return {"D": acc}
