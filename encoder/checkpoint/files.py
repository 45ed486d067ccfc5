"""Finds a checkpoint: a local folder, or a hub model of which only the encoder's files are downloaded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PREPROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")

WHOLE = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken")
NOT_READ = ("original/*", "consolidated*")
"""Weights in other formats than transformers'."""

# Qwen3-VL, and Qwen2.5-VL as saved since transformers 4.52; Qwen2.5-VL as published.
VISION_PREFIXES = ("model.visual.", "visual.")

# Shard names come from an untrusted index, and are used as paths and as download patterns.
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")


class CheckpointError(ValueError):
    """A model cannot be found or downloaded, its index is invalid, or its tensors are missing, unknown, of the wrong
    shape, quantised or unreadable. The message says what to do."""


def vision_name(name: str) -> str | None:
    """Returns a tensor's name inside the vision tower, or None if it is not a tensor of the tower."""
    for prefix in VISION_PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return None


def read_index(file: Path, *, vision_only: bool = True) -> dict[str, str]:
    """Returns the shard of each (vision) tensor by the tensor's full name. Raises `CheckpointError`."""
    try:
        raw: object = json.loads(file.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from None
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{file} has no weight_map")
    shards = {name: shard for name, shard in weight_map.items() if not vision_only or vision_name(name) is not None}
    for name, shard in shards.items():
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
            raise CheckpointError(f"{file} lists {name} in {shard!r}, which is not the name of a safetensors file")
    return shards


def weight_files(path: Path, *, vision_only: bool) -> Mapping[Path, list[str] | None]:
    """Returns the safetensors files of a checkpoint folder (that hold vision tensors), each with the names that the
    index lists (None: all in the file). Raises `CheckpointError`."""
    if (path / INDEX_FILE).is_file():
        files: dict[Path, list[str]] = {}
        for name, shard in sorted(read_index(path / INDEX_FILE, vision_only=vision_only).items()):
            files.setdefault(path / shard, []).append(name)
        return files
    if (path / SINGLE_FILE).is_file():
        return {path / SINGLE_FILE: None}
    raise CheckpointError(f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}")


def resolve_checkpoint(model: str, *, weights: bool = True, whole: bool = False) -> Path:
    """Returns the local folder of `model`: a folder itself, or a hub name, downloaded into the hub's cache.

    Downloads the configuration, the preprocessor's files and, with `weights`, the shards that hold vision tensors; with
    `whole`, all files that vLLM reads. Raises `CheckpointError`, which says what to do.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"model {model!r} is a file: give the folder that holds its config.json")
    if model.startswith(("/", ".", "~")) or "\\" in model:
        raise CheckpointError(f"model {model!r}: there is no such folder")
    try:
        return _fetch(model, weights, whole)
    except HFValidationError:
        raise CheckpointError(f"model {model!r} is neither a folder nor a hub name like 'Qwen/Qwen3-VL-8B'") from None
    except GatedRepoError:
        raise CheckpointError(
            f"model {model!r} is gated: accept its terms on the hub, and log in with `hf auth login` or set HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"model {model!r} is neither a folder here nor on the hub: check the name; "
            "if it is private, log in with `hf auth login` or set HF_TOKEN"
        ) from None
    except LocalEntryNotFoundError:
        raise CheckpointError(
            f"model {model!r} is not in the hub's cache and the hub cannot be reached: give a folder, "
            f"or run `hf download {model}` where there is a connection and share its HF_HOME"
        ) from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        raise CheckpointError(f"model {model!r}: the hub answered with status {status}; try again later") from None


def _fetch(model: str, weights: bool, whole: bool) -> Path:
    config = Path(_file_of(model, CONFIG_FILE))
    # The cache names a snapshot's folder by its commit: all other files are downloaded at the same commit.
    revision = config.parent.name
    wanted = [*_weight_files(model, revision)] if weights and not whole else []
    patterns = [*WHOLE] if whole else [CONFIG_FILE, *PREPROCESSOR_FILES, *wanted]
    folder = Path(snapshot_download(model, revision=revision, allow_patterns=patterns, ignore_patterns=[*NOT_READ]))
    # Offline, the hub's client returns a partly cached snapshot without an error.
    missing = [name for name in (CONFIG_FILE, *wanted) if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"model {model!r} is only partly in the hub's cache ({', '.join(missing)} missing) and the hub cannot be "
            f"reached: run `hf download {model}` where there is a connection"
        )
    return folder


def _weight_files(model: str, revision: str) -> Iterable[str]:
    """Returns the index and the shards with vision tensors, or the single file of a checkpoint without an index."""
    try:
        index = Path(_file_of(model, INDEX_FILE, revision))
    except EntryNotFoundError:
        # Also raised offline, where it is unknown whether the checkpoint has an index: the single file may be cached.
        _file_of(model, SINGLE_FILE, revision)
        return [SINGLE_FILE]
    shards = sorted(set(read_index(index).values()))
    if not shards:
        prefixes = " or ".join(repr(prefix) for prefix in VISION_PREFIXES)
        raise CheckpointError(f"model {model!r} has no vision tensors: none of its names begins with {prefixes}")
    return [INDEX_FILE, *shards]


def _file_of(model: str, name: str, revision: str | None = None) -> str:
    try:
        return str(hf_hub_download(model, name, revision=revision))
    except LocalEntryNotFoundError:
        raise
    except EntryNotFoundError:
        if name == INDEX_FILE:
            raise
        raise CheckpointError(f"model {model!r} has no {name} on the hub: it is not a safetensors checkpoint") from None
