"""One process for all scripts that Triton's interpreter runs, and a small tower of each architecture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from encoder.towers.tower import VisionTower
from encoder.towers.weights import load_tower
from tests.unit.encoder.interpreter import Interpreted, interpreter
from training.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Interpreted]:
    with interpreter() as run:
        yield run


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def tower(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VisionTower:
    path = make_checkpoint(request.param, tmp_path_factory.mktemp("checkpoints") / request.param)
    return load_tower(path, dtype=torch.float32, device=torch.device("cpu"))
