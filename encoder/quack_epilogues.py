"""What QuACK's products do before they write: small functions over the accumulator, compiled into the product.

Values are float32; `acc_pair` holds two features that lie side by side.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from quack.activation import gelu_tanh_approx
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
    return {"D": _turned(acc + bias, row, column, frequency)}


@gemm_epilogue(
    ops={
        "row": ColVecLoad("row"),
        "column": ColVecLoad("column"),
        "scale": ColVecLoad("scale"),
        "frequency": RowVecLoad("frequency"),
        "bias": RowVecLoad("bias"),
        "weight_scale": RowVecLoad("weight_scale"),
    },
    mode="acc_pair",
)
def turn_scaled(
    acc: Any,  # noqa: ANN401
    row: Any,  # noqa: ANN401
    column: Any,  # noqa: ANN401
    scale: Any,  # noqa: ANN401
    frequency: Any,  # noqa: ANN401
    bias: Any,  # noqa: ANN401
    weight_scale: Any,  # noqa: ANN401
) -> dict[str, Any]:
    """As `turn`, of factors in 8 bits."""
    return {"D": _turned(acc * (weight_scale * scale) + bias, row, column, frequency)}


def _turned(pair: Any, row: Any, column: Any, frequency: Any) -> Any:  # noqa: ANN401
    first, second = unpack(pair)
    by_row, by_column = unpack(frequency)
    angle = cute.math.fma(row, by_row, column * by_column)
    sin = cute.math.sin(angle, fastmath=True)
    cos = cute.math.cos(angle, fastmath=True)
    return pack(first * cos - second * sin, second * cos + first * sin)


@gemm_epilogue(
    ops={
        "scale": ColVecLoad("scale"),
        "bias": RowVecLoad("bias"),
        "weight_scale": RowVecLoad("weight_scale"),
        "between": RowVecLoad("between"),
    }
)
def gelu_scaled(acc: Any, scale: Any, bias: Any, weight_scale: Any, between: Any) -> dict[str, Any]:  # noqa: ANN401
    """GELU of a product of factors in 8 bits, times a factor that the next product takes back, to 8 bits."""
    return {"D": gelu_tanh_approx(acc * (weight_scale * scale) + bias) * between}


@gemm_epilogue(ops={"scale": ColVecLoad("scale"), "weight_scale": RowVecLoad("weight_scale")})
def add_scaled(acc: Any, c: Any, scale: Any, weight_scale: Any) -> dict[str, Any]:  # noqa: ANN401
    """As `add`, of factors in 8 bits with a scale each."""
    return {"D": acc * (weight_scale * scale) + c}


@gemm_epilogue(ops={"weight_scale": RowVecLoad("weight_scale")})
def add_weighted(acc: Any, c: Any, weight_scale: Any) -> dict[str, Any]:  # noqa: ANN401
    """As `add`, of what `gelu_scaled` has written."""
    return {"D": acc * weight_scale + c}


@gemm_epilogue()
def add(acc: Any, c: Any) -> dict[str, Any]:  # noqa: ANN401
    """Adds what is there already."""
    return {"D": acc + c}


@gemm_epilogue()
def keep(acc: Any) -> dict[str, Any]:  # noqa: ANN401
    """The sum as it is, in the output's dtype."""
    return {"D": acc}
