"""Loads the vision tensors of a safetensors checkpoint into a tower, strict on names, shapes and dtypes.

Language tensors are never read, whatever their dtype.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from encoder.checkpoint.files import INDEX_FILE, VISION_PREFIXES, CheckpointError, vision_name, weight_files
from encoder.checkpoint.image_rules import ImageRules
from encoder.checkpoint.vision_config import VisionConfig
from encoder.images.identity import tower_fingerprint
from encoder.towers.tower import VisionTower

TOWER_DTYPES = (torch.float32, torch.bfloat16)
# safetensors' names of the dtypes that hold plain weights.
_PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
_PATCH_WEIGHT = "patch_embed.proj.weight"
_LISTED_PROBLEMS = 8

_Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class _Stored:
    """A vision tensor in a file. `name` is its full name there, `dtype` safetensors' name of its dtype."""

    file: Path
    name: str
    dtype: str
    shape: _Shape


def load_tower(path: Path, *, dtype: torch.dtype, device: torch.device) -> VisionTower:
    """Loads the tower of the checkpoint folder `path`, in evaluation mode and without gradients.

    `dtype`: float32 or bfloat16; weights stored in another dtype are rounded once. Raises `ValueError` for another
    `dtype`, `VisionConfigError` for the configuration, and `CheckpointError` for the weights, which names each tensor
    with its expected and its found shape.
    """
    if dtype not in TOWER_DTYPES:
        raise ValueError(f"dtype {dtype} is not supported: {', '.join(map(str, TOWER_DTYPES))} are; set encoder.dtype")
    tower = build_tower(VisionConfig.from_checkpoint(path))
    stored = _stored_tensors(path)
    _check(tower, stored, path)
    parameters = dict(tower.named_parameters())
    filled: dict[str, Tensor] = {}
    for name, tensor in _read(stored):
        # Always copied: a tensor that maps the file would change or become invalid with the file.
        filled[name] = tensor.view(parameters[name].shape).to(device=device, dtype=dtype, copy=True)
    tower.load_state_dict(filled, strict=True, assign=True)
    # Moves the computed buffers; the parameters are on the device already.
    return tower.to(device).requires_grad_(False).eval()


def build_tower(config: VisionConfig) -> VisionTower:
    """Builds the tower that `config` describes, with its parameters on the meta device."""
    with torch.device("meta"):
        return VisionTower(config)


def weights_identity(path: Path) -> str:
    """Returns the SHA-256 (64 hex characters) of names, dtypes, shapes and bytes of the vision tensors in `path`.

    Independent of the division into files and of the names' prefix. Raises `CheckpointError`.
    """
    stored = _stored_tensors(path)
    digest = hashlib.sha256()
    for name, tensor in _read(dict(sorted(stored.items()))):
        digest.update(f"{name} {stored[name].dtype} {stored[name].shape}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tower_identity(path: Path) -> str:
    """Returns `EncoderIdentity.tower` of encoders of the checkpoint folder `path`. Raises `CheckpointError`."""
    return tower_fingerprint(
        weights_identity(path), VisionConfig.from_checkpoint(path), ImageRules.from_checkpoint(path)
    )


def _stored_tensors(path: Path) -> dict[str, _Stored]:
    """Returns the vision tensors of a checkpoint folder by their name inside the tower. Reads headers only."""
    stored: dict[str, _Stored] = {}
    for file, names in weight_files(path, vision_only=True).items():
        try:
            with safe_open(file, framework="pt") as reader:
                there = set(reader.keys())
                for full_name in names if names is not None else sorted(there):
                    name = vision_name(full_name)
                    if name is None:
                        continue
                    if full_name not in there:
                        raise CheckpointError(f"{full_name} is not in {file.name}, where {INDEX_FILE} lists it")
                    if name in stored:
                        raise CheckpointError(f"{name} occurs twice: as {stored[name].name} and as {full_name}")
                    part = reader.get_slice(full_name)
                    stored[name] = _Stored(file, full_name, part.get_dtype(), tuple(part.get_shape()))
        except FileNotFoundError:
            raise CheckpointError(f"{path} lacks {file.name}, in which {INDEX_FILE} lists vision tensors") from None
        except SafetensorError as error:
            raise CheckpointError(f"{file} is not a complete safetensors file: {error}") from None
    if not stored:
        prefixes = " or ".join(repr(prefix) for prefix in VISION_PREFIXES)
        raise CheckpointError(f"{path} has no vision tensors: no name begins with {prefixes}")
    return stored


def _check(tower: VisionTower, stored: Mapping[str, _Stored], path: Path) -> None:
    """Raises `CheckpointError` unless the stored tensors match the tower's names and shapes and have a plain dtype."""
    for tensor in stored.values():
        if tensor.dtype not in _PLAIN_DTYPES:
            raise CheckpointError(
                f"{tensor.name} in {path} is quantised (dtype {tensor.dtype}, shape {list(tensor.shape)}): only plain "
                f"vision weights ({', '.join(_PLAIN_DTYPES)}) are supported; quantised language weights do not matter"
            )
    expected = {name: tuple(parameter.shape) for name, parameter in tower.named_parameters()}
    config = tower.config
    # Checkpoints store the kernel of a convolution; the tower has a matrix over flattened patches.
    expected[_PATCH_WEIGHT] = (
        config.hidden_size,
        config.in_channels,
        config.temporal_patch_size,
        config.patch_size,
        config.patch_size,
    )
    problems = [
        f"{name}: missing, expected shape {list(shape)}" for name, shape in expected.items() if name not in stored
    ]
    for name, tensor in stored.items():
        if name not in expected:
            problems.append(f"{tensor.name}: unexpected, found with shape {list(tensor.shape)}")
        elif tensor.shape != expected[name]:
            problems.append(f"{tensor.name}: misshapen, expected {list(expected[name])}, found {list(tensor.shape)}")
    if problems:
        listed = "\n  ".join(problems[:_LISTED_PROBLEMS])
        more = f"\n  and {len(problems) - _LISTED_PROBLEMS} more" if len(problems) > _LISTED_PROBLEMS else ""
        raise CheckpointError(
            f"the vision tensors of {path} do not fit its config.json ({config.architecture}):\n  {listed}{more}"
        )


def _read(stored: Mapping[str, _Stored]) -> Iterator[tuple[str, Tensor]]:
    """Yields each tensor on the host, in the order of `stored`."""
    with ExitStack() as stack:
        readers = {
            file: stack.enter_context(safe_open(file, framework="pt"))
            for file in sorted({tensor.file for tensor in stored.values()})
        }
        for name, tensor in stored.items():
            yield name, readers[tensor.file].get_tensor(tensor.name)
