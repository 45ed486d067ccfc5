"""Three of `make test-models`: embeddings by mask, items without metadata, tower and language model built at once."""

from __future__ import annotations

import pytest

from tests.models.prove import Proof, prove

NAMES = ("gemma3", "mistral3", "idefics3")


@pytest.fixture(scope="module")
def proofs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Proof]:
    return dict(prove(NAMES, tmp_path_factory.mktemp("models")))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
def test_answers_equal_those_of_vllm_alone(proofs: dict[str, Proof], name: str) -> None:
    assert proofs[name].passed, proofs[name]
