"""Checks that a vLLM source tree defines what deployments/vllm/compat.py and deployments/vllm import of it.

    python scripts/check_vllm_imports.py PATH     # PATH contains the folder `vllm`: an unpacked wheel, a checkout

It reads syntax trees with the standard library only, so that a version can be checked where it cannot be installed. Its
knowledge of vLLM consists of the names below, the table in deployments/vllm/compat.py, and the import
statements of deployments/vllm.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

DEPLOYMENTS = Path(__file__).resolve().parent.parent / "deployments"
COMPAT = DEPLOYMENTS / "vllm" / "compat.py"

# Number of positional arguments with which these are called.
CALLED_WITH = {"build_app": 3, "init_app_state": 4, "make_arg_parser": 1}
# Members of these classes that are used: methods, and fields that are set.
MEMBERS = {
    "UsageContext": ("OPENAI_API_SERVER",),
    "AsyncLLM": ("from_engine_args", "generate", "get_supported_tasks", "check_health", "renderer", "shutdown"),
    "AsyncEngineArgs": (
        *(
            "model",
            "skip_mm_profiling",
            "mm_processor_cache_gb",
            "served_model_name",
            "load_format",
        ),
        "ec_transfer_config",
        "scheduler_cls",
    ),
    "ECTransferConfig": (
        *("ec_connector", "ec_role", "ec_connector_module_path", "ec_connector_extra_config"),
        "get_from_extra_config",
    ),
    "Scheduler": ("_try_schedule_encoder_inputs",),
    "ECConnectorBase": (
        *("ensure_cache_available", "has_cache_item", "update_state_after_alloc", "build_connector_meta"),
        *("request_finished", "start_load_caches", "save_caches", "shutdown"),
    ),
}
# Members that deployments/vllm uses or replaces, by class; "a | b": one of them, which depends on the version.
REPLACED = {
    "vllm.renderers.BaseRenderer": (
        *("mm_processor", "_process_mm_uuids", "_mm_processor_cache | mm_processor_cache"),
        "_mm_processor_only_cache | _readonly_mm_processor",
    ),
    "vllm.multimodal.processing.BaseMultiModalProcessor": (
        *("_apply_hf_processor", "_cached_apply_hf_processor", "_get_prompt_updates"),
    ),
    "vllm.multimodal.cache.BaseMultiModalProcessorCache": (
        *("is_cached_item", "get_and_update_item", "touch_sender_cache_item", "clear_cache", "make_stats"),
    ),
    "vllm.model_executor.models.interfaces.SupportsMultiModal": ("_mark_tower_model",),
    "vllm.v1.core.sched.output.SchedulerOutput": ("free_encoder_mm_hashes",),
}
ENVIRONMENT = ("VLLM_MEDIA_CONNECTOR", "VLLM_CPU_KVCACHE_SPACE", "VLLM_USE_V2_MODEL_RUNNER")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


def locations() -> dict[str, tuple[str, ...]]:
    """Returns the table LOCATIONS of deployments/vllm/compat.py, read from its source."""
    for node in ast.parse(COMPAT.read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "LOCATIONS" and node.value is not None:
            table: dict[str, tuple[str, ...]] = ast.literal_eval(node.value)
            return table
    raise LookupError(f"{COMPAT.name} does not define LOCATIONS")


def imported_names() -> Iterator[tuple[str, str]]:
    """Yields module and name of everything that deployments/vllm imports from vLLM."""
    for file in sorted((DEPLOYMENTS / "vllm").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                yield from ((node.module or "", alias.name) for alias in node.names)


class Tree:
    """The modules under a folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def module(self, name: str) -> ast.Module | None:
        base = self._root.joinpath(*name.split("."))
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None

    def find(self, module_name: str, name: str) -> tuple[str, Definition] | None:
        """Returns the module that defines `name` for `module_name`, and the definition; follows imports in the tree."""
        module = self.module(module_name)
        for node in _top_level(module) if module is not None else ():
            if name in _defined(node):
                assert isinstance(node, Definition)
                return module_name, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if name == (alias.asname or alias.name) and (
                        found := self.find(_origin(node, module_name, self), alias.name)
                    ):
                        return found
        return None

    def is_package(self, name: str) -> bool:
        return self._root.joinpath(*name.split("."), "__init__.py").is_file()

    def members(self, module_name: str, node: ast.ClassDef) -> Iterator[str]:
        """Yields methods, fields and instance attributes of a class and of its bases in the tree."""
        for statement in node.body:
            yield from _defined(statement)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                yield inner.attr
        for base in node.bases:
            found = self.find(module_name, ast.unparse(base).split("[")[0])
            if found is not None and isinstance(found[1], ast.ClassDef):
                yield from self.members(found[0], found[1])


def problems(root: Path) -> list[str]:
    """Returns a sentence for each name that is missing under `root`."""
    tree, found = Tree(root), []
    for name, modules in locations().items():
        hits = [hit for hit in (tree.find(module, name) for module in modules) if hit is not None]
        if not hits:
            found.append(f"{name} is in none of {', '.join(modules)}")
            continue
        module_name, node = hits[0]
        if name in CALLED_WITH and not _takes(node, CALLED_WITH[name]):
            found.append(f"{module_name}.{name} does not take {CALLED_WITH[name]} positional arguments")
        if name in MEMBERS:
            members = set(tree.members(module_name, node)) if isinstance(node, ast.ClassDef) else set()
            found += [f"{module_name}.{name} has no {member}" for member in MEMBERS[name] if member not in members]
    envs = tree.module("vllm.envs")
    known = {node.value for node in ast.walk(envs) if isinstance(node, ast.Constant)} if envs is not None else set()
    return found + [f"vllm.envs does not know {variable}" for variable in ENVIRONMENT if variable not in known]


def package_problems(root: Path) -> list[str]:
    """Returns a sentence for each name that deployments/vllm needs and that is missing under `root`."""
    tree = Tree(root)
    found = [f"{module} has no {name}" for module, name in imported_names() if tree.find(module, name) is None]
    for qualified, wanted in REPLACED.items():
        module_name, _, name = qualified.rpartition(".")
        hit = tree.find(module_name, name)
        members = set(tree.members(hit[0], hit[1])) if hit is not None and isinstance(hit[1], ast.ClassDef) else set()
        found += [f"{qualified} has no {each}" for each in wanted if members.isdisjoint(each.split(" | "))]
    return found


def _top_level(module: ast.Module) -> Iterator[ast.stmt]:
    """Yields the statements that run at import, including those in `if` and `try`."""
    waiting: list[ast.stmt] = list(module.body)
    while waiting:
        node = waiting.pop(0)
        yield node
        if isinstance(node, ast.If | ast.Try):
            waiting += [*node.body, *node.orelse]


def _defined(node: ast.stmt) -> list[str]:
    """Returns the names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [node.target.id] if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else []


def _origin(node: ast.ImportFrom, module_name: str, tree: Tree) -> str:
    """Returns the module that an import statement in `module_name` refers to."""
    if not node.level:
        return node.module or ""
    package = module_name.split(".") if tree.is_package(module_name) else module_name.split(".")[:-1]
    return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])


def _takes(node: Definition, count: int) -> bool:
    """Whether this is a function that accepts exactly `count` positional arguments."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    positional = len(node.args.posonlyargs) + len(node.args.args)
    required = positional - len(node.args.defaults)
    keywords_wanted = any(default is None for default in node.args.kw_defaults)
    return required <= count and (count <= positional or node.args.vararg is not None) and not keywords_wanted


def main(arguments: list[str] | None = None) -> int:
    """Prints the missing names. Returns 1 if there are any, 2 if there is no vLLM."""
    parser = argparse.ArgumentParser(description="Check a vLLM source tree against deployments/vllm/compat.py.")
    parser.add_argument("path", type=Path, help="the folder that holds `vllm`")
    root = parser.parse_args(arguments).path
    if not (root / "vllm" / "__init__.py").is_file():
        parser.error(f"{root} has no folder vllm with an __init__.py")
    missing = problems(root) + package_problems(root)
    for line in missing or [f"all {len(locations())} names are there"]:
        print(line)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
