"""Files of lines of JSON: what ends a line, and errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.traces import TraceError, read_lines


def test_lines_end_with_line_feeds_only(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_bytes('{"id": "a\u2028b"}\r\n{"id": "c",\r"more": 1}\n'.encode())
    assert read_lines(file, lambda line: line["id"]) == ["a\u2028b", "c"]
    file.write_bytes(b"")
    assert read_lines(file, dict) == []


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'\xff{"id": 1}', "t.jsonl: 'utf-8' codec can't decode"),
        (b'{"id": 1}\n\n{"id"', "t.jsonl, line 3: JSONDecodeError"),
        (b"[" * 100_000, "t.jsonl, line 1: RecursionError"),
        (b'{"id": 1}\n{}', "t.jsonl, line 2: the key 'id' is missing"),
    ],
)
def test_what_cannot_be_read_is_named(content: bytes, told: str, tmp_path: Path) -> None:
    """Another encoding ended the command with a traceback."""
    file = tmp_path / "t.jsonl"
    file.write_bytes(content)
    with pytest.raises(TraceError) as refused:
        read_lines(file, lambda line: line["id"])
    assert str(refused.value).startswith(told)
