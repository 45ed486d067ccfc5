"""The fingerprint of a checkpoint that only vLLM can read: equal for equal files, another for any trained tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from encoder.checkpoint.files import INDEX_FILE, SINGLE_FILE, CheckpointError
from encoder.checkpoint.fingerprint import SAMPLE_BYTES, checkpoint_fingerprint

NUM_VALUES = SAMPLE_BYTES


def write(folder: Path, *, config: str = "{}", first: float = 0.0, last: float = 0.0) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config)
    values = torch.zeros(NUM_VALUES)
    values[0], values[-1] = first, last
    save_file({"a": torch.ones(3), "b": values}, folder / SINGLE_FILE)
    return folder


def test_equal_checkpoints_have_one_fingerprint_wherever_they_are(tmp_path: Path) -> None:
    assert checkpoint_fingerprint(write(tmp_path / "a")) == checkpoint_fingerprint(write(tmp_path / "b"))


@pytest.mark.parametrize("change", [{"config": '{"a": 1}'}, {"first": 1.0}, {"last": 1.0}])
def test_other_files_have_another_one(tmp_path: Path, change: dict[str, object]) -> None:
    plain, changed = write(tmp_path / "a"), write(tmp_path / "b", **change)  # type: ignore[arg-type]
    assert checkpoint_fingerprint(plain) != checkpoint_fingerprint(changed)


def test_tensors_of_the_language_model_count_in_any_shard(tmp_path: Path) -> None:
    found = []
    for value in (0.0, 1.0):
        save_file({"model.layers.0.weight": torch.full((4,), value)}, tmp_path / "x.safetensors")
        (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"model.layers.0.weight": "x.safetensors"}}))
        found.append(checkpoint_fingerprint(tmp_path))
    assert len(set(found)) == 2


def test_a_checkpoint_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has neither"):
        checkpoint_fingerprint(tmp_path)
    (tmp_path / SINGLE_FILE).write_bytes(b"\x02\0\0\0\0\0\0\0[]")
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        checkpoint_fingerprint(tmp_path)


@pytest.mark.parametrize("missing", [1, 4 * NUM_VALUES + 1])
def test_a_truncated_shard_is_refused(tmp_path: Path, missing: int) -> None:
    """Slices past the end of a file are shorter without an error."""
    file = write(tmp_path) / SINGLE_FILE
    data = file.read_bytes()
    file.write_bytes(data[:-missing])
    with pytest.raises(CheckpointError, match=r"not a complete safetensors file: \w has \d+ of its \d+ bytes"):
        checkpoint_fingerprint(tmp_path)
