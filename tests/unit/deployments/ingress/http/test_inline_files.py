"""Base64 is taken out of a JSON text before it is parsed, and nothing else is changed by it.

Parsing 20 MB of pictures on the event loop held up all streams of the ingress for 90 ms.
"""

from __future__ import annotations

import json
import threading
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.ingress import image_jobs
from deployments.ingress.http import chat_request, request_body
from deployments.ingress.http.request_body import LARGE_BYTES, MIN_DATA_BYTES, cut_files
from tests.unit.deployments.ingress.http.test_held_bytes import BODY
from tests.unit.deployments.stand_ins import IMAGE, StandIns, asked, chat

URL = "data:image/png;base64,QUJD"
TEXTS = st.text() | st.sampled_from(
    [URL, f'"{URL}"', f'\\"{URL}', URL + "\\", URL + "%41", "data:", '"data:', "data:;base64,", "data:,x", "x" + URL]
)
VALUES = st.recursive(
    TEXTS | st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def is_same(value: Any, found: Any, files: dict[str, memoryview]) -> bool:
    """Whether the one is the other with names in the place of URLs."""
    if isinstance(found, str) and found in files:
        opening, _, payload = value.rpartition(";base64,")
        return opening.startswith("data:") and payload.encode() == bytes(files[found])
    if isinstance(value, dict):
        pairs = zip(value.items(), found.items(), strict=True)
        return all(is_same(a, b, files) and is_same(c, d, files) for (a, c), (b, d) in pairs)
    if isinstance(value, list):
        return all(is_same(*pair, files) for pair in zip(value, found, strict=True))
    return bool(value == found)


@given(VALUES, st.booleans())
def test_only_urls_are_cut(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    rest, files = cut_files(text)
    assert is_same(value, json.loads(rest.decode("utf-8", "surrogatepass")), files)


@pytest.mark.parametrize("space", ["", " ", "\n  "])
def test_long_strings_of_fields_data_are_cut(space: str) -> None:
    """Images of Anthropic's format; a shorter string, one with escapes, and a `data` that is no name stay."""
    long = "A" * MIN_DATA_BYTES
    text = f'{{"data"{space}:{space}"{long}", "x": {{"data": "{long}"}}, "y": {{"data": "{long[1:]}"}}}}'
    rest, files = cut_files(text.encode())
    first, second = files
    assert json.loads(rest) == {"data": first, "x": {"data": second}, "y": {"data": long[1:]}}
    assert [bytes(file) for file in files.values()] == [long.encode()] * 2
    for kept in ({"data": long + "\n"}, {"a": ["data", long]}, {'"data': long}, {"a": f'"data": "{long}"'}):
        assert cut_files(json.dumps(kept).encode()) == (json.dumps(kept).encode(), {})


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ({"role": "user", "content": [IMAGE, {"type": "text", "text": URL}]}, 200),
        ({"role": "user", "content": URL}, 200),
        ({"role": "user", URL: URL, "content": [IMAGE]}, 200),
        ({"role": "user", "content": [IMAGE, {"type": URL}]}, 400),
    ],
)
def test_a_url_that_is_no_image_is_passed_on_as_it_came(message: dict[str, Any], status: int) -> None:
    stand_ins = StandIns()
    response = asked(stand_ins, "POST", "/v1/chat/completions", json={"messages": [message]})
    assert response.status_code == status
    assert URL in (stand_ins.requests[0].body.decode() if status == 200 else response.json()["error"]["message"])


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("json_object", request_body),
        ("cut_files", request_body),
        ("body_to_json", chat_request),
        ("read_header", image_jobs),
    ],
)
def test_a_large_body_is_worked_on_beside_the_event_loop(
    name: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading, checking and writing 20 MB held up all streams of the ingress for up to 790 ms."""
    work, threads = getattr(module, name), []

    def seen(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread())
        return work(*args, **kwargs)

    monkeypatch.setattr(module, name, seen)
    response = asked(StandIns(), "POST", "/v1/chat/completions", content=BODY)
    assert response.status_code == 200
    assert threads
    assert threading.main_thread() not in threads
    threads.clear()
    assert chat(StandIns(), IMAGE).status_code == 200
    assert set(threads) == {threading.main_thread()}, "a small one is not worth a thread"


def test_the_base64_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    json_object = request_body.json_object

    def seen(data: bytes) -> Any:
        parsed.append(data)
        return json_object(data)

    monkeypatch.setattr(request_body, "json_object", seen)
    assert asked(StandIns(), "POST", "/v1/chat/completions", content=BODY).status_code == 200
    (rest,) = parsed
    assert len(rest) < 200
    parsed.clear()
    broken = BODY.replace(b"iVBOR", b"!!!!!")
    assert asked(StandIns(), "POST", "/v1/chat/completions", content=broken).status_code == 400
    (rest,) = parsed
    assert len(rest) < 200, "what is wrong with a file has nothing to do with the JSON"


def test_a_number_array_gives_other_threads_their_turn() -> None:
    """The parser's C code holds the interpreter's lock; a function of Python for each number lets go of it."""
    calls = []

    def seen(text: str) -> float:
        calls.append(text)
        return float(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_body, "_number", seen)
        body = json.dumps({"x": [0.5] * (LARGE_BYTES // 4)}).encode()
        assert request_body.json_object(body)["x"][-1] == 0.5
    assert len(calls) == LARGE_BYTES // 4
