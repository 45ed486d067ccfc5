"""With an encoder and a language model on each of two hosts, embeddings stay on theirs, and a loss costs nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.transfer import namespaces
from tests.cluster import two_namespaces
from tests.cluster.test_two_nodes import LIMIT_S, told_by
from tests.cluster.two_hosts import LOST_REQUESTS, REQUESTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 60)]


@pytest.fixture(scope="module")
def found(checkpoints: dict[str, Path]) -> dict[str, Any]:
    return told_by("two_hosts", checkpoints["qwen3_vl"])


def test_embeddings_come_through_shared_memory_of_their_host(found: dict[str, Any]) -> None:
    """Where language models ran on two hosts, all of them went through Ray's object store."""
    placed = found["placed"]
    assert placed["statuses"] == {"200": REQUESTS}
    assert placed["hosts"] == 2
    assert sum(placed["received"].values()) == REQUESTS
    assert placed["received"]["engine_loads"] >= 0.95 * REQUESTS
    assert placed["received"].keys() <= {"engine_loads", "tcp"}


def test_the_chosen_language_model_is_called(found: dict[str, Any]) -> None:
    placed = found["placed"]
    assert placed["called"] == REQUESTS
    assert placed["called_as_chosen"] >= 0.99 * REQUESTS


@pytest.mark.parametrize("lost", ["at_once", "while_encoding"])
def test_a_language_model_lost_after_the_choice_costs_no_request_and_no_encoding(
    found: dict[str, Any], lost: str
) -> None:
    """Its images were encoded on its host; the next language model, on the other one, gets them from there."""
    assert found[lost] == {"statuses": {"200": LOST_REQUESTS}, "encoded": LOST_REQUESTS}


@pytest.mark.skipif(not namespaces.available(), reason="needs root, for network namespaces")
def test_embeddings_of_another_host_come_by_tcp(checkpoints: dict[str, Path]) -> None:
    """The hosts are network namespaces. Each image comes twice: neither hits nor misses leave the path."""
    found = told_by("two_namespaces", checkpoints["qwen3_vl"])
    assert found["statuses"] == {"200": two_namespaces.REQUESTS}
    assert found["received"] == {"tcp": two_namespaces.REQUESTS}
    assert found["network"] == found["hosts"] == 2
