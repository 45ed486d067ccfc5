"""The digest names an embedding: whatever decides the embedding changes it, and nothing else does."""

from __future__ import annotations

import copy
import dataclasses
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from encoder.checkpoint.vision_config import VisionConfig
from encoder.images.identity import EncoderIdentity
from encoder.images.size import ImageRules, PixelBounds
from tests.programs import output_of_python

VISION = VisionConfig.from_dict({"model_type": "qwen3_vl", "vision_config": {}})
IDENTITY = EncoderIdentity("0" * 64, VISION, "bfloat16", ImageRules())
DATA = b"the bytes of a file"


def changed(value: object) -> object:
    """Another value of the same kind."""
    match value:
        case str():
            return value + "x"
        case tuple():
            return (*value, value[-1] if value else 1)
        case int() | float():
            return value + 1
    raise AssertionError(f"no other value for {value!r}")


def variants(identity: EncoderIdentity) -> dict[str, EncoderIdentity]:
    """Identities that differ in one fact each, all facts of the tower and the rules among them."""
    found = {
        "weights": dataclasses.replace(identity, weights="1" * 64),
        "dtype": dataclasses.replace(identity, dtype="float32"),
        "forward": dataclasses.replace(identity, forward="fused"),
    }
    for part in ("vision", "rules"):
        facts = getattr(identity, part)
        for field in dataclasses.fields(facts):
            other = copy.copy(facts)
            object.__setattr__(other, field.name, changed(getattr(facts, field.name)))  # valid or not
            found[f"{part}.{field.name}"] = dataclasses.replace(identity, **{part: other})
    return found


def test_an_identity_survives_json() -> None:
    """An ingress gets it as JSON; with another fingerprint every encoder would refuse its jobs."""
    whole = dataclasses.replace(IDENTITY, rules=ImageRules(rescale_factor=1, image_mean=(0, 0, 0)))
    for identity in (IDENTITY, whole):
        again = EncoderIdentity.from_json(identity.to_json())
        assert again == identity
        assert again.fingerprint == identity.fingerprint


def test_the_image_token_changes_no_digest() -> None:
    """Headers came after digests: the caches of running encoders stay valid."""
    other = dataclasses.replace(IDENTITY, image_token_id=7)
    assert (other.fingerprint, other.tower) == (IDENTITY.fingerprint, IDENTITY.tower)
    assert EncoderIdentity.from_json(other.to_json()).image_token_id == 7


def test_the_header_of_an_image_is_a_run_of_image_tokens() -> None:
    header = dataclasses.replace(IDENTITY, image_token_id=7).header("ab" * 32, (1, 6, 10))
    assert (header.modality, header.num_embeds, header.metadata) == ("image", 15, (1, 6, 10))
    assert [(update.mode, update.target, update.tokens) for update in header.updates] == [("replace", (7,), [7] * 15)]
    with pytest.raises(ValueError, match="no image_token_id"):
        IDENTITY.header("ab" * 32, (1, 6, 10))


@pytest.mark.parametrize("name", variants(IDENTITY))
def test_every_fact_changes_fingerprint_and_digest(name: str) -> None:
    """Heads and windows, for instance, change every embedding without changing a weight."""
    other = variants(IDENTITY)[name]
    assert other.fingerprint != IDENTITY.fingerprint
    assert other.digest(DATA, None) != IDENTITY.digest(DATA, None)


def test_all_variants_differ_from_each_other() -> None:
    digests = {identity.digest(DATA, None) for identity in variants(IDENTITY).values()}
    assert len(digests) == len(variants(IDENTITY))


def test_equal_facts_give_equal_digests() -> None:
    again = EncoderIdentity("0" * 64, dataclasses.replace(VISION), "bfloat16", ImageRules())
    assert again.fingerprint == IDENTITY.fingerprint
    assert again.digest(DATA, PixelBounds()) == IDENTITY.digest(DATA, None)


def test_another_process_gives_the_same_digest() -> None:
    """It keys the caches of several replicas; Python's own hashes differ from process to process."""
    program = (
        "from encoder.images.identity import *; from encoder.images.size import ImageRules\n"
        "vision = VisionConfig.from_dict({'model_type': 'qwen3_vl', 'vision_config': {}})\n"
        f"print(EncoderIdentity('0' * 64, vision, 'bfloat16', ImageRules()).digest({DATA!r}, PixelBounds(1, 2), 's'))"
    )
    assert output_of_python(program).strip() == IDENTITY.digest(DATA, PixelBounds(1, 2), "s")


def test_digests_need_no_torch() -> None:
    """The ingress makes them, and it should not pay for torch."""
    program = (
        "import sys, encoder.images.identity; sys.exit(any(name in sys.modules for name in ('torch', 'ray', 'numpy')))"
    )
    output_of_python(program)


def test_bounds_and_salt_change_the_digest() -> None:
    digests = [
        IDENTITY.digest(DATA, bounds, salt)
        for bounds in (None, PixelBounds(100, None), PixelBounds(None, 100), PixelBounds(100, 100))
        for salt in (None, "", "tenant")
    ]
    assert len(set(digests)) == len(digests)


@settings(deadline=None)
@given(st.binary(max_size=20), st.binary(max_size=20))
def test_other_bytes_have_another_digest(one: bytes, other: bytes) -> None:
    assert (IDENTITY.digest(one, None) == IDENTITY.digest(other, None)) == (one == other)


def test_the_same_samples_in_another_shape_are_another_image() -> None:
    """30x150 and 150x30 of one colour have the same bytes; a digest that left out the shape would mix them up."""
    upright, lying = Image.new("RGB", (30, 150), "red"), Image.new("RGB", (150, 30), "red")
    assert upright.tobytes() == lying.tobytes()
    assert IDENTITY.digest(upright, None) != IDENTITY.digest(lying, None)


def test_a_pil_image_counts_by_what_is_seen() -> None:
    """The palette decides the picture and not the indices into it; transparency is put on white."""
    red, blue = Image.new("P", (4, 4), 1), Image.new("P", (4, 4), 1)
    red.putpalette([0, 0, 0, 255, 0, 0])
    blue.putpalette([0, 0, 0, 0, 0, 255])
    assert red.tobytes() == blue.tobytes()
    assert IDENTITY.digest(red, None) != IDENTITY.digest(blue, None)
    assert IDENTITY.digest(red, None) == IDENTITY.digest(Image.new("RGB", (4, 4), (255, 0, 0)), None)
    clear, white = Image.new("RGBA", (4, 4), (9, 9, 9, 0)), Image.new("RGB", (4, 4), "white")
    assert IDENTITY.digest(clear, None) == IDENTITY.digest(white, None)


def test_a_files_orientation_is_part_of_its_bytes() -> None:
    image = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    files = []
    for orientation in (1, 6):
        exif = Image.Exif()
        exif[0x0112] = orientation
        file = io.BytesIO()
        image.save(file, "PNG", exif=exif)
        files.append(file.getvalue())
    assert IDENTITY.digest(files[0], None) != IDENTITY.digest(files[1], None)


def test_digests_are_64_hexadecimal_characters() -> None:
    for text in (IDENTITY.digest(DATA, None), IDENTITY.fingerprint):
        assert len(text) == 64
        assert set(text) <= set("0123456789abcdef")
