"""Reading a request's body within limits of size and time, parsing it as JSON, and bounding its fields.

The base64 of `data:` URLs is cut out before the JSON parser, which would otherwise read megabytes of it. Large bodies
are parsed in a thread, since all answers stream through the event loop.

A request of kilobytes can cost hours of work, and some lists are searched at every token. So the number of completions
and the lengths of lists and grammars are bounded.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from deployments.common.api_error import ApiError
from deployments.ingress.http.held_bytes import Held

Body = dict[str, Any]  # a JSON object
T = TypeVar("T")

GRACE_S = 30.0
"""Seconds during which a body may arrive at any speed."""
MIN_BYTES_PER_S = 16_384
"""Minimum average speed after GRACE_S: a request occupies a slot of the ingress while it is sent."""
MAX_JSON_VALUES = 2**18
"""Values in a body, estimated by its commas and brackets, including those in strings. A parsed value takes many times
the memory of its text."""
COUNTED_BYTES = 2**20
"""Bytes that are searched before other threads can run."""
LARGE_BYTES = 2**17
"""Smaller bodies are parsed on the event loop, which takes less time than the switch to a thread."""
_OPENING = re.compile(rb'"data(?::[^"\\,]{0,200};base64,|"[ \t\r\n]{0,8}:[ \t\r\n]{0,8}")')
_START = b'"data'
MIN_DATA_BYTES = 1024
"""Shorter strings of fields `data` are left to the JSON parser: not all of them are files."""
MAX_FILES = 1024
"""Data URLs cut out of a body; further ones stay in it."""
MAX_ITEMS: Mapping[str, int] = {
    "stop": 64,  # vLLM searches the text for each at every token
    "stop_sequences": 64,
    "bad_words": 256,
    "stop_token_ids": 4096,
    "logit_bias": 4096,
    "logprob_token_ids": 256,
    "documents": 256,
    "tools": 128,
}
MAX_REQUEST_ID_CHARACTERS = 256
"""Length of a request's id, which vLLM sends with every chunk of the answer."""
MAX_NUMBER = 2**63
"""Larger numbers count as this one: Python refuses to print an integer of more than 4300 digits."""
GRAMMARS = ("response_format", "structured_outputs", "text", "output_config")
MAX_GRAMMAR_CHARACTERS = 65_536
"""Length as JSON of a schema, a regular expression or a grammar; 100,000 characters take seconds to compile."""
REFUSED_FIELDS = {
    "prompt_embeds": "embeddings cannot be sent",
    "return_mm_kwargs": "embeddings are not given out",
    "kv_transfer_params": "where the engine fetches from cannot be chosen by a request",
    "ec_transfer_params": "where the engine fetches from cannot be chosen by a request",
    "previous_response_id": "responses are not stored here; send the earlier items in input",
    "background": "an answer ends with its request; stream it",
    "previous_input_messages": "send the earlier items in input",
}


class OffLoop:
    """A single thread for parsing, so that the copies of only one body exist at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "request-bodies")

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Returns or raises what `work` does. It runs in the thread if `num_bytes` is at least LARGE_BYTES."""
        if num_bytes < LARGE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


async def read_body(request: Request, *, max_bytes: int, held: Held) -> list[bytes]:
    """Returns the whole body in chunks, which are counted in `held` as they arrive.

    Raises:
        OverloadedError: the requests of this ingress replica hold too many bytes.
        ApiError: 413 over `max_bytes`, 408 for a body that arrives too slowly, 400 if the client disconnects.
    """
    started = asyncio.get_running_loop().time()
    chunks: list[bytes] = []
    total = 0
    stream = request.stream()
    try:
        while True:
            async with asyncio.timeout_at(started + GRACE_S + total / MIN_BYTES_PER_S):
                chunk = await anext(stream, None)
            if chunk is None:
                return chunks
            total += len(chunk)
            if total > max_bytes:
                raise ApiError(413, f"the request body is over the limit of {max_bytes} bytes", code="body_too_large")
            held.add(len(chunk))
            chunks.append(chunk)
    except TimeoutError as error:
        pace = f"after {GRACE_S:g} s, {MIN_BYTES_PER_S} bytes a second are the least"
        raise ApiError(408, f"the request body comes too slowly: {pace}", code="body_too_slow") from error
    except ClientDisconnect as error:
        raise ApiError(400, "the client closed the connection while it was sending") from error


def parse_body(data: bytes, *, max_answers: int, cut: bool) -> tuple[Body, dict[str, memoryview]]:
    """Returns the parsed and checked body, and the base64 of its files by name as `cut_files` does, if `cut` is set.

    Raises ApiError as `json_object`, `refuse_fields` and `check_limits` do.
    """
    rest, files = cut_files(data) if cut else (data, {})
    body = json_object(rest)
    refuse_fields(body)
    check_limits(body, max_answers=max_answers)
    return body, files


def cut_files(text: bytes) -> tuple[bytes, dict[str, memoryview]]:
    """Returns the JSON with each base64 `data:` URL, and each long string of a field `data`, replaced by an unguessable
    name, and the base64 by these names.

    A quotation mark before `data` opens a string unless a backslash precedes it: in JSON, no letter follows the end of
    a string. Strings with escapes are not replaced.
    """
    token, view = secrets.token_hex(16), memoryview(text)
    files: dict[str, memoryview] = {}
    kept: list[bytes | memoryview] = []
    done, at = 0, text.find(_START)
    while at >= 0 and len(files) < MAX_FILES:
        opening = None if text[at - 1 : at] == b"\\" else _OPENING.match(text, at)
        end = -1 if opening is None else text.find(b'"', opening.end())
        if opening is not None and end >= 0 and text.find(b"\\", opening.end(), end) < 0:
            is_url = opening[0].endswith(b",")
            if is_url or end - opening.end() >= MIN_DATA_BYTES:
                name = f"{token} {len(files)}"
                files[name] = view[opening.end() : end]
                kept += [view[done : at + 1 if is_url else opening.end()], name.encode()]
                done = end
        at = text.find(_START, max(at + 1, end))
    return b"".join([*kept, view[done:]]), files


def json_object(data: bytes) -> Body:
    """Parses `data`. Raises ApiError 413 for more than MAX_JSON_VALUES, 400 for anything but a JSON object."""
    num_values = 0
    looked_through = len(data) if len(data) > MAX_JSON_VALUES else 0  # a shorter body cannot exceed the limit
    for start in range(0, looked_through, COUNTED_BYTES):
        num_values += sum(data.count(mark, start, start + COUNTED_BYTES) for mark in (b",", b"[", b"{"))
        if num_values > MAX_JSON_VALUES:
            message = f"the request body has {num_values} JSON values or more, the limit is {MAX_JSON_VALUES}"
            raise ApiError(413, message, code="body_too_large")
    try:
        if len(data) < LARGE_BYTES:
            body = json.loads(data)
        else:
            body = json.loads(data, parse_int=_integer, parse_float=_number)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "the request body is not valid JSON") from error
    if not isinstance(body, dict):
        raise ApiError(400, f"the request body must be a JSON object, got {type(body).__name__}")
    return body


def _integer(text: str) -> int:
    """Parses as the JSON parser would; as a Python function it lets other threads run between two calls."""
    return int(text)


def _number(text: str) -> float:
    """See `_integer`."""
    return float(text)


def refuse_fields(body: Body) -> None:
    """Raises ApiError 400 for fields by which a client could pass embeddings to vLLM or make it fetch something."""
    # vLLM takes the entries of `vllm_xargs` for fields of the engine's request.
    xargs = body.get("vllm_xargs")
    for where, fields in (("", body), ("vllm_xargs.", xargs if isinstance(xargs, Mapping) else {})):
        for name, reason in REFUSED_FIELDS.items():
            if fields.get(name) not in (None, False):
                raise ApiError(400, f"{where}{name}: {reason}", param=where + name, code="unsupported_field")


def check_limits(body: Mapping[str, Any], *, max_answers: int) -> None:
    """Checks the bounds on fields. Raises ApiError 400 that names the field, its value and the limit."""
    if (number := body.get("n")) is not None and not isinstance(number, int):  # vLLM takes "1000" and 1000.0, too
        raise ApiError(400, f"n must be an integer, got {str(number)[:40]!r}", param="n")
    num_answers = _positive(number) * _num_prompts(body.get("prompt"))
    if num_answers > max_answers:
        raise _refused("n", f"{num_answers} answers are asked for, the limit is {max_answers} a request")
    request_id, limit = body.get("request_id"), MAX_REQUEST_ID_CHARACTERS
    if isinstance(request_id, str) and len(request_id) > limit:
        raise _refused("request_id", f"request_id has {len(request_id)} characters, the limit is {limit}")
    for name, limit in MAX_ITEMS.items():
        value = body.get(name)
        if isinstance(value, list | dict) and len(value) > limit:
            raise _refused(name, f"{name} has {len(value)} entries, the limit is {limit}")
    grammars = {name: value for name in GRAMMARS if isinstance(value := body.get(name), dict)}
    for name, value in {**grammars, "tools": _compiled_schemas(body)}.items():
        if (length := _length(value)) > MAX_GRAMMAR_CHARACTERS:
            raise _refused(name, f"{name} has {length} characters, the limit is {MAX_GRAMMAR_CHARACTERS}")


def _compiled_schemas(body: Mapping[str, Any]) -> list[object]:
    """Returns the parameter schemas that vLLM compiles to grammars: all tools' if a call is required, the named
    tool's, or those of strict tools."""
    choice, tools = body.get("tool_choice"), body.get("tools")
    tools = [*(tools if isinstance(tools, list) else []), *_added_tools(body)]
    if isinstance(choice, dict) and choice.get("type") in ("auto", "none", "any"):  # in Anthropic's format
        choice = choice["type"]
    if choice == "none":
        return []
    inner = (tool["tools"] for tool in tools if isinstance(tool, dict) and isinstance(tool.get("tools"), list))
    functions = [_function(tool) for tool in (*tools, *itertools.chain.from_iterable(inner))]  # a namespace holds tools
    if choice in (None, "auto"):
        functions = [function for function in functions if function.get("strict")]
    elif name := _function(choice).get("name"):
        functions = [function for function in functions if function.get("name") == name]
    return [function.get("parameters", function.get("input_schema")) for function in functions]


def _added_tools(body: Mapping[str, Any]) -> Iterator[object]:
    """Yields the tools that parts of messages define, in Anthropic's format."""
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else []:
        parts = message.get("content") if isinstance(message, dict) else None
        for part in parts if isinstance(parts, list) else []:
            if isinstance(part, dict) and isinstance(tool := part.get("tool"), dict):
                yield tool.get("definition")


def _function(tool: object) -> Mapping[str, Any]:
    """Returns the function of a tool or of `tool_choice`: its `function` in chats, the object itself in responses."""
    if not isinstance(tool, dict):
        return {}
    function = tool.get("function", tool)
    return function if isinstance(function, dict) else {}


def _positive(value: object) -> int:
    """Returns `value`, or 1 if it is not a positive integer, which the engine refuses. At most MAX_NUMBER."""
    return max(1, min(value, MAX_NUMBER)) if type(value) is int else 1


def _num_prompts(prompt: object) -> int:
    """Returns 1, or the length of a list of strings or of token lists."""
    if isinstance(prompt, list) and not all(type(token) is int for token in prompt):
        return max(1, len(prompt))
    return 1


def _length(value: object) -> int:
    try:
        return len(json.dumps(value, ensure_ascii=False))
    except RecursionError:  # the encoder supports less nesting than the parser
        return MAX_GRAMMAR_CHARACTERS + 1


def _refused(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="over_limit")
