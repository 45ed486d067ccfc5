"""`Preparer` with vLLM's processor of Gemma 3: what decode workers refuse, and what they answer."""

from __future__ import annotations

import io
from fractions import Fraction
from pathlib import Path

import pytest
from PIL import Image

from configs.schema import AudioConfig, VideoConfig
from deployments.common.messages import VideoSampling
from deployments.vllm.preparer import ItemError, Preparer, VllmInputs, count_audio_tokens, count_video_tokens
from encoder.images.load import ImageError
from tests.hostile.files import header_bombs, png_stating
from tests.models import media
from tests.models.checkpoints import make
from tests.sounds import FORMATS, tone
from tests.video_files import Clip

DIGEST = "d" * 64
MAX_PIXELS = 100_000
RATE = Fraction(8)
CLIP, OTHER_CLIP = (Clip(24, RATE, 128, 96, seed=seed, block=32).encode() for seed in (1, 2))

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def preparer(tmp_path_factory: pytest.TempPathFactory) -> Preparer:
    folder = tmp_path_factory.mktemp("gemma3")
    make("gemma3", folder)
    return Preparer(folder, {"dtype": "float32"}, max_pixels_decoded=MAX_PIXELS)


def test_an_item_has_a_header_and_inputs(preparer: Preparer) -> None:
    prepared = preparer.prepare(media.image(1), "image", DIGEST)
    assert (prepared.header.digest, prepared.header.modality, prepared.num_tokens) == (DIGEST, "image", 16)
    assert len(prepared.inputs) > 3 * 112 * 112 * 4
    assert VllmInputs.from_parts(*prepared.to_parts()) == prepared


def test_the_pixels_are_those_of_vllms_own_loader(preparer: Preparer) -> None:
    """Transparency and a palette are converted as vLLM does."""
    from vllm.multimodal.media.image import ImageMediaIO

    file = io.BytesIO()
    picture = Image.open(io.BytesIO(media.image(3))).convert("RGBA")
    picture.putalpha(100)
    picture.save(file, "PNG")
    theirs = io.BytesIO()
    ImageMediaIO().load_bytes(file.getvalue()).media.save(theirs, "PNG")
    ours, reference = (preparer.prepare(data, "image", DIGEST) for data in (file.getvalue(), theirs.getvalue()))
    assert ours == reference


@pytest.mark.parametrize("name", header_bombs(100_000))
def test_hostile_files_are_refused(preparer: Preparer, name: str) -> None:
    with pytest.raises(ImageError):
        preparer.prepare(header_bombs(100_000)[name], "image", DIGEST)


@pytest.mark.parametrize("data", [b"", b"not an image", media.image(1)[:-200], png_stating(1000, 1000)])
def test_broken_and_large_files_are_refused(preparer: Preparer, data: bytes) -> None:
    with pytest.raises(ImageError):
        preparer.prepare(data, "image", DIGEST)


@pytest.mark.parametrize("modality", ["audio", "video", "scent"])
def test_a_medium_that_the_model_lacks_is_refused(preparer: Preparer, modality: str) -> None:
    with pytest.raises(ItemError, match=f"takes no {modality}"):
        preparer.prepare(media.audio(1), modality, DIGEST)


def test_what_the_processor_raises_is_not_shown(preparer: Preparer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("/a/path/of/this/machine")

    monkeypatch.setattr(preparer._processor, "_apply_hf_processor", fail)
    with pytest.raises(ItemError, match=r"^the model's processor cannot process the image$"):
        preparer.prepare(media.image(1), "image", DIGEST)


def test_settings_that_would_change_pixels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="media_io_kwargs has settings for images"):
        Preparer(tmp_path, {"media_io_kwargs": {"image": {"image_mode": None}}})


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Preparer:
    """Hears up to 4 s, and sees up to 10 s, 8 frames and 128 x 96 pixels a frame."""
    folder = tmp_path_factory.mktemp("qwen2_5_omni")
    make("qwen2_5_omni", folder)
    return Preparer(
        folder,
        {"dtype": "float32"},
        audio=AudioConfig(max_seconds=4, max_samples=200_000),
        video=VideoConfig(max_seconds=10, max_frames=8, max_pixels_per_frame=128 * 96),
    )


@pytest.mark.parametrize("container", FORMATS)
def test_sounds_of_each_format_are_resampled(omni: Preparer, container: str) -> None:
    """25 tokens a second, whatever the rate and the number of channels."""
    prepared = omni.prepare(tone(container, seconds=2, rate=44_100, channels=2), "audio", DIGEST)
    assert prepared.header.modality == "audio"
    assert 49 <= prepared.num_tokens <= 52


def stating(seconds: float) -> bytes:
    """A FLAC file that states a duration of a tenth."""
    data = bytearray(tone("FLAC", seconds=seconds, rate=16_000))
    packed = int.from_bytes(data[18:26], "big")
    data[18:26] = (packed >> 36 << 36 | int(seconds * 1600)).to_bytes(8, "big")
    return bytes(data)


@pytest.mark.parametrize(
    "data",
    [b"", b"not a sound", tone("FLAC")[:400], tone(seconds=5), tone(seconds=3, rate=48_000, channels=2), stating(50)],
)
def test_broken_and_long_sounds_are_refused(omni: Preparer, data: bytes) -> None:
    with pytest.raises(ItemError, match=r"not within|within the limits of 4 s and 200000 samples"):
        omni.prepare(data, "audio", DIGEST)


def test_limits_under_what_is_measured_refuse_no_medium(omni: Preparer) -> None:
    """They were taken for a model without sounds or videos."""
    sounds = count_audio_tokens(lambda file: omni.prepare(file, "audio", DIGEST).num_tokens)
    assert len(sounds) == 3
    assert sounds[0] < sounds[1] < sounds[2]
    assert count_video_tokens(lambda file: omni.prepare(file, "video", DIGEST).num_tokens) > 0


def test_frames_of_videos_are_sampled_as_asked(omni: Preparer) -> None:
    """4 frames of 3 s at one a second, the least number, and 6 at two a second, which is the default.
    vLLM's loader for this model ignores `num_frames`."""
    by_fps = {fps: omni.prepare(CLIP, "video", DIGEST, VideoSampling(fps=fps)) for fps in (1.0, 2.0)}
    assert 6 * by_fps[1.0].num_tokens == 4 * by_fps[2.0].num_tokens
    default = omni.prepare(CLIP, "video", DIGEST)
    assert default.num_tokens == by_fps[2.0].num_tokens
    assert default.to_parts() == by_fps[2.0].to_parts() != omni.prepare(OTHER_CLIP, "video", DIGEST).to_parts()
    assert omni.prepare(media.video(1, 6), "video", DIGEST).header.modality == "video"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "video"),
        (b"not a video", "video"),
        (b"/9j/AAAA,/9j/AAAA", "video"),
        (CLIP[:2000], "video data is truncated or corrupt"),
        (Clip(96, RATE).encode(), "video lasts 12 seconds, the limit is 10"),
        (Clip(24, RATE, 128, 128).encode(), "128x128 = 16384 pixels, the limit is 12288"),
        (media.video(1, 9), "9 frames of the video would be encoded, the limit is 8"),
    ],
)
def test_broken_and_large_videos_are_refused(omni: Preparer, data: bytes, message: str) -> None:
    with pytest.raises(ImageError, match=message):
        omni.prepare(data, "video", DIGEST, VideoSampling(num_frames=None if b"/9j/" in data[:4] else 4))
