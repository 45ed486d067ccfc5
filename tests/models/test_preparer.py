"""`Preparer` with vLLM's processor of Gemma 3: what decode workers refuse, and what they answer."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

from deployments.vllm.preparer import ItemError, Preparer, VllmInputs
from encoder.images.load import ImageError
from tests.hostile.files import header_bombs, png_stating
from tests.models import media
from tests.models.checkpoints import make

DIGEST = "d" * 64
MAX_PIXELS = 100_000

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
