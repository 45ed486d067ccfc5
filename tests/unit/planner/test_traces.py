"""Files of lines of JSON: what ends a line, errors, and values out of range."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.traces import RULES, TraceError, read_lines, read_requests


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


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"images": [{"w": -640, "h": 480}]}, "image of -640x480 pixels"),
        ({"images": [{"w": -640, "h": -480}]}, "image of -640x-480 pixels"),
        ({"prompt_tokens": 10**400}, "0 to 2147483648"),
        ({"output_tokens": 2**31 + 1}, "1 to 2147483648"),
    ],
)
def test_values_out_of_range_are_refused(change: dict[str, object], told: str, tmp_path: Path) -> None:
    """A width of -640 was planned as a small picture, and 10**400 tokens ended the command with a traceback."""
    line = {"t": 0, "images": [], "prompt_tokens": 1, "output_tokens": 1}
    file = tmp_path / "t.jsonl"
    file.write_text(f"{json.dumps(line)}\n{json.dumps(line | {'t': 1} | change)}\n")
    with pytest.raises(TraceError, match=r"t\.jsonl, line 2") as refused:
        read_requests(file, RULES["qwen3_vl"])
    assert told in str(refused.value)
