"""Video files changed at random: each is a video whose frames can be decoded, or a VideoError, in bounded memory.

FFmpeg parses and decodes them, so they are tried in a process of their own, with the limit of a decode worker.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.encoder_replica.decode.memory_bound import limit_memory
from encoder.video.bounds import VideoBounds, VideoError
from encoder.video.decode import decode
from encoder.video.header import read_header
from tests.fuzz.shares import IN_PROCESS
from tests.fuzz.test_images import CHANGE, changed
from tests.video_files import Clip, cut, frame_list

SEEDS = [
    Clip(10, width=32, height=32, options={"preset": "medium", "g": "4"}).encode(),
    Clip(10, width=32, height=32, options={"movflags": "frag_keyframe+empty_moov"}).encode(),
    Clip(10, width=32, height=32, container="webm").encode(),
    Clip(6, width=32, height=32, container="gif").encode(),
    cut(Clip(20, width=32, height=32).encode(), 0.3),
    Clip(6, width=32, height=32, rotation=90, sound_s=0.2).encode(),
    frame_list(Clip(3, width=32, height=32).pictures()),
]
BOUNDS = VideoBounds(max_bytes=100_000, max_seconds=600, max_frames=32, max_pixels_per_frame=1_000_000)
MEMORY_BYTES = 512 * 2**20
CASE_S = 20


def check(data: bytes) -> str:
    """Returns "video" or "error"; any other exception is a finding."""
    try:
        with limit_memory(MEMORY_BYTES):
            header = read_header(data, BOUNDS)
            indices = range(min(header.num_stored, 16))
            frames = decode(data, indices, BOUNDS)
    except VideoError:
        return "error"
    assert frames.shape == (len(indices), header.height, header.width, 3)
    return "video"


@pytest.fixture
def checked() -> Iterator[Callable[[bytes], str]]:
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(1, spawn)
    pool.submit(check, SEEDS[0]).result()  # the start of the process counts for no case

    def run(data: bytes) -> str:
        try:
            return pool.submit(check, data).result(CASE_S)
        except BrokenProcessPool:
            pytest.fail("the decoder's process died")

    yield run
    pool.shutdown()


def test_the_seeds_are_videos(checked: Callable[[bytes], str]) -> None:
    assert [checked(seed) for seed in SEEDS] == ["video"] * len(SEEDS)


def test_changed_videos(fuzzing: Callable[[float], settings], checked: Callable[[bytes], str]) -> None:
    @fuzzing(IN_PROCESS["changed videos"])
    @given(st.sampled_from(SEEDS), st.lists(CHANGE, min_size=1, max_size=6), st.integers(1, 100_000))
    def fuzz(seed: bytes, changes: list[tuple[str, int, bytes]], length: int) -> None:
        checked(changed(seed, changes, length))

    fuzz()
