"""The Server-Timing header: by the grammar of its standard, and adding up what the replicas measured."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.common.messages import NOT_STORED, EncodeTimings, ImageRefused, SharedEmbedding
from deployments.telemetry.server_timing import MAX_IMAGES_LISTED, format_metric, format_server_timing
from encoder.packing.run_counts import Reason, RunRecord

# RFC 9110 and w3.org/TR/server-timing: #( token *( OWS ";" OWS token OWS "=" OWS ( token / quoted-string ) ) )
TOKEN = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
PARAMETER = rf"\s*;\s*{TOKEN}\s*=\s*(?:{TOKEN}|\"(?:[^\"\\]|\\.)*\")"
METRIC = rf"{TOKEN}(?:{PARAMETER})*"
HEADER = re.compile(rf"(?:{METRIC}(?:\s*,\s*{METRIC})*)?", re.ASCII)


def image(preprocess_ms: float, queue_ms: float, encode_ms: float, ready_at_s: float, cached: bool) -> SharedEmbedding:
    timings = EncodeTimings(preprocess_ms, queue_ms, encode_ms, ready_at_s, cached)
    return SharedEmbedding("d" * 64, "float32", (1, 1), timings, NOT_STORED)


def parsed(header: str, *, images: bool = False) -> dict[str, str]:
    """With the metrics of each image where `images` asks for them, else without."""
    assert HEADER.fullmatch(header), header
    found = dict(entry.split(";", 1) for entry in header.split(", ")) if header else {}
    return {name: value for name, value in found.items() if images or not name.startswith("image-")}


def test_stages_count_their_slowest_fresh_image() -> None:
    images = [image(1, 20, 3, 100.0, False), image(10, 2, 30, 100.2, False), image(99, 99, 99, 100.1, True)]
    assert parsed(format_server_timing(images, 0.05, 0.5)) == {
        "preprocess": "dur=10.0",
        "queue": "dur=20.0",
        "encode": "dur=30.0",
        "transfer": "dur=50.0",
        "cache": 'desc="1/3"',
        "first-token": "dur=500.0",
    }


def test_images_from_the_cache_cost_no_encoding() -> None:
    timing = parsed(format_server_timing([image(9, 9, 9, 100.0, True)], 0.0, None))
    assert (timing["preprocess"], timing["queue"], timing["encode"]) == ("dur=0.0",) * 3
    assert timing["cache"] == 'desc="1/1"'
    assert "path" not in timing
    timing = parsed(format_server_timing([image(9, 9, 9, 100.0, True)], 0.0, None, "engine_loads"))
    assert timing["path"] == 'desc="engine_loads"'
    assert "first-token" not in timing


def test_every_image_tells_where_and_how_it_was_encoded() -> None:
    def made(
        ran: RunRecord | None, replica: str, cached: bool = False, frames: tuple[int, int] | None = None
    ) -> SharedEmbedding:
        timings = EncodeTimings(1.0, 1.0, 1.0, 100.0, cached, replica, ran, frames)
        return SharedEmbedding("d" * 64, "float32", (6, 1), timings, NOT_STORED)

    images: list[SharedEmbedding | ImageRefused | None] = [
        made(RunRecord(64, None, 50, 3), "ab12"),
        ImageRefused("not an image"),
        made(RunRecord(None, Reason.OVER_LARGEST, 6, 1), "cd34", cached=True),
        made(None, ""),
        made(None, "ef56", frames=(9, 16)),
        None,
        made(None, "gh78"),
    ]
    timing = parsed(format_server_timing(images, 0.0, None), images=True)
    assert timing["image-1"] == 'desc="tokens=6 replica=ab12 graph=64 batch=50/3"'
    assert "image-2" not in timing
    assert timing["image-3"] == 'desc="tokens=6 replica=cd34 eager=over_largest_budget batch=6/1 cached"'
    assert timing["image-4"] == 'desc="tokens=6"'
    assert timing["image-5"] == 'desc="tokens=6 frames=9-16 replica=ef56"'
    assert "image-6" not in timing, "the engine did not need it"
    assert timing["image-7"] == 'desc="tokens=6 replica=gh78"'
    assert timing["cache"] == 'desc="1/5"'


def test_the_header_is_bounded() -> None:
    many = parsed(format_server_timing([image(1, 1, 1, 100.0, False)] * 100, 0.0, None), images=True)
    assert [name for name in many if name.startswith("image-")] == [
        f"image-{n}" for n in range(1, MAX_IMAGES_LISTED + 1)
    ]
    assert many["cache"] == 'desc="0/100"'
    after = parsed(format_server_timing([None] * 100 + [image(1, 1, 1, 100.0, False)], 0.0, None), images=True)
    assert "image-101" in after, "those before it were not needed"


def test_text_only_has_the_first_token_alone() -> None:
    assert parsed(format_server_timing([], None, 0.25)) == {"first-token": "dur=250.0"}
    assert format_server_timing([], None, None) == ""


def test_a_refused_image_has_no_timings() -> None:
    assert format_server_timing([ImageRefused("not an image")], None, None) == ""


@given(
    st.lists(st.tuples(*[st.floats(0, 1e7)] * 4, st.booleans()), max_size=4),
    st.floats(0, 1e4),
    st.none() | st.floats(0, 1e6),
)
def test_the_header_keeps_to_the_grammar(
    numbers: list[tuple[float, float, float, float, bool]], transfer_s: float, first: float | None
) -> None:
    assert HEADER.fullmatch(format_server_timing([image(*each) for each in numbers], transfer_s, first))


@pytest.mark.parametrize("broken", ["a;dur", "a b", "a;dur=1,,b", 'a;desc="x', "a;d=1;"])
def test_the_grammar_refuses_what_is_no_header(broken: str) -> None:
    assert not HEADER.fullmatch(broken)


def test_metric_is_rounded_to_a_tenth() -> None:
    assert format_metric("fetch", 12.34) == "fetch;dur=12.3"
