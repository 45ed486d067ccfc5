"""docs/troubleshooting.md quotes what the sources say, word for word, and leaves out no error of a start or an answer.

A text is a constant or an f-string of the sources, with `…` where a value is put in. Sources are read, nothing is run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"
PACKAGES = ("configs", "encoder", "deployments", "scripts")

# Whatever these say comes to a user: over HTTP, from a command, or in the log of a replica that does not start.
FOR_USERS = {
    "ApiError", "ReplicaLostError", "OverloadedError", "MediaError", "MediaTooLargeError", "MediaBusyError",
    "ImageError", "VideoError", "ConfigFileError", "KeysError", "UnprotectedServerError", "VllmNotUsableError",
    "VisionConfigError",
    "CheckpointError", "Fp8RefusedError", "FusionError", "BackendUnavailableError", "AskError",
    "SetupError", "EngineLostError", "FetchRefusedError", "UnknownReferenceError",
}  # fmt: skip
# Here ValueError and RuntimeError are a user's too: what is refused at the start.
REFUSE_SETTINGS = (
    "configs/encoder_config.py",
    "configs/resolve.py",
    "configs/schema.py",
    "deployments/llm/deployment.py",
    "deployments/telemetry/tracing.py",
    "deployments/vllm/compat.py",
    "encoder/encoder.py",
    "encoder/forwards.py",
    "encoder/fp8/tower.py",
    "encoder/checkpoint/image_rules.py",
    "encoder/runner.py",
)
LOGGED = {"warning", "error"}


def _text(node: ast.AST) -> str | None:
    """The text of a constant or an f-string, `…` for each value, as one line."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = re.sub(r"%[-.\d]*[sdfegx]|\{\}", "…", node.value)
    elif isinstance(node, ast.JoinedStr):
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    else:
        return None
    return re.sub(r"…(\s*…)+", "…", " ".join(text.split()))


def texts(tree: ast.AST) -> Iterator[str]:
    """Every whole text of a source; pieces of f-strings are none."""
    text = _text(tree)
    if text is not None:
        yield text
        return
    for child in ast.iter_child_nodes(tree):
        yield from texts(child)


def told_to_users(tree: ast.AST, path: str) -> Iterator[str]:
    """What is raised, or logged as a warning or an error, for a user; texts without a word of their own apart."""
    kinds = FOR_USERS | ({"ValueError", "RuntimeError"} if path in REFUSE_SETTINGS else set())
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        logged = name.startswith("logger.") and name.removeprefix("logger.") in LOGGED
        if logged or name.split(".")[-1] in kinds:
            found = [text for argument in node.args if (text := _text(argument)) is not None]
            yield from (text for text in found if re.search(r"[a-z]+ [a-z]", text))


def sources() -> Iterator[tuple[str, ast.AST]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def quoted(page: str) -> list[str]:
    """The code spans in the first column of the page's tables."""
    cells = re.findall(r"^\| (`.+?) \|", page, re.MULTILINE)
    return [text for cell in cells for _, text in re.findall(r"(`+) ?(.+?) ?\1(?!`)", cell)]


def test_every_quoted_text_is_in_the_sources() -> None:
    there = {text for _, tree in sources() for text in texts(tree)}
    found = quoted(PAGE.read_text())
    assert len(found) > 100
    assert [text for text in found if text not in there] == []
    assert sorted({text for text in found if found.count(text) > 1}) == []


def test_no_error_is_left_out() -> None:
    found = set(quoted(PAGE.read_text()))
    missing = {f"{path}: {text}" for path, tree in sources() for text in told_to_users(tree, path) if text not in found}
    assert sorted(missing) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('raise ApiError(400, f"{a} is over {b} bytes")', ["… is over … bytes"]),
        ('raise errors.ApiError(400, f"{a}{b!r} it is" " so")', ["… it is so"]),
        ('logger.warning("no kernels: %s", why)', ["no kernels: …"]),
        ('raise ValueError("a mistake of ours")', []),
        ('raise ApiError(400, f"{a}: {b}")', []),
    ],
)
def test_what_counts_as_told(source: str, expected: list[str]) -> None:
    assert list(told_to_users(ast.parse(source), "encoder/x.py")) == expected


def test_a_text_that_is_gone_would_be_found() -> None:
    page = "| `it is so` | why |\n| `` a `b` c ``<br>`two` | why |\n"
    assert quoted(page) == ["it is so", "a `b` c", "two"]
    assert list(texts(ast.parse("f'{x} not {y}'"))) == ["… not …"]
