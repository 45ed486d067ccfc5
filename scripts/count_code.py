"""Counts the lines of code of the distributed packages, without blank lines, comments and docstrings.

    python scripts/count_code.py            each package of the distribution, and the sum
    python scripts/count_code.py tests      any other folders

A line counts if a token of code begins on it or spans it; a string that is a statement by itself does not count.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOT_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def shipped_packages() -> list[str]:
    """Returns the top-level packages of the distribution."""
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    return [name.rstrip("*") for name in found]


def code_lines(source: str) -> int:
    """Returns the number of lines of `source` that contain code."""
    strings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - strings)


def main(arguments: Sequence[str]) -> int:
    total = 0
    for package in arguments or shipped_packages():
        number = sum(code_lines(path.read_text()) for path in sorted((ROOT / package).rglob("*.py")))
        print(f"{package:14}{number:7,}")
        total += number
    print(f"{'total':14}{total:7,}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
