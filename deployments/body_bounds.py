"""Bounds on what a request's fields ask of the language model: how many answers, and how long lists and grammars are.

A request of kilobytes can be work for hours, and some lists are looked through at every token.
Pure functions of the parsed body. This module must not know of images or HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from deployments.errors import ApiError

MAX_ITEMS: Mapping[str, int] = {
    "stop": 64,  # each is looked for in the text at every token
    "bad_words": 256,
    "stop_token_ids": 4096,
    "logit_bias": 4096,
    "logprob_token_ids": 256,
    "documents": 256,
    "tools": 128,
}
GRAMMARS = ("response_format", "structured_outputs", "text")
MAX_GRAMMAR_CHARACTERS = 65_536
"""Of a schema, a regular expression or a grammar, as JSON; a hundred thousand take seconds to compile."""


def check(body: Mapping[str, Any], *, max_answers: int) -> None:
    """Raises ApiError 400, naming the field, its value and the limit."""
    num_answers = _positive(body.get("n")) * _num_prompts(body.get("prompt"))
    if num_answers > max_answers:
        raise _refused("n", f"{num_answers} answers are asked for, the limit is {max_answers} a request")
    for name, limit in MAX_ITEMS.items():
        value = body.get(name)
        if isinstance(value, list | dict) and len(value) > limit:
            raise _refused(name, f"{name} has {len(value)} entries, the limit is {limit}")
    for name in GRAMMARS:
        value = body.get(name)
        if isinstance(value, dict) and (length := _length(value)) > MAX_GRAMMAR_CHARACTERS:
            raise _refused(name, f"{name} has {length} characters, the limit is {MAX_GRAMMAR_CHARACTERS}")


def _positive(value: object) -> int:
    """What is no positive integer counts as one: the engine says what is wrong with it."""
    return max(1, value) if type(value) is int else 1


def _num_prompts(prompt: object) -> int:
    """One, but for a list of texts or of lists of token ids."""
    if isinstance(prompt, list) and not all(type(token) is int for token in prompt):
        return max(1, len(prompt))
    return 1


def _length(value: object) -> int:
    try:
        return len(json.dumps(value))
    except RecursionError:  # deeper than can be written; it was read in another way
        return MAX_GRAMMAR_CHARACTERS + 1


def _refused(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="over_limit")
