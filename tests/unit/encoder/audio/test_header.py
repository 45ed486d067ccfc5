"""Headers of audio files: durations are those that libsndfile decodes, and broken files are refused."""

from __future__ import annotations

import io
import struct

import pytest
import soundfile

from encoder.audio.header import MAX_CHUNKS, SYNC_BYTES, AudioError, read_audio_header
from tests.sounds import FORMATS, tone

MP3_PADDING = 2400
"""Samples of silence at both ends of an MP3 file, which its header counts."""


@pytest.mark.parametrize("container", FORMATS)
@pytest.mark.parametrize(("seconds", "rate", "channels"), [(1.5, 16_000, 1), (12.3, 44_100, 2), (0.2, 8_000, 1)])
def test_the_header_states_what_is_decoded(container: str, seconds: float, rate: int, channels: int) -> None:
    data = tone(container, seconds=seconds, rate=rate, channels=channels)
    decoded = soundfile.info(io.BytesIO(data))
    header = read_audio_header(data)
    assert (header.rate, header.channels) == (decoded.samplerate, decoded.channels)
    assert header.seconds == pytest.approx(decoded.duration, abs=MP3_PADDING / rate if container == "MP3" else 1e-3)


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_24", "FLOAT", "DOUBLE", "ULAW", "IMA_ADPCM"])
def test_encodings_of_wav(subtype: str) -> None:
    assert read_audio_header(tone(subtype=subtype)).seconds == pytest.approx(1.5, rel=0.05)


def test_opus_counts_48_kilohertz() -> None:
    header = read_audio_header(tone("OGG", subtype="OPUS"))
    assert header.rate == 48_000
    assert header.seconds == pytest.approx(1.5, abs=0.02)


@pytest.mark.parametrize("container", ["MP3", "FLAC"])
def test_tags_before_the_sound_are_skipped(container: str) -> None:
    tags = b"ID3\x04\0\0" + bytes([0, 0, 2, 0]) + b"\xff" * 256
    plain = tone(container)
    assert read_audio_header(tags + plain) == read_audio_header(plain)
    assert soundfile.info(io.BytesIO(tags + plain)).frames == soundfile.info(io.BytesIO(plain)).frames


@pytest.mark.parametrize("length", [0, 0xFFFFFFFF])
def test_a_wav_written_to_a_pipe_is_as_long_as_its_file(length: int) -> None:
    data = bytearray(tone())
    struct.pack_into("<I", data, data.index(b"data") + 4, length)
    assert read_audio_header(bytes(data)).seconds == pytest.approx(1.5)


def test_a_flac_without_a_number_of_samples_is_estimated() -> None:
    data = bytearray(tone("FLAC", seconds=10))
    data[21:26] = bytes([data[21] & 0xF0, 0, 0, 0, 0])
    assert 1 < read_audio_header(bytes(data)).seconds < 20


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"RIFF",
        b"RIFF\0\0\0\0WAVE",
        b"RIFF\0\0\0\0WAVEdata\x10\0\0\0" + bytes(16),
        b"fLaC",
        b"fLaC" + bytes(40),
        b"OggS",
        b"OggS" + bytes(60),
        b"ID3",
        b"ID3\x04\0\0" + bytes([127] * 4),
        b"\x89PNG\r\n\x1a\n",
        b"{}",
        b"RIFF\0\0\0\0WAVE" + b"LIST\0\0\0\0" * (MAX_CHUNKS + 1),
        b"ID3\x04\0\0\0\0\0\0" + bytes(SYNC_BYTES) + b"\xff\xfb\x90\x00" * 2,
    ],
)
def test_broken_files_are_refused(data: bytes) -> None:
    with pytest.raises(AudioError, match=r"audio file|OGG file"):
        read_audio_header(data)
