"""Epilogues of QuACK's GEMMs: small functions of the accumulator, compiled into the GEMM.

Values are float32; `acc_pair` holds two adjacent features.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from quack.activation import gelu_erf, gelu_tanh_approx
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
def rotate(acc: Any, row: Any, column: Any, frequency: Any, bias: Any) -> dict[str, Any]:  # noqa: ANN401
    """Adds the bias and rotates each pair by the angle of its patch; see `rope_in_gemm.pair_frequencies`.

    Angles stay below some hundreds, where the device's fast sine has an error of 2e-5, 1/200 of a bfloat16 rounding.
    """
    return {"D": _rotated(acc + bias, row, column, frequency)}


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
def rotate_scaled(
    acc: Any,  # noqa: ANN401
    row: Any,  # noqa: ANN401
    column: Any,  # noqa: ANN401
    scale: Any,  # noqa: ANN401
    frequency: Any,  # noqa: ANN401
    bias: Any,  # noqa: ANN401
    weight_scale: Any,  # noqa: ANN401
) -> dict[str, Any]:
    """Like `rotate`, for 8-bit operands."""
    return {"D": _rotated(acc * (weight_scale * scale) + bias, row, column, frequency)}


def _rotated(pair: Any, row: Any, column: Any, frequency: Any) -> Any:  # noqa: ANN401
    first, second = unpack(pair)
    by_row, by_column = unpack(frequency)
    angle = cute.math.fma(row, by_row, column * by_column)
    sin = cute.math.sin(angle, fastmath=True)
    cos = cute.math.cos(angle, fastmath=True)
    return pack(first * cos - second * sin, second * cos + first * sin)


@gemm_epilogue(ops={"bias": RowVecLoad("bias")})
def gelu(acc: Any, bias: Any) -> dict[str, Any]:  # noqa: ANN401
    """Adds the bias and applies the exact GELU."""
    return {"D": gelu_erf(acc + bias)}


@gemm_epilogue(
    ops={
        "scale": ColVecLoad("scale"),
        "bias": RowVecLoad("bias"),
        "weight_scale": RowVecLoad("weight_scale"),
        "hidden_scale": RowVecLoad("hidden_scale"),
    }
)
def gelu_scaled(acc: Any, scale: Any, bias: Any, weight_scale: Any, hidden_scale: Any) -> dict[str, Any]:  # noqa: ANN401
    """Applies GELU to a GEMM of 8-bit operands, times a factor that the next GEMM's weights undo; writes 8 bits."""
    return {"D": gelu_tanh_approx(acc * (weight_scale * scale) + bias) * hidden_scale}


@gemm_epilogue(ops={"scale": ColVecLoad("scale"), "weight_scale": RowVecLoad("weight_scale")})
def add_scaled(acc: Any, c: Any, scale: Any, weight_scale: Any) -> dict[str, Any]:  # noqa: ANN401
    """Like `add`, for 8-bit operands, each with a scale per row."""
    return {"D": acc * (weight_scale * scale) + c}


@gemm_epilogue(ops={"weight_scale": RowVecLoad("weight_scale")})
def add_weighted(acc: Any, c: Any, weight_scale: Any) -> dict[str, Any]:  # noqa: ANN401
    """Like `add`, for rows written by `gelu_scaled`."""
    return {"D": acc * weight_scale + c}


@gemm_epilogue()
def add(acc: Any, c: Any) -> dict[str, Any]:  # noqa: ANN401
    """Adds the residual."""
    return {"D": acc + c}


@gemm_epilogue()
def keep(acc: Any) -> dict[str, Any]:  # noqa: ANN401
    """Returns the accumulator in the output's dtype."""
    return {"D": acc}
