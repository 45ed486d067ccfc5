"""Videos for our own towers. That the answers are those of vLLM alone is what test_parity.py compares."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest

from tests.serve.asking import post
from tests.serve.conversations import Body, chat, text, user, video
from tests.serve.test_embedding_cache import ask_timed, timing
from tests.video_files import Clip

CHAT = "/v1/chat/completions"
QUESTION = text("What happens?")

pytestmark = pytest.mark.slow


def about_video(file: bytes, **fields: object) -> Body:
    return chat(user(video(file), QUESTION), **fields)


def damaged() -> bytes:
    """A file whose header is whole, and of whose frames the later ones are not."""
    file = bytearray(Clip(40, Fraction(8), options={"g": "8"}).encode())
    begin = file.index(b"mdat") + 4
    middle = begin + (len(file) - begin) // 4
    file[middle:-3000] = bytes(len(file) - 3000 - middle)
    return bytes(file)


def test_a_repeated_video_is_neither_decoded_nor_encoded_again(base_url: str) -> None:
    file = Clip(16, Fraction(8), seed=71).encode()
    assert ask_timed(base_url, about_video(file))[1] == "0/1"
    again = timing(post(base_url, CHAT, chat(user(text("Once more:"), video(file), QUESTION))))
    assert (again["cache"], again["preprocess"], "video-1" in again) == ('desc="1/1"', "dur=0.0", True)
    other_frames = about_video(file, media_io_kwargs={"video": {"fps": 7}})
    assert ask_timed(base_url, other_frames)[1] == "0/2", "two chunks of eight frames"


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        (b"no video", {}, "not a video of a supported format"),
        (Clip(20).encode()[:1500], {}, "video data is truncated or corrupt"),
        (damaged(), {"media_io_kwargs": {"video": {"fps": 7}}}, ""),
        (
            Clip(150, Fraction(8)).encode(),
            {"media_io_kwargs": {"video": {"fps": 7}}},
            r"13\d frames of the video were to be decoded, the limit is 128",
        ),
        (Clip(2, Fraction("1/601")).encode(), {}, "video lasts 1202 seconds, the limit is 600"),
        (
            Clip(8).encode(),
            {"mm_processor_kwargs": {"max_pixels": 9999}},
            "mm_processor_kwargs cannot bound the pixels",
        ),
    ],
)
def test_a_bad_video_is_a_client_error(base_url: str, file: bytes, fields: Body, message: str) -> None:
    refused = post(base_url, CHAT, about_video(file, **fields))
    assert refused.status_code == 400, refused.text
    assert re.match(rf"video 1 of 1 \(messages\[0\]\.content\[0\]\): {message}", refused.json()["error"]["message"])
