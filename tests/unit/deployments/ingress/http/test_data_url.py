"""`data:` URLs: what they decode to, and refusals that cost nothing."""

from __future__ import annotations

import base64

import pybase64
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.ingress.http.image_parts import MediaError, MediaTooLargeError, decode_data_url
from tests.unit.deployments.stand_ins import StandIns, asked

MAX = 1000
BYTES = bytes(range(256))


def decoded(url: str, max_bytes: int = MAX) -> bytes:
    return decode_data_url(url, max_bytes=max_bytes)


@given(st.binary(min_size=1, max_size=40), st.booleans())
def test_base64_with_and_without_padding(data: bytes, padded: bool) -> None:
    payload = base64.b64encode(data).decode()
    assert decoded("data:image/png;base64," + (payload if padded else payload.rstrip("="))) == data


@pytest.mark.parametrize(
    "prefix",
    [
        "data:;base64,",
        "data:image/png;base64,",
        "DATA:image/png;BASE64,",
        "data:image/svg+xml;charset=utf-8;base64,",
        'data:image/png;name="a b";base64,',
        "data:image/png; base64,",
        "data:base64,",
    ],
)
def test_media_types_and_parameters_do_not_matter(prefix: str) -> None:
    """The file says itself what it is."""
    assert decoded(prefix + base64.b64encode(BYTES).decode()) == BYTES


@pytest.mark.parametrize(
    "url", ["data:", "data:,QUFB", "data:image/png,%89PNG", "data:image/png;base64;x=1,QUFB", "data:image/png;QUFB"]
)
def test_only_base64_is_read(url: str) -> None:
    """As by vLLM alone."""
    with pytest.raises(MediaError, match="not in base64"):
        decoded(url)


@pytest.mark.parametrize("url", ["data:image/png;base64", "data:image/png;base64,"])
def test_empty(url: str) -> None:
    with pytest.raises(MediaError, match="empty"):
        decoded(url)


@pytest.mark.parametrize(
    "payload",
    [
        "A",
        "AAAAA",
        "A===",
        "AA-_",
        "AA AA",
        "A\u00e9AA",
        "AA==AA==",
        "=",
        "=AA",
        "AAA==",
        "AAAA=",
        "AAAA====",
        "%zz",
        "QUF%42",
        "AA\ud800A",
    ],
)
def test_not_base64(payload: str) -> None:
    with pytest.raises(MediaError, match="not valid base64"):
        decoded("data:image/png;base64," + payload)


def test_a_url_in_a_field_for_base64_is_told_apart() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "data:image/png;base64,AAAA"}
    body = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
    refused = asked(StandIns(), "POST", "/v1/messages", json=body)
    assert refused.status_code == 400
    assert "a field for base64 takes no data: prefix" in refused.json()["error"]["message"]


@pytest.mark.parametrize("size", [1, 2, 3, 999, 1000])
@pytest.mark.parametrize("padded", [True, False])
def test_what_is_at_the_limit_passes_and_one_byte_more_does_not(size: int, padded: bool) -> None:
    payload = base64.b64encode(b"x" * size).decode()
    payload = payload if padded else payload.rstrip("=")
    url = "data:;base64," + payload
    assert decoded(url, max_bytes=size) == b"x" * size
    with pytest.raises(MediaTooLargeError, match=f"the limit is {size - 1}"):
        decoded(url, max_bytes=size - 1)


def test_too_large_is_decided_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def must_not_run(*_: object, **__: object) -> bytes:
        raise AssertionError("decoded")

    monkeypatch.setattr(pybase64, "b64decode", must_not_run)
    with pytest.raises(MediaTooLargeError):
        decoded("data:;base64," + "A" * 4000)


@given(st.text(max_size=30))
def test_no_url_makes_anything_but_bytes_or_a_media_error(rest: str) -> None:
    for prefix in ("data:", "data:,", "data:;base64,"):
        try:
            assert decoded(prefix + rest)
        except MediaError:
            continue
