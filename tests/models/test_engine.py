"""A real engine without a tower, given references, answers as vLLM alone, given the pictures."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from configs.encoder_config import EncoderConfig
from configs.resolve import PROJECT_ROOT
from encoder.encoder import Encoder
from tests.programs import output_of

SCENES = PROJECT_ROOT / "models" / "scenes-8m"
TOLERANCE = 1e-3


def picture(width: int, height: int, seed: int) -> Image.Image:
    """Large coloured squares, which the model tells apart."""
    squares = np.random.default_rng(seed).integers(0, 255, (height // 32, width // 32, 3), dtype=np.uint8)
    return Image.fromarray(np.kron(squares, np.ones((32, 32, 1), np.uint8)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, headers and embeddings; "other" is as large as "first"."""
    made: Path = tmp_path_factory.mktemp("items")
    encoder = Encoder.from_checkpoint(SCENES, EncoderConfig(dtype="float32"), device="cpu")
    headers = {}
    for seed, (name, size) in enumerate({"first": (320, 192), "second": (128, 128), "other": (320, 192)}.items()):
        picture(*size, seed).save(made / f"{name}.png")
        (embedding,) = encoder.encode([(made / f"{name}.png").read_bytes()])
        headers[name] = encoder.identity.header(embedding.digest, embedding.grid_thw)
        torch.save(embedding.tokens.clone(), made / f"{embedding.digest}.{'late' if name == 'second' else 'pt'}")
    (made / "headers.pickle").write_bytes(pickle.dumps(headers))
    return made


def asked(stage: str, folder: Path) -> dict[str, Any]:
    printed = output_of(
        [sys.executable, "-m", "tests.models.ask_engine", stage, str(SCENES), str(folder)],
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_NO_USAGE_STATS="1",
        OMP_NUM_THREADS="1",
        TORCHDYNAMO_DISABLE="1",
        PYTHONPATH=str(PROJECT_ROOT),
    )
    last: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return last


@pytest.mark.slow
def test_answers_are_those_of_vllm_alone(folder: Path) -> None:
    alone, served = asked("alone", folder), asked("served", folder)
    assert (alone["tower"], served["tower"]) == (["cpu"], ["meta"])
    for name, expected in alone["answers"].items():
        answer = served["answers"][name]
        assert answer["prompt"] == expected["prompt"], name
        assert answer["tokens"] == expected["tokens"], name
        assert answer["logprobs"] == pytest.approx(expected["logprobs"], abs=TOLERANCE), name
    one, other = (np.array(alone["answers"][name]["logprobs"]) for name in ("one picture", "another"))
    assert np.abs(one - other).max() > 0.1, "the answers depend on the picture"
