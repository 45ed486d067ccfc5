"""What a request's fields may ask of the language model, at the bounds and over them."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.common.api_error import ApiError
from deployments.ingress.http.request_body import MAX_GRAMMAR_CHARACTERS, MAX_ITEMS, check_limits

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
        {"n": True, "stop": "x" * 1000, "tools": 7, "logit_bias": [], "response_format": "json"},
        {"n": -5, "prompt": []},
        {"response_format": {"schema": "x" * (MAX_GRAMMAR_CHARACTERS - 100)}},
    ],
)
def test_what_passes(body: dict[str, Any]) -> None:
    check_limits(body, max_answers=MOST)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"n": MOST + 1}, "129 answers are asked for, the limit is 128 a request"),
        ({"n": 10**400}, "answers are asked for"),
        ({"n": "1000"}, "n must be an integer, got '1000'"),
        ({"n": 1000.0}, "n must be an integer, got '1000.0'"),
        ({"n": "9" * 100}, f"n must be an integer, got '{'9' * 40}'"),
        ({"n": int("9" * 4300), "prompt": ["x"] * 100}, "answers are asked for"),
        ({"prompt": ["x"] * (MOST + 1)}, "129 answers"),
        ({"prompt": [[1], [2]], "n": 65}, "130 answers"),
        ({"prompt": [1, "x"] * 65}, "130 answers"),
        ({"response_format": {"schema": "x" * MAX_GRAMMAR_CHARACTERS}}, "response_format has 65"),
        ({"response_format": {"schema": "語" * MAX_GRAMMAR_CHARACTERS}}, "response_format has 65550 characters"),
        ({"structured_outputs": {"regex": "a|" * MAX_GRAMMAR_CHARACTERS}}, "the limit is 65536"),
        ({"text": {"format": {"schema": ["x"] * MAX_GRAMMAR_CHARACTERS}}}, "the limit is 65536"),
        *(({name: ["x"] * (most + 1)}, f"{most + 1} entries, the limit is {most}") for name, most in MAX_ITEMS.items()),
        ({"logit_bias": dict.fromkeys(map(str, range(5000)), 1)}, "logit_bias has 5000 entries"),
        ({"request_id": "x" * 257}, "request_id has 257 characters, the limit is 256"),
    ],
)  # fmt: skip
def test_what_does_not(body: dict[str, Any], told: str) -> None:
    with pytest.raises(ApiError, match=told) as refused:
        check_limits(body, max_answers=MOST)
    assert refused.value.status == 400


def tool(name: str, *, nested: bool = True, length: int = MAX_GRAMMAR_CHARACTERS, **more: object) -> dict[str, Any]:
    """As the chat routes have it, or, not `nested`, as /v1/responses has it."""
    function = {"name": name, "parameters": {"description": "x" * length}, **more}
    return {"type": "function", "function": function} if nested else {"type": "function", **function}


def messages_tool(name: str, *, length: int = MAX_GRAMMAR_CHARACTERS, **more: object) -> dict[str, Any]:
    """As /v1/messages has it."""
    return {"name": name, "input_schema": {"description": "x" * length}, **more}


@pytest.mark.parametrize(
    ("choice", "tools"),
    [
        ("required", [tool("f")]),
        ("required", [tool("f", length=MAX_GRAMMAR_CHARACTERS // 4) for _ in range(5)]),
        ("required", [tool("f", nested=False)]),
        ({"type": "function", "function": {"name": "f"}}, [tool("e", length=9), tool("f")]),
        ({"type": "function", "name": "f"}, [tool("f", nested=False)]),
        ({"type": "allowed_tools", "mode": "required"}, [tool("f")]),
        ("required", [{"type": "namespace", "tools": [tool("f", nested=False)]}]),
        ("auto", [tool("f", strict=True)]),
        (None, [tool("f", nested=False, strict=True)]),
        ({"type": "any"}, [messages_tool("f")]),
        ({"type": "tool", "name": "f"}, [messages_tool("e", length=9), messages_tool("f")]),
        ({"type": "auto"}, [messages_tool("f", strict=True)]),
    ],
)
def test_schemas_of_tools_that_become_grammars(choice: object, tools: list[object]) -> None:
    """Where a call is required, named or strict, vLLM compiles the schemas of tools; 128 of any length passed."""
    with pytest.raises(ApiError, match=r"tools has \d+ characters, the limit is 65536"):
        check_limits({"tools": tools, "tool_choice": choice}, max_answers=MOST)


@pytest.mark.parametrize(
    ("choice", "tools"),
    [
        ("auto", [tool("f")]),
        ("none", [tool("f", strict=True)]),
        (None, [tool("f")]),
        ("required", [tool("f", length=MAX_GRAMMAR_CHARACTERS - 100)]),
        ({"type": "function", "function": {"name": "f"}}, [tool("e"), tool("f", length=9)]),
        ("required", ["f", None, {"function": "f"}, {"function": {"parameters": 7}}]),
        ("required", {"function": tool("f")}),
        ({"name": ["f"], "function": 7}, [tool("f", length=9)]),
        ({"type": "auto"}, [messages_tool("f")]),
        ({"type": "none"}, [messages_tool("f", strict=True)]),
    ],
)
def test_schemas_of_tools_that_do_not(choice: object, tools: object) -> None:
    check_limits({"tools": tools, "tool_choice": choice}, max_answers=MOST)


def test_tools_that_messages_add_count_too() -> None:
    """In Anthropic's format, a part of a system message may define a tool."""
    tool = {"type": "tool_definition", "definition": messages_tool("f", strict=True)}
    added = {"type": "tool_addition", "tool": tool}
    body = {"messages": [{"role": "system", "content": [{"type": "text", "tool": 7}, added]}, 7, {"content": "x"}]}
    with pytest.raises(ApiError, match=r"tools has \d+ characters"):
        check_limits(body, max_answers=MOST)


def test_what_cannot_be_written_is_over_the_limit() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ApiError, match="the limit is"):
        check_limits({"response_format": {"schema": deep}}, max_answers=MOST)
