"""Videos are sampled and decoded as vLLM's own loaders do it, with OpenCV: the same indices, rates and durations, and
the same pixels, for files that a phone, a camera or an editor may write.

vLLM is the reference here, so the tests need it; videos are generated.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from transformers import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.media.video import VideoMediaIO
from vllm.multimodal.video import VIDEO_LOADER_REGISTRY

from encoder.checkpoint.image_rules import ImageRules
from encoder.checkpoint.video_rules import VideoRules
from encoder.video.bounds import VideoError
from encoder.video.decode import decode
from encoder.video.header import read_header
from encoder.video.sampling import sample
from tests.video_files import Clip, cut, frame_list, irregular

MEDIUM = {"preset": "medium"}
HEVC = {"x265-params": "log-level=0"}
RATES = ("24000/1001", "30000/1001", "60000/1001", "15/2", "37/3", "1", "120", "1/2")
EARLY = [*range(0, 50 * 20, 20), *range(1000, 1000 + 50 * 200, 200)]
LATE = [*range(0, 50 * 200, 200), *range(10_000, 10_000 + 50 * 20, 20)]
CLIPS: dict[str, Clip] = {
    **{f"mp4 at {rate}": Clip(40, Fraction(rate)) for rate in RATES},
    **{f"webm at {rate}": Clip(40, Fraction(rate), container="webm") for rate in RATES[:5]},
    **{f"gif at {rate}": Clip(20, Fraction(rate), container="gif") for rate in ("10", "25", "100/7")},
    **{f"variable rate, mp4 {seed}": Clip(60, times_ms=irregular(60, seed)) for seed in range(3)},
    **{f"variable rate, webm {seed}": Clip(60, container="webm", times_ms=irregular(60, seed)) for seed in range(3)},
    "variable rate, gif": Clip(40, container="gif", times_ms=irregular(40, 3)),
    # vLLM seeks by time to count the frames, and takes some that are there for missing.
    "most frames early, mp4": Clip(100, times_ms=EARLY, options={"g": "10"}),
    "most frames early, webm": Clip(100, container="webm", times_ms=EARLY, options={"g": "10"}),
    "most frames late, B-frames": Clip(100, times_ms=LATE, options={**MEDIUM, "bf": "3", "g": "30"}),
    **{f"rotated by {angle}": Clip(20, rotation=angle) for angle in (45, 90, 180, 270)},
    "B-frames": Clip(60, options={**MEDIUM, "bf": "4", "g": "20"}),
    "open groups of pictures": Clip(80, options={**MEDIUM, "x264-params": "open-gop=1:bframes=3:keyint=20"}),
    "one key frame": Clip(80, options={**MEDIUM, "g": "1000"}),
    "HEVC": Clip(40, codec="libx265", options=HEVC),
    "HEVC of 10 bits": Clip(20, codec="libx265", options=HEVC, pixel_format="yuv420p10le"),
    "HLG, as phones record it": Clip(20, codec="libx265", options=HEVC, pixel_format="yuv420p10le", colours=(9, 9, 18)),
    "PQ": Clip(20, codec="libx265", options=HEVC, pixel_format="yuv420p10le", colours=(9, 9, 16)),
    "HLG of 8 bits": Clip(20, colours=(9, 9, 18)),
    "wide gamut, BT.2020": Clip(20, colours=(9, 9, 14)),
    "wide gamut, P3 with the transfer of sRGB": Clip(20, colours=(1, 12, 13)),
    "wide gamut, rotated by 90": Clip(20, colours=(1, 12, 1), rotation=90),
    "HDR without primaries": Clip(20, colours=(2, 2, 16)),
    "BT.601 as stated": Clip(20, colours=(6, 6, 6)),
    "BT.709 as stated": Clip(20, colours=(1, 1, 1)),
    "H.264 of 4:2:2": Clip(20, pixel_format="yuv422p"),
    "H.264 in Matroska": Clip(30, container="matroska", codec="libx264"),
    "B-frames in Matroska": Clip(60, container="matroska", codec="libx264", options={**MEDIUM, "bf": "3", "g": "20"}),
    "two frames": Clip(2),
    "three frames": Clip(3),
    "five frames, webm": Clip(5, container="webm"),
    "451 frames": Clip(451, Fraction(30), 32, 32),
    "sides that are no multiples of 16": Clip(20, width=98, height=70),
    "QuickTime": Clip(20, container="mov"),
    "longer sound, mp4": Clip(30, sound_s=3.0),
    "longer sound, webm": Clip(30, sound_s=3.0, container="webm"),
    "ten minutes": Clip(1200, Fraction(2), 64, 48),
    "ten minutes, webm": Clip(600, Fraction(1), 32, 32, container="webm"),
}
LONG = Clip(200, options={**MEDIUM, "g": "50"})
CUTS: dict[str, tuple[Clip, float]] = {
    "cut off a key frame": (LONG, 2.7),
    "cut just after a key frame": (LONG, 1.02),
    "mostly cut": (Clip(100, options={"g": "100"}), 3.0),
}
NAMES = [*CLIPS, *CUTS]
ONE_FRAME = ("mp4", "webm", "gif")
QWEN2, QWEN3 = VideoRules("qwen2_vl", ImageRules()), VideoRules("qwen3_vl", ImageRules())
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"fps": 7.5}, {"fps": 30, "num_frames": 8})


@pytest.fixture(scope="module")
def video() -> Callable[[str], bytes]:
    made: dict[str, bytes] = {}

    def of(name: str) -> bytes:
        if name not in made:
            made[name] = CLIPS[name].encode() if name in CLIPS else cut(CUTS[name][0].encode(), CUTS[name][1])
        return made[name]

    return of


def test_there_are_fifty_files() -> None:
    assert len(NAMES) + len(ONE_FRAME) >= 50


@pytest.mark.parametrize("name", NAMES)
def test_indices_rates_and_pixels(video: Callable[[str], bytes], name: str) -> None:
    data = video(name)
    header = read_header(data)
    for rules in (QWEN2, QWEN3):
        theirs = VIDEO_LOADER_REGISTRY.load(rules.loader)
        for options in OPTIONS:
            frames, expected = theirs.load_bytes(data, **{"num_frames": 32, **options})
            found = sample(header, rules, **options)
            chosen = expected["frames_indices"]
            if rules is QWEN3 and expected["do_sample_frames"]:  # then the processor chooses among all frames
                known = VideoMetadata(expected["total_num_frames"], expected["fps"])
                chosen = Qwen3VLVideoProcessor().sample_frames(known).tolist()
                frames = frames[chosen]
            assert list(found.indices) == chosen, (rules.loader, options)
            assert (found.total_num_frames, found.fps, found.duration_s) == (
                expected["total_num_frames"],
                expected["fps"],
                expected["duration"],
            )
            assert frames.shape[1:3] == (header.height, header.width)
            pixels = decode(data, found.indices)
            assert pixels.shape == frames.shape
            assert np.abs(pixels.astype(np.int16) - frames).max() <= 2


@pytest.mark.parametrize("container", ONE_FRAME)
def test_a_single_frame_is_decoded_where_vllm_finds_none(container: str) -> None:
    """vLLM's count of frames has read the only one, and does not rewind to it: its loader gives no frame."""
    clip = Clip(1, container=container)
    data = clip.encode()
    frames, expected = VIDEO_LOADER_REGISTRY.load("opencv").load_bytes(data, num_frames=32)
    assert (len(frames), expected["frames_indices"]) == (0, [])
    header = read_header(data)
    found = sample(header, QWEN3)
    assert (found.total_num_frames, found.fps, found.duration_s) == (
        expected["total_num_frames"],
        expected["fps"],
        expected["duration"],
    )
    assert np.abs(decode(data, found.indices)[0].astype(int) - clip.pictures()[0]).mean() < 20
    with pytest.raises(ZeroDivisionError):
        VIDEO_LOADER_REGISTRY.load("qwen2_vl").load_bytes(data, num_frames=32)
    with pytest.raises(VideoError, match="video has 1 frames, the model needs at least 2"):
        sample(header, QWEN2)


@pytest.mark.parametrize("options", [{}, {"num_frames": 5}, {"num_frames": -1, "fps": 4}])
def test_frame_lists(options: dict[str, Any]) -> None:
    data = frame_list(Clip(40).pictures())
    frames, expected = VideoMediaIO(ImageMediaIO(), **options).load_base64("video/jpeg", data.decode()).media
    found = sample(read_header(data), QWEN3, **options)
    assert list(found.indices) == expected["frames_indices"]
    assert (found.total_num_frames, found.fps, found.duration_s) == (
        expected["total_num_frames"],
        expected["fps"],
        expected["duration"],
    )
    assert np.array_equal(decode(data, found.indices), frames)


def test_qwen2_vls_steps_are_rounded_as_torch_rounds_them() -> None:
    """vLLM takes the indices from torch's float32 `arange`; ours are without torch."""
    theirs = VIDEO_LOADER_REGISTRY.load("qwen2_vl")
    header = read_header(Clip(4).encode())
    rng = np.random.default_rng(0)
    for total in [*range(2, 100), *rng.integers(100, 100_000, 1500).tolist()]:
        for fps in (24.0, 7.5):
            known = type(header)(**{**vars(header), "num_frames": total, "num_stored": total, "fps": fps})
            source = type("Source", (), {"total_frames_num": total, "original_fps": fps, "duration": total / fps})
            target = type("Target", (), {"num_frames": 32, "fps": 2.0, "max_duration": 300})
            expected = theirs.compute_frames_index_to_sample(source, target)
            assert list(sample(known, QWEN2).indices) == sorted(set(expected)), (total, fps)
