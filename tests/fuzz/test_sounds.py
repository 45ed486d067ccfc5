"""Headers of audio files changed at random: each has a duration, or is an AudioError."""

from __future__ import annotations

import math
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.audio.header import AudioError, read_audio_header
from tests.fuzz.shares import IN_PROCESS
from tests.fuzz.test_images import CHANGE, changed
from tests.sounds import FORMATS, tone

SEEDS = [
    *(tone(container, seconds=0.1) for container in FORMATS),
    tone("OGG", seconds=0.1, subtype="OPUS"),
    tone("WAV", seconds=0.1, subtype="IMA_ADPCM"),
]


def test_changed_sounds(fuzzing: Callable[[float], settings]) -> None:
    @fuzzing(IN_PROCESS["changed sounds"])
    @given(st.sampled_from(SEEDS), st.lists(CHANGE, min_size=1, max_size=6), st.integers(1, 10_000))
    def fuzz(seed: bytes, changes: list[tuple[str, int, bytes]], length: int) -> None:
        try:
            header = read_audio_header(changed(seed, changes, length))
        except AudioError:
            return
        assert header.rate >= 1
        assert 1 <= header.channels < 2**16
        assert 0 < header.seconds < math.inf
        assert header.num_samples >= 0

    fuzz()
