"""`data:` URLs: what they decode to, and refusals that cost nothing."""

from __future__ import annotations

import base64
from urllib.parse import quote, quote_from_bytes

import pybase64
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.ingress.fetch.fetcher import MediaError, MediaTooLargeError, decode_data_url
from deployments.ingress.http import image_parts

MAX = 1000
BYTES = bytes(range(256))


def decoded(url: str, max_bytes: int = MAX) -> bytes:
    return decode_data_url(url, max_bytes=max_bytes)


@given(st.binary(min_size=1, max_size=40), st.booleans(), st.sampled_from(["none", "reserved", "all"]))
def test_base64_with_and_without_padding_and_percent_encoded(data: bytes, padded: bool, escaped: str) -> None:
    payload = base64.b64encode(data).decode()
    if not padded:
        payload = payload.rstrip("=")
    if escaped == "reserved":
        payload = quote(payload, safe="")
    if escaped == "all":
        payload = "".join(f"%{ord(character):02x}" for character in payload)
    assert decoded("data:image/png;base64," + payload) == data


@given(st.binary(min_size=1, max_size=40))
def test_percent_encoded_bytes(data: bytes) -> None:
    assert decoded("data:image/png," + quote_from_bytes(data)) == data
    assert decoded("data:," + "".join(f"%{byte:02X}" for byte in data)) == data


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


def test_base64_counts_only_as_the_last_parameter() -> None:
    assert decoded("data:image/png;base64;x=1,QUFB") == b"QUFB"


@pytest.mark.parametrize("url", ["data:", "data:image/png;base64", "data:image/png;base64;QUFB"])
def test_without_a_comma(url: str) -> None:
    with pytest.raises(MediaError, match="no comma"):
        decoded(url)


@pytest.mark.parametrize("url", ["data:,", "data:image/png;base64,"])
def test_empty(url: str) -> None:
    with pytest.raises(MediaError, match="empty"):
        decoded(url)


@pytest.mark.parametrize(
    "payload",
    ["A", "AAAAA", "A===", "AA-_", "AA AA", "A\u00e9AA", "AA==AA==", "=", "=AA", "AAA==", "AAAA=", "AAAA====", "%zz"],
)
def test_not_base64(payload: str) -> None:
    with pytest.raises(MediaError, match="not valid base64"):
        decoded("data:image/png;base64," + payload)


@pytest.mark.parametrize("prefix", ["data:,", "data:;base64,"])
def test_half_a_character_is_refused(prefix: str) -> None:
    """JSON can carry the half of a surrogate pair, which has no bytes: an error of its own kind, not status 500."""
    with pytest.raises(MediaError, match="Unicode"):
        decoded(prefix + "AA\ud800A")


@pytest.mark.parametrize("size", [1, 2, 3, 999, 1000])
@pytest.mark.parametrize("padded", [True, False])
def test_what_is_at_the_limit_passes_and_one_byte_more_does_not(size: int, padded: bool) -> None:
    payload = base64.b64encode(b"x" * size).decode()
    payload = payload if padded else payload.rstrip("=")
    for url in ("data:;base64," + payload, "data:," + "x" * size, "data:," + "%78" * size):
        assert decoded(url, max_bytes=size) == b"x" * size
        with pytest.raises(MediaTooLargeError, match=f"the limit is {size - 1}"):
            decoded(url, max_bytes=size - 1)


@pytest.mark.parametrize("url", ["data:;base64," + "A" * 4000, "data:," + "x" * 4000, "data:," + "%78" * 4000])
def test_too_large_is_decided_before_decoding(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def must_not_run(*_: object, **__: object) -> bytes:
        raise AssertionError("decoded")

    monkeypatch.setattr(pybase64, "b64decode", must_not_run)
    monkeypatch.setattr(image_parts, "unquote_to_bytes", must_not_run)
    with pytest.raises(MediaTooLargeError):
        decoded(url)


def test_percent_signs_are_bounded() -> None:
    """Unescaping takes microseconds each, on the event loop that every request shares."""
    with pytest.raises(MediaTooLargeError, match=r"100001 percent signs, the limit is 100000"):
        decoded("data:," + "%41" * 100_001, max_bytes=10**9)


@given(st.text(max_size=30))
def test_no_url_makes_anything_but_bytes_or_a_media_error(rest: str) -> None:
    for prefix in ("data:", "data:,", "data:;base64,"):
        try:
            assert decoded(prefix + rest)
        except MediaError:
            continue
