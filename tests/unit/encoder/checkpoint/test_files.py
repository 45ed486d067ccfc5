"""Resolving a model: folders as they are, hub names through huggingface_hub, replaced here at its public functions."""

from __future__ import annotations

import fnmatch
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)

from encoder.checkpoint import files as hub
from encoder.checkpoint.files import INDEX_FILE, SINGLE_FILE, CheckpointError, resolve_checkpoint
from tests.programs import output_of_python

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = "someone/some-model"

CONFIGURATION = ("config.json", "preprocessor_config.json", "video_preprocessor_config.json")
INDEX = json.dumps(
    {
        "weight_map": {
            "model.language_model.layers.0.mlp.up_proj.weight": "model-00001-of-00004.safetensors",
            "model.visual.merger.norm.bias": "model-00002-of-00004.safetensors",
            "model.visual.pos_embed.weight": "model-00004-of-00004.safetensors",
            "model.visual.blocks.0.norm1.bias": "model-00002-of-00004.safetensors",
            "lm_head.weight": "model-00003-of-00004.safetensors",
        }
    }
)
OTHERS = ("tokenizer.json", "README.md", "model-00001-of-00004.safetensors", "model-00003-of-00004.safetensors")
VISION_SHARDS = ("model-00002-of-00004.safetensors", "model-00004-of-00004.safetensors")


def _response(status: int) -> Any:
    """An httpx response; some versions of huggingface_hub declare httpx2's."""
    return httpx.Response(status, request=httpx.Request("GET", "http://hub.invalid"))


@dataclass
class FakeHub:
    """A hub with one repository and the cache beside it; it behaves as huggingface_hub documents its two functions."""

    cache: Path
    files: dict[str, str]
    online: bool = True
    error: Exception | None = None
    downloaded: set[str] = field(default_factory=set)

    @property
    def snapshot(self) -> Path:
        return self.cache / "snapshots" / COMMIT

    def hf_hub_download(self, repo_id: str, filename: str, *, revision: str | None = None) -> str:
        self._check(repo_id, revision)
        there = self.snapshot / filename
        if not self.online and not there.exists():
            raise LocalEntryNotFoundError("cannot reach the hub, and not in the cache")
        if self.online and filename not in self.files:
            raise RemoteEntryNotFoundError("404", response=_response(404))
        return str(self._download(filename))

    def snapshot_download(
        self, repo_id: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        self._check(repo_id, revision)
        for name in self.files:
            if any(fnmatch.fnmatch(name, pattern) for pattern in ignore_patterns):
                continue
            if self.online and any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                self._download(name)
        return str(self.snapshot)

    def _check(self, repo_id: str, revision: str | None) -> None:
        assert repo_id == MODEL
        assert revision in (None, COMMIT)
        if self.error is not None:
            raise self.error

    def _download(self, name: str) -> Path:
        file = self.snapshot / name
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self.files[name])
            self.downloaded.add(name)
        return file


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    files = dict.fromkeys((*CONFIGURATION, *OTHERS, *VISION_SHARDS), "x") | {INDEX_FILE: INDEX}
    fake = FakeHub(tmp_path / "cache", files)
    monkeypatch.setattr(hub, "hf_hub_download", fake.hf_hub_download)
    monkeypatch.setattr(hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.chdir(tmp_path)
    return fake


def test_a_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeHub) -> None:
    fake.error = AssertionError("asked the hub about a folder")
    (tmp_path / "home" / "model").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert resolve_checkpoint("home/model") == Path("home/model")
    assert resolve_checkpoint("~/model") == tmp_path / "home" / "model"


@pytest.mark.parametrize("model", ["/no/such/folder", "./model", "../model", "~/model", "C:\\models\\x"])
def test_a_path_that_is_not_there_is_not_looked_up(fake: FakeHub, model: str) -> None:
    fake.error = AssertionError("asked the hub about a path")
    with pytest.raises(CheckpointError, match="there is no such folder"):
        resolve_checkpoint(model)


def test_a_file_is_not_a_checkpoint(tmp_path: Path, fake: FakeHub) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="give the folder"):
        resolve_checkpoint("model.safetensors")


def test_only_shards_with_vision_tensors_are_fetched(fake: FakeHub) -> None:
    folder = resolve_checkpoint(MODEL)
    assert folder == fake.snapshot
    assert fake.downloaded == {*CONFIGURATION, INDEX_FILE, *VISION_SHARDS}


def test_a_checkpoint_of_one_file_is_fetched_whole(fake: FakeHub) -> None:
    fake.files = dict.fromkeys((*CONFIGURATION, "tokenizer.json", SINGLE_FILE), "x")
    resolve_checkpoint(MODEL)
    assert fake.downloaded == {*CONFIGURATION, SINGLE_FILE}


@pytest.mark.parametrize("one_file", [False, True])
def test_without_weights_only_the_configuration_is_fetched(fake: FakeHub, one_file: bool) -> None:
    if one_file:
        fake.files = dict.fromkeys((*CONFIGURATION, SINGLE_FILE), "x")
    assert resolve_checkpoint(MODEL, weights=False) == fake.snapshot
    assert fake.downloaded == set(CONFIGURATION)


@pytest.mark.parametrize("one_file", [False, True])
def test_what_was_fetched_once_needs_no_hub(fake: FakeHub, one_file: bool) -> None:
    """Offline the client cannot tell an index that does not exist from one that it never fetched."""
    if one_file:
        fake.files = dict.fromkeys((*CONFIGURATION, SINGLE_FILE), "x")
    expected = resolve_checkpoint(MODEL)
    fake.online = False
    assert resolve_checkpoint(MODEL) == expected


def test_offline_without_a_cache_says_what_to_do(fake: FakeHub) -> None:
    fake.online = False
    with pytest.raises(CheckpointError, match=rf"cannot be reached: give a folder, or run `hf download {MODEL}`"):
        resolve_checkpoint(MODEL)


def test_all_that_vllm_reads_is_fetched_for_its_own_class(fake: FakeHub) -> None:
    fake.files |= dict.fromkeys(("tokenizer.json", "original/model.safetensors", "consolidated.safetensors"), "x")
    folder = resolve_checkpoint(MODEL, whole=True)
    found = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert {*CONFIGURATION, *OTHERS, *VISION_SHARDS, INDEX_FILE} - {"README.md"} <= found
    assert not {"original/model.safetensors", "consolidated.safetensors"} & found


def test_offline_with_part_of_a_snapshot_names_what_is_missing(fake: FakeHub) -> None:
    """Offline, snapshot_download returns the folder that there is, whole or not."""
    resolve_checkpoint(MODEL)
    (fake.snapshot / VISION_SHARDS[1]).unlink()
    fake.online = False
    with pytest.raises(CheckpointError, match=rf"only partly in the hub's cache \({VISION_SHARDS[1]} missing\)"):
        resolve_checkpoint(MODEL)
    shutil.rmtree(fake.snapshot)
    fake.online = True
    resolve_checkpoint(MODEL, weights=False)
    fake.online = False
    with pytest.raises(CheckpointError, match="is not in the hub's cache"):
        resolve_checkpoint(MODEL)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RepositoryNotFoundError("404", response=_response(404)),
            "neither a folder here nor on the hub: check the name",
        ),
        (GatedRepoError("403", response=_response(403)), "is gated: accept its terms"),
        (HFValidationError("bad name"), "neither a folder nor a hub name like"),
        (HfHubHTTPError("503", response=_response(503)), "the hub answered with status 503"),
    ],
)
def test_errors_of_the_hub_say_what_to_do(fake: FakeHub, error: Exception, message: str) -> None:
    fake.error = error
    with pytest.raises(CheckpointError, match=message):
        resolve_checkpoint(MODEL)


@pytest.mark.parametrize("missing", ["config.json", SINGLE_FILE])
def test_a_repository_that_is_no_checkpoint(fake: FakeHub, missing: str) -> None:
    fake.files = {name: "x" for name in ("config.json", SINGLE_FILE) if name != missing}
    with pytest.raises(CheckpointError, match=f"has no {missing} on the hub"):
        resolve_checkpoint(MODEL)


def test_an_index_without_vision_tensors(fake: FakeHub) -> None:
    fake.files[INDEX_FILE] = json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00004.safetensors"}})
    with pytest.raises(CheckpointError, match="has no vision tensors"):
        resolve_checkpoint(MODEL)


def test_an_index_cannot_widen_what_is_fetched(fake: FakeHub) -> None:
    fake.files[INDEX_FILE] = json.dumps({"weight_map": {"visual.pos_embed.weight": "*.safetensors"}})
    with pytest.raises(CheckpointError, match="not the name of a safetensors file"):
        resolve_checkpoint(MODEL)
    assert fake.downloaded == {"config.json", INDEX_FILE}


def test_resolving_does_not_need_torch() -> None:
    """The ingress resolves the model's configuration on machines where torch is dead weight."""
    code = "import encoder.checkpoint.files, encoder.checkpoint.vision_config, sys; print('torch' in sys.modules)"
    assert output_of_python(code).strip() == "False"
