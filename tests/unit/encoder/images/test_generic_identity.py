"""The identity of vLLM's encoders: what its digests depend on, and the tokens that it expects of an image."""

from __future__ import annotations

from dataclasses import replace

import pytest

from encoder.images.generic_identity import MEASURED_SIDES, GenericIdentity, identity_from_json
from tests.unit.deployments.samples import IDENTITY

CONSTANT = ((256,) * 4,) * 4
BY_AREA = tuple(tuple(width * height // 1024 for height in MEASURED_SIDES) for width in MEASURED_SIDES)
GENERIC = GenericIdentity("checkpoint", "settings", CONSTANT)
HEARS = replace(GENERIC, token_counts=(), audio_tokens=(25, 250, 750), video_tokens=512)


@pytest.mark.parametrize(
    "identity",
    [GENERIC, replace(GENERIC, in_engine=True), HEARS, IDENTITY],
    ids=["generic", "in_engine", "hears", "own"],
)
def test_an_identity_survives_json(identity: GenericIdentity) -> None:
    """Serve sends it to the ingress, which computes digests with it."""
    found = identity_from_json(identity.to_json())
    assert (found, found.fingerprint) == (identity, identity.fingerprint)


def test_digests_depend_on_the_checkpoint_the_settings_the_file_and_the_tenant() -> None:
    others = [replace(GENERIC, checkpoint="other"), replace(GENERIC, settings="other")]
    digests = [one.digest(b"file", None) for one in (GENERIC, *others)]
    digests += [GENERIC.digest(b"another", None), GENERIC.digest(b"file", None, "salt")]
    assert len(set(digests)) == 5
    assert replace(GENERIC, token_counts=BY_AREA).digest(b"file", None) == digests[0]


def test_language_models_take_embeddings_of_their_checkpoint() -> None:
    assert replace(GENERIC, settings="other").tower == GENERIC.tower
    assert replace(GENERIC, checkpoint="other").tower != GENERIC.tower


def test_language_models_with_a_tower_of_their_own_take_files_alone() -> None:
    """In an update, an ingress must not send files to a language model without tower, nor embeddings to one with it."""
    engine = replace(GENERIC, in_engine=True)
    assert engine.tower == engine.fingerprint
    assert engine.tower not in (GENERIC.tower, GENERIC.fingerprint)


@pytest.mark.parametrize("size", [(1, 1), (32, 9000), (640, 480), (5000, 5000)])
def test_the_cost_of_a_fixed_number_of_tokens_is_exact(size: tuple[int, int]) -> None:
    assert GENERIC.plan_image("d" * 64, *size, None) == (256, None)


@pytest.mark.parametrize(
    ("size", "tokens"),
    [
        ((1280, 800), 1000),
        ((800, 1280), 1000),
        ((32, 32), 1),
        ((4096, 4096), 16384),
        ((8, 8), 1),
        ((9999, 9999), 16384),
    ],
)
def test_the_cost_by_area_is_exact_between_measured_sizes(size: tuple[int, int], tokens: int) -> None:
    assert replace(GENERIC, token_counts=BY_AREA).plan_image("d" * 64, *size, None)[0] == tokens


def test_modalities_are_those_with_counts() -> None:
    assert [one.modalities for one in (GENERIC, HEARS, IDENTITY)] == [("image",), ("audio", "video"), ("image",)]


@pytest.mark.parametrize(
    ("seconds", "tokens"), [(0.01, 1), (1, 25), (4, 100), (10, 250), (35, 500), (60, 750), (110, 1250)]
)
def test_tokens_of_a_sound_are_estimated_by_its_duration(seconds: float, tokens: int) -> None:
    assert HEARS.estimate_audio_tokens(seconds) == tokens


def test_digests_depend_on_the_medium() -> None:
    assert HEARS.digest(b"file", None) != HEARS.digest(b"file", None, rules_version="audio 1")
