"""Helpers for Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence


def table_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def table_rule(columns: int) -> str:
    return "|---" * columns + "|"
