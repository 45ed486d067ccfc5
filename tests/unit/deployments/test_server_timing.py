"""The Server-Timing header: by the grammar of its standard, and adding up what the replicas measured."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.server_timing import metric, server_timing
from deployments.wire import EncodedImage, EncodeTimings, ImageRefused

# RFC 9110 and w3.org/TR/server-timing: #( token *( OWS ";" OWS token OWS "=" OWS ( token / quoted-string ) ) )
TOKEN = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
PARAMETER = rf"\s*;\s*{TOKEN}\s*=\s*(?:{TOKEN}|\"(?:[^\"\\]|\\.)*\")"
METRIC = rf"{TOKEN}(?:{PARAMETER})*"
HEADER = re.compile(rf"(?:{METRIC}(?:\s*,\s*{METRIC})*)?", re.ASCII)


def image(preprocess_ms: float, queue_ms: float, encode_ms: float, ready_at_s: float, cached: bool) -> EncodedImage:
    timings = EncodeTimings(preprocess_ms, queue_ms, encode_ms, ready_at_s, cached)
    return EncodedImage("d" * 64, (1, 2, 2), "float32", np.zeros((1, 1), np.float32), timings)


def parsed(header: str) -> dict[str, str]:
    assert HEADER.fullmatch(header), header
    return dict(entry.split(";", 1) for entry in header.split(", ")) if header else {}


def test_stages_count_their_slowest_fresh_image() -> None:
    images = [image(1, 20, 3, 100.0, False), image(10, 2, 30, 100.2, False), image(99, 99, 99, 100.1, True)]
    assert parsed(server_timing(images, 100.25, 7.0, 7.5)) == {
        "preprocess": "dur=10.0",
        "queue": "dur=20.0",
        "encode": "dur=30.0",
        "transfer": "dur=50.0",
        "cache": 'desc="1/3"',
        "first-token": "dur=500.0",
    }


def test_images_from_the_cache_cost_no_encoding() -> None:
    timing = parsed(server_timing([image(9, 9, 9, 100.0, True)], 100.0, 7.0, None))
    assert (timing["preprocess"], timing["queue"], timing["encode"]) == ("dur=0.0",) * 3
    assert timing["cache"] == 'desc="1/1"'
    assert "way" not in timing
    timing = parsed(server_timing([image(9, 9, 9, 100.0, True)], 100.0, 7.0, None, "engine_loads"))
    assert timing["way"] == 'desc="engine_loads"'
    assert "first-token" not in timing


def test_text_only_has_the_first_token_alone() -> None:
    assert parsed(server_timing([], 100.0, 7.0, 7.25)) == {"first-token": "dur=250.0"}
    assert server_timing([], 100.0, 7.0, None) == ""


def test_a_refused_image_has_no_timings() -> None:
    assert server_timing([ImageRefused("not an image")], 100.0, 7.0, None) == ""


def test_clocks_that_disagree_do_not_give_a_negative_time() -> None:
    assert parsed(server_timing([image(1, 1, 1, 105.0, False)], 100.0, 7.0, None))["transfer"] == "dur=0.0"


@given(
    st.lists(st.tuples(*[st.floats(0, 1e7)] * 4, st.booleans()), max_size=4),
    st.floats(0, 1e10),
    st.none() | st.floats(0, 1e6),
)
def test_the_header_keeps_to_the_grammar(
    numbers: list[tuple[float, float, float, float, bool]], arrived_at_s: float, first: float | None
) -> None:
    assert HEADER.fullmatch(server_timing([image(*each) for each in numbers], arrived_at_s, 0.0, first))


@pytest.mark.parametrize("broken", ["a;dur", "a b", "a;dur=1,,b", 'a;desc="x', "a;d=1;"])
def test_the_grammar_refuses_what_is_no_header(broken: str) -> None:
    assert not HEADER.fullmatch(broken)


def test_metric_is_rounded_to_a_tenth() -> None:
    assert metric("fetch", 12.34) == "fetch;dur=12.3"
