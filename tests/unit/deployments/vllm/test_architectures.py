"""`vitray models`: what is found in vLLM's source, here a small tree of the same form."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from deployments.cli import main as cli
from deployments.vllm.architectures import (
    TESTED,
    UNSUPPORTED,
    ModelSupport,
    Support,
    model_support,
    vllm_version,
)
from deployments.vllm.compat import VllmNotUsableError
from scripts import models_page
from tests.models.prove import Proof
from tests.models.recipes import RECIPES

REGISTRY = """
_MULTIMODAL_MODELS = {
    "Qwen3VLForConditionalGeneration": ("qwen3_vl", "Qwen3VLForConditionalGeneration"),
    "PlainModel": ("plain", "PlainModel"),
    "ChildModel": ("child", "ChildModel"),
    "SpeechModel": ("speech", "SpeechModel"),
    "MixedModel": ("mixed", "MixedModel"),
    "FilmModel": ("mixed", "FilmModel"),
    "LiveModel": ("live", "LiveModel"),
    "SometimesModel": ("live", "SometimesModel"),
    "NewModel": ("vllm.models.new", "NewModel"),
    "GoneModel": ("gone", "GoneModel"),
}
"""
FILES = {
    "processing.py": "class EncDecMultiModalProcessor: pass\nclass BaseMultiModalProcessor: pass\n",
    "plain.py": """
from .interfaces import SupportsMultiModal
from vllm.model_executor.models.processing import BaseMultiModalProcessor

class PlainProcessor(BaseMultiModalProcessor[int]):
    def _cached_apply_hf_processor(self): ...

@MULTIMODAL_REGISTRY.register_processor(PlainProcessor, info=None)
class PlainModel(SupportsMultiModal, SupportsEncoderCudaGraph):
    supports_encoder_cudagraph: bool = True
    def __init__(self):
        with self._mark_tower_model(): ...
    def embed_multimodal(self): return self.embed()
    def embed(self): ...
    def forward(self): return self.language_model()
""",
    "child.py": "if True:\n    from .plain import PlainModel as Parent\nclass ChildModel(Parent): ...\n",
    "speech.py": """
from .processing import EncDecMultiModalProcessor
@registry.register_processor(EncDecMultiModalProcessor)
class SpeechModel: ...
""",
    "live.py": """
class Live:
    def _cached_apply_hf_processor(self): return self._apply_hf_processor()
class Sometimes(Live):
    def _cached_apply_hf_processor(self):
        return self._apply_hf_processor() if self.random else super()._cached_apply_hf_processor()
@registry.register_processor(Live)
class LiveModel: ...
@registry.register_processor(Sometimes)
class SometimesModel: ...
""",
    "mixed.py": """
class MixedModel:
    def embed_multimodal(self): return self._embed_image()
    def _embed_image(self): return self.get_language_model().embed()
class FilmModel:
    def embed_multimodal(self): return self._embed_video()
    def _embed_video(self): return self.language_model.embed()
""",
    "interfaces.py": "class SupportsMultiModal:\n    def _mark_tower_model(self): return self._mark_tower_model\n",
}


@pytest.fixture
def support(tmp_path: Path) -> dict[str, ModelSupport]:
    models = tmp_path / "vllm" / "model_executor" / "models"
    models.mkdir(parents=True)
    (models / "registry.py").write_text(REGISTRY)
    for name, text in FILES.items():
        (models / name).write_text(text)
    new = tmp_path / "vllm" / "models" / "new"
    new.mkdir(parents=True)
    (new / "__init__.py").write_text("from .cuda.model import NewModel\n")
    (new / "cuda").mkdir()
    (new / "cuda" / "model.py").write_text("class NewModel: ...\n")
    return {model.architecture: model for model in model_support(tmp_path)}


def test_our_towers_are_found_by_their_model_type(support: dict[str, ModelSupport]) -> None:
    assert support["Qwen3VLForConditionalGeneration"].support is Support.OWN


def test_marks_and_graphs_are_inherited(support: dict[str, ModelSupport]) -> None:
    for name in ("PlainModel", "ChildModel"):
        assert support[name] == ModelSupport(name, Support.UNTESTED, graphs=True, varies_with_others=True)


def test_a_processor_that_asks_the_cache_at_times_is_supported(support: dict[str, ModelSupport]) -> None:
    found = ModelSupport("SometimesModel", Support.UNTESTED, keeps_tower=True, varies_with_others=True)
    assert support["SometimesModel"] == found


def test_a_package_that_chooses_by_platform_is_followed(support: dict[str, ModelSupport]) -> None:
    assert support["NewModel"] == ModelSupport("NewModel", Support.UNTESTED, keeps_tower=True)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("SpeechModel", "encoder-decoder"),
        ("MixedModel", "weights of the language model"),
        ("LiveModel", "without the processor cache"),
        ("GoneModel", "not found"),
    ],
)
def test_unsupported_models_have_a_reason(support: dict[str, ModelSupport], name: str, reason: str) -> None:
    assert support[name].support is Support.UNSUPPORTED
    assert reason in support[name].notes


def test_videos_that_need_the_language_model_are_noted(support: dict[str, ModelSupport]) -> None:
    assert "no videos" in support["FilmModel"].notes


def test_another_registry_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(VllmNotUsableError, match="_MULTIMODAL_MODELS"):
        model_support(tmp_path)


def test_tested_architectures_are_those_of_the_recorded_results() -> None:
    passed = {result["architecture"]: result["passed"] for result in models_page.results().values()}
    own = {"Qwen3VLForConditionalGeneration", "Qwen3_5ForConditionalGeneration"}
    assert {name for name, did_pass in passed.items() if did_pass} - own == TESTED
    assert {name for name, did_pass in passed.items() if not did_pass} <= UNSUPPORTED.keys()
    assert not UNSUPPORTED.keys() & {*TESTED, *own}


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_page_is_current() -> None:
    if vllm_version() != models_page.tested_version():
        pytest.skip(f"docs/models.md is for vLLM {models_page.tested_version()}")
    assert UNSUPPORTED.keys() <= {one.architecture for one in model_support()}
    assert models_page.PAGE.read_text() == models_page.page(), "run python scripts/models_page.py"


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_command_lists_every_architecture() -> None:
    result = CliRunner().invoke(cli.main, ["models"])
    assert result.exit_code == 0, result.output
    lines = {line.split()[0]: line for line in result.output.splitlines()}
    assert "own tower" in lines["Qwen2_5_VLForConditionalGeneration"]
    assert "encoder-decoder" in lines["WhisperForConditionalGeneration"]


def test_results_are_complete() -> None:
    """Each result has all measurements, by which it passed, or did not."""
    results = models_page.results()
    assert results.keys() <= RECIPES.keys()
    for name, result in results.items():
        proof = Proof(**{key: value for key, value in result.items() if key != "passed"})
        assert proof.passed == result["passed"], json.dumps(result)
        assert (proof.architecture, proof.dtype) == (RECIPES[name].architecture, RECIPES[name].dtype)
