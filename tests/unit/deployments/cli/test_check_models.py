"""`vitray check`: what it finds out about a model in a folder, in the hub's cache, or on the hub."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import huggingface_hub.errors
import pytest

from deployments.cli import facts as looked
from deployments.cli.readiness import ModelFact
from training.checkpoints import make_checkpoint


def test_a_model_in_a_folder_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = make_checkpoint("qwen2_5_vl", tmp_path / "small")
    whole = looked.model_fact("small")
    assert whole.there
    assert "qwen2_5_vl, float32" in whole.found
    assert looked.model_fact("models/scenes-8m").there  # beside the project
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    assert "lacks model.safetensors" in looked.model_fact(str(folder)).found
    index = {"weight_map": {"visual.a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks one.safetensors, two.safetensors" in looked.model_fact(str(folder)).found
    (folder / "preprocessor_config.json").unlink()
    assert "has no preprocessor_config.json" in looked.model_fact(str(folder)).found
    (folder / "config.json").write_text('{"model_type": "llava"}')
    assert not looked.model_fact(str(folder)).there
    for name in ("./nowhere", "/nowhere", "nowhere", f"/{'x' * 5000}", "a\0b"):
        assert looked.model_fact(name).found == "no such checkpoint folder"


def test_a_model_without_a_tower_of_ours_is_looked_up_in_vllm(tmp_path: Path) -> None:
    def fact(*architectures: str) -> ModelFact:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "other", "architectures": architectures}))
        return looked.model_fact(str(tmp_path))

    generic = fact("LlavaForConditionalGeneration")
    assert (generic.there, generic.found) == (True, f"LlavaForConditionalGeneration, generic, in {tmp_path}")
    whisper, text = fact("WhisperForConditionalGeneration"), fact("Qwen3ForCausalLM")
    assert not whisper.there
    assert "encoder-decoder" in whisper.found
    assert not text.there
    assert "Qwen3ForCausalLM: no multimodal architecture of vLLM" in text.found


class Hub:
    """Stands in for the hub's client."""

    error: Exception | None = None

    def model_info(self, model: str, timeout: float) -> object:
        assert timeout > 0
        if self.error:
            raise self.error
        return object()


def hub_error(name: str, status: int) -> Exception:
    response: Any = SimpleNamespace(status_code=status, headers={}, request=None)
    error: Exception = getattr(huggingface_hub.errors, name)("https://secret.example/path", response=response)
    return error


class HubTransportError(Exception):
    """As those of httpx, which are no OSError."""


@pytest.mark.parametrize(
    ("error", "there", "found"),
    [
        (None, True, "replicas download it"),
        (hub_error("GatedRepoError", 403), False, "gated"),
        (hub_error("RepositoryNotFoundError", 404), False, "nor on the hub"),
        (hub_error("HfHubHTTPError", 500), False, "status 500"),
        (ConnectionError("https://secret.example/path"), False, "cannot be asked (ConnectionError)"),
        (HubTransportError("https://secret.example/path"), False, "cannot be asked (HubTransportError)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_hub_model_is_asked_for_and_not_downloaded(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None, there: bool, found: str
) -> None:
    monkeypatch.setattr(Hub, "error", error)
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    fact = looked.model_fact("owner/name")
    assert (fact.there, found in fact.found, bool(fact.fix)) == (there, True, not there)
    assert "secret" not in fact.found + fact.fix


def test_a_cached_hub_model_needs_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint("qwen3_vl", tmp_path / "cached")
    monkeypatch.setattr(Hub, "error", ConnectionError())
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: str(folder / "config.json"))
    assert looked.model_fact("owner/name").there
    (folder / "model.safetensors").unlink()
    fact = looked.model_fact("owner/name")
    assert not fact.there
    assert "in the hub's cache, not complete" in fact.found
