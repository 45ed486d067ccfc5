"""What a request's fields may ask of the language model, at the bounds and over them."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.body_bounds import MAX_GRAMMAR_CHARACTERS, MAX_ITEMS, check
from deployments.errors import ApiError

MOST = 128


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"n": MOST},
        {"n": None, "prompt": None},
        {"prompt": ["x"] * MOST},
        {"prompt": list(range(100_000))},
        {"prompt": "x" * 100_000, "n": MOST},
        {"prompt": ["x"] * 16, "n": 8},
        {"n": "many", "stop": "x" * 1000, "tools": 7, "logit_bias": [], "response_format": "json"},
        {"n": -5, "prompt": []},
        {"response_format": {"schema": "x" * (MAX_GRAMMAR_CHARACTERS - 100)}},
    ],
)
def test_what_passes(body: dict[str, Any]) -> None:
    check(body, max_answers=MOST)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"n": MOST + 1}, "129 answers are asked for, the limit is 128 a request"),
        ({"n": 10**400}, "answers are asked for"),
        ({"prompt": ["x"] * (MOST + 1)}, "129 answers"),
        ({"prompt": [[1], [2]], "n": 65}, "130 answers"),
        ({"prompt": [1, "x"] * 65}, "130 answers"),
        ({"response_format": {"schema": "x" * MAX_GRAMMAR_CHARACTERS}}, "response_format has 65"),
        ({"structured_outputs": {"regex": "a|" * MAX_GRAMMAR_CHARACTERS}}, "the limit is 65536"),
        ({"text": {"format": {"schema": ["x"] * MAX_GRAMMAR_CHARACTERS}}}, "the limit is 65536"),
        *(({name: ["x"] * (most + 1)}, f"{most + 1} entries, the limit is {most}") for name, most in MAX_ITEMS.items()),
        ({"logit_bias": dict.fromkeys(map(str, range(5000)), 1)}, "logit_bias has 5000 entries"),
    ],
)  # fmt: skip
def test_what_does_not(body: dict[str, Any], told: str) -> None:
    with pytest.raises(ApiError, match=told) as refused:
        check(body, max_answers=MOST)
    assert refused.value.status == 400


def test_what_cannot_be_written_is_over_the_limit() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ApiError, match="the limit is"):
        check({"response_format": {"schema": deep}}, max_answers=MOST)
