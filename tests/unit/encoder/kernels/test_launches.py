"""How kernels are launched: with which options, and which of them the check at the start covers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from encoder.kernels.launch import OPTIONS

ENCODER = Path(__file__).parents[4] / "encoder"


def _launches() -> list[tuple[str, ast.Call]]:
    """Every `name_kernel[grid](...)` of the encoder."""
    return [
        (f"{file.relative_to(ENCODER)}: {call.func.value.id}", call)
        for file in sorted(ENCODER.rglob("*.py"))
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Subscript)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id.endswith("_kernel")
    ]


@pytest.mark.parametrize(("name", "call"), _launches(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_launch_names_tritons_options(name: str, call: ast.Call) -> None:
    """Triton 3.10 stops fusing multiplications with additions by default: kernels would have become slower, and their
    numbers others, with an update of Triton. Every launch asks for it.
    """
    assert OPTIONS["enable_fp_fusion"] is True
    spread = {ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg is None}
    assert "OPTIONS" in spread, f"{name} is launched without encoder.kernels.launch.OPTIONS"


def test_launches_are_found_in_every_package() -> None:
    """Only those of `encoder/kernels` were looked at, and pixels and metadata have kernels of their own."""
    packages = {name.partition("/")[0] for name, _ in _launches()}
    assert packages == {"kernels", "metadata", "pixels"}
