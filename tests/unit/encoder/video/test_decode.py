"""Frames of a video: in order, alone, in chunks, and never fewer than were asked for."""

from __future__ import annotations

import struct
from fractions import Fraction

import numpy as np
import pytest

from encoder.video.bounds import VideoBounds, VideoError
from encoder.video.decode import decode, decode_chunks
from encoder.video.header import read_header
from encoder.video.structure import MAX_SAMPLES
from tests.video_files import Clip, cut, frame_list

MP4 = Clip(60, options={"preset": "medium", "bf": "3", "g": "12"})
WEBM = Clip(40, container="webm", options={"g": "12"})
GIF = Clip(20, container="gif")
FILES = {
    "mp4": MP4.encode(),
    "webm": WEBM.encode(),
    "gif": GIF.encode(),
    "cut": cut(MP4.encode(), 0.6),
    "frames": frame_list(Clip(12).pictures()),
}


@pytest.mark.parametrize("name", FILES)
def test_headers(name: str) -> None:
    header = read_header(FILES[name])
    assert (header.width, header.height) == (96, 64)
    expected = {"mp4": 60, "webm": 40, "gif": 20, "cut": 45, "frames": 12}[name]
    assert header.num_frames == header.num_stored == expected
    if name != "frames":
        assert header.fps == 25
        assert header.duration_s == pytest.approx(expected / 25)


@pytest.mark.parametrize("name", FILES)
def test_a_frame_is_the_same_alone_among_others_and_in_chunks(name: str) -> None:
    """Decoding starts at the nearest key frame, or goes on from the frame before."""
    data = FILES[name]
    count = read_header(data).num_stored
    whole = decode(data, range(count))
    assert len({frame.tobytes() for frame in whole}) == count, "every frame differs from the others"
    for indices in (range(0, count, 7), [count - 1], [0, 1, count - 2], range(3, count, 13)):
        assert np.array_equal(decode(data, list(indices)), whole[list(indices)])
    chunks = list(decode_chunks(data, range(count), 8))
    assert [len(chunk) for chunk in chunks] == [8] * (count // 8) + [count % 8] * (count % 8 > 0)
    assert np.array_equal(np.concatenate(chunks), whole)


@pytest.mark.parametrize(("clip", "difference"), [(MP4, 25), (WEBM, 25), (GIF, 40)], ids=["mp4", "webm", "gif"])
def test_frames_show_what_was_encoded(clip: Clip, difference: float) -> None:
    found = decode(clip.encode(), range(clip.num_frames))
    for frame, picture in zip(found, clip.pictures(), strict=True):
        assert np.abs(frame.astype(int) - picture).mean() < difference


def test_a_rotated_video_stands_upright() -> None:
    straight, turned = (Clip(4, rotation=angle).encode() for angle in (None, 90))
    assert (read_header(turned).width, read_header(turned).height) == (64, 96)
    assert np.array_equal(decode(turned, range(4)), np.rot90(decode(straight, range(4)), axes=(1, 2)))


def test_later_chunks_are_decoded_when_they_are_asked_for() -> None:
    """The damage is behind the first chunk, which comes before the error."""
    data = bytearray(FILES["mp4"])
    end = data.rindex(b"moov") if data.rindex(b"moov") > len(data) // 2 else len(data)
    data[end - 4000 : end - 200] = bytes(3800)
    chunks = decode_chunks(bytes(data), range(60), 4)
    assert len(next(chunks)) == 4
    with pytest.raises(VideoError):
        list(chunks)


@pytest.mark.parametrize("name", ["mp4", "webm", "gif", "frames"])
def test_a_truncated_file_is_refused(name: str) -> None:
    data = FILES[name]
    for length in (len(data) * part // 10 for part in range(1, 10)):
        with pytest.raises(VideoError):
            decode(data[:length], range(read_header(data).num_stored))


def test_a_frame_that_is_not_there_is_refused() -> None:
    with pytest.raises(VideoError, match="frame 60 was asked for, the video has 60"):
        decode(FILES["mp4"], [0, 60])
    for indices in ([], [1, 1], [2, 1]):
        with pytest.raises(VideoError, match="must ascend"):
            decode(FILES["mp4"], indices)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (VideoBounds(max_bytes=1000), r"video has \d+ bytes, the limit is 1000"),
        (VideoBounds(max_seconds=2), "video lasts 2.4 seconds, the limit is 2"),
        (VideoBounds(max_pixels_per_frame=6143), "frames of 96x64 = 6144 pixels, the limit is 6143"),
        (VideoBounds(max_frames=59), "60 frames of the video were to be decoded, the limit is 59"),
    ],
)
def test_bounds(bounds: VideoBounds, message: str) -> None:
    with pytest.raises(VideoError, match=message):
        decode(FILES["mp4"], range(60), bounds)
    if bounds.max_frames > 59:
        with pytest.raises(VideoError, match=message):
            read_header(FILES["mp4"], bounds)


@pytest.mark.parametrize(
    "data", [b"", b"x" * 12, b"\x89PNG\r\n\x1a\n" + bytes(20), b"RIFF\0\0\0\0AVI LIST", b"#EXTM3U\n"]
)
def test_other_formats_are_not_tried(data: bytes) -> None:
    """FFmpeg knows playlists, which name other files and hosts."""
    with pytest.raises(VideoError, match=r"supported: MP4 \(H.264, HEVC\), WebM \(VP9\), GIF"):
        read_header(data)


def test_other_codecs_are_refused() -> None:
    with pytest.raises(VideoError, match="video codec is 'mpeg4'; supported in this format: h264, hevc"):
        read_header(Clip(4, codec="mpeg4").encode())


def test_declared_samples_are_counted_before_ffmpeg_reserves_memory_for_them() -> None:
    data = bytearray(FILES["mp4"])
    place = data.index(b"stsz")
    struct.pack_into(">II", data, place + 8, 1, 2**31 - 1)  # all of one byte, without a table
    with pytest.raises(VideoError, match=f"declares 2147483647 samples, the limit is {MAX_SAMPLES}"):
        read_header(bytes(data))


def test_declared_sides_are_checked() -> None:
    data = bytearray(FILES["gif"])
    struct.pack_into("<HH", data, 6, 65535, 65535)
    with pytest.raises(VideoError):
        read_header(bytes(data))


def test_frames_of_a_list_are_checked_one_by_one() -> None:
    pictures = Clip(3).pictures()
    good = frame_list(pictures)
    other = frame_list([*pictures[:2], pictures[2][:32]])
    with pytest.raises(VideoError, match="different sizes"):
        decode(other, range(3))
    with pytest.raises(VideoError, match="frame 1 is not base64"):
        decode(good.replace(b",", b",*", 1), range(3))
    with pytest.raises(VideoError, match="frame 2: image data is truncated"):
        decode(good[:-400], range(3))


def test_a_long_video_is_decoded_where_it_is_sampled() -> None:
    """Frames between the key frames that no index needs are not decoded."""
    clip = Clip(400, Fraction(10), 32, 32, options={"g": "10"})
    data = clip.encode()
    assert np.array_equal(decode(data, [5, 395])[1], decode(data, range(400))[395])


@pytest.mark.parametrize("seconds", [-5.0, -0.001, -1e9])
def test_a_duration_below_nothing_is_a_damaged_file(seconds: float) -> None:
    """FFmpeg passes on what a WebM file states; frames were to be chosen among -49."""
    data = FILES["webm"]
    at = data.index(b"\x44\x89\x88") + 3
    assert struct.unpack(">d", data[at : at + 8])[0] == pytest.approx(1600)
    stating = data[:at] + struct.pack(">d", seconds * 1000) + data[at + 8 :]
    with pytest.raises(VideoError):
        read_header(stating)
