"""The part of the static check that is about deployments/vllm; test_compat.py tests the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.check_vllm_imports import imported_names, package_problems

RENDERERS = "vllm/renderers/__init__.py"
SOURCES = {
    RENDERERS: (
        "class Base:\n    def _process_mm_uuids(self): ...\n"
        "class BaseRenderer(Base):\n"
        "    def __init__(self):\n"
        "        self.mm_processor: object = None\n"
        "        self._mm_processor_cache, self._mm_processor_only_cache = None, None\n"
    ),
    "vllm/multimodal/processing/__init__.py": (
        "class BaseMultiModalProcessor:\n    def _apply_hf_processor(self): ...\n"
        "    def _cached_apply_hf_processor(self): ...\n    def _get_prompt_updates(self): ...\n"
    ),
    "vllm/multimodal/cache.py": (
        "class BaseMultiModalProcessorCache:\n    def is_cached_item(self): ...\n"
        "    def get_and_update_item(self): ...\n"
        "    def touch_sender_cache_item(self): ...\n    def clear_cache(self): ...\n    def make_stats(self): ...\n"
    ),
    "vllm/v1/core/sched/output.py": "class SchedulerOutput:\n    free_encoder_mm_hashes: list[str]\n",
    "vllm/model_executor/models/interfaces.py": "class SupportsMultiModal:\n    def _mark_tower_model(self): ...\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A stand-in for vLLM's sources, with every name that is imported."""
    sources = dict(SOURCES)
    for module, name in imported_names():
        base = module.replace(".", "/")
        path = next((path for path in sources if path in (f"{base}.py", f"{base}/__init__.py")), f"{base}/__init__.py")
        if f"class {name}" not in sources.get(path, ""):
            sources[path] = sources.get(path, "") + f"class {name}: ...\n"
    for path, source in sources.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(source)
    return tmp_path


def replace(file: Path, old: str, new: str) -> None:
    source = file.read_text()
    assert old in source
    file.write_text(source.replace(old, new))


def test_names_are_read_from_the_import_statements() -> None:
    assert ("vllm.multimodal.media", "MediaWithBytes") in set(imported_names())


def test_a_tree_that_has_everything_passes(tree: Path) -> None:
    assert package_problems(tree) == []


@pytest.mark.parametrize(
    ("path", "old", "new", "told"),
    [
        ("vllm/multimodal/media/__init__.py", "MediaWithBytes", "X", "vllm.multimodal.media has no MediaWithBytes"),
        (RENDERERS, "_process_mm_uuids", "x", "BaseRenderer has no _process_mm_uuids"),
        (RENDERERS, "self.mm_processor:", "self.x:", "BaseRenderer has no mm_processor"),
        (RENDERERS, "self._mm_processor_only_cache", "self.x", "no _mm_processor_only_cache | _readonly_mm_processor"),
        (RENDERERS, "class BaseRenderer(Base):\n", "class BaseRenderer:\n", "has no _process_mm_uuids"),
        ("vllm/model_executor/models/interfaces.py", "_mark_", "_x_", "SupportsMultiModal has no _mark_tower_model"),
    ],
)
def test_what_is_missing_is_told(tree: Path, path: str, old: str, new: str, told: str) -> None:
    replace(tree / path, old, new)
    (problem,) = package_problems(tree)
    assert told in problem


def test_either_of_two_names_is_enough(tree: Path) -> None:
    """The second cache moved from a second processor to the renderer."""
    replace(tree / RENDERERS, "self._mm_processor_only_cache", "self._readonly_mm_processor")
    assert package_problems(tree) == []


def test_the_installed_vllm_passes() -> None:
    vllm = pytest.importorskip("vllm")
    assert package_problems(Path(vllm.__file__).parent.parent) == []
