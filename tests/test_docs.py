"""The pages' links lead somewhere, names and figures in them are those of the sources, the worked example runs.

Nothing is started. What the pages' commands and settings are held to is in test_readme.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from encoder.packing.run_counts import Reason

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
LOG = ROOT / "benchmarks" / "log"
TOWER = DOCS / "add-a-tower.md"
ARCHITECTURE = DOCS / "architecture.md"
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(DOCS.glob("*.md")),
    *sorted(LOG.glob("*.md")),
    ROOT / "models" / "scenes-8m" / "README.md",
]
SOURCES = ("configs", "encoder", "deployments", "training", "tests", "benchmarks")
# Facts of others that the page on towers names: keys of checkpoints and of vLLM, arguments, torch's methods.
NOT_OURS = {
    "model_type",
    "out_hidden_size",
    "cu_seqlens",
    "image_embeds",
    "qwen3_vl",
    "qwen3_vl_moe",
    "prepare",
    "forward",
}


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them; a second one of a name gets `-1`."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", without_code(text), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        number = 1
        anchor = slug
        while anchor in found:
            anchor, number = f"{slug}-{number}", number + 1
        found.add(anchor)
    return found


def broken(page: Path, text: str) -> Iterator[str]:
    """Links inside of the repository that lead nowhere."""
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        if path and not there.exists():
            yield f"{page.name}: {target}"
        elif anchor and anchor not in anchors(text if there == page else there.read_text()):
            yield f"{page.name}: {target}: there is no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert list(broken(page, page.read_text())) == []


def test_a_broken_link_would_be_found() -> None:
    text = "# One `two`: three, four\n## A\n## A\n[x](#one-two-three-four) [x](#a-1) [x](README.md#why) [x](https://x.y/z#q)"
    assert list(broken(ROOT / "x.md", text)) == []
    text += " [x](#b) [x](no.md) [x](README.md#b)"
    assert len(list(broken(ROOT / "x.md", text))) == 3


def test_every_page_is_reached_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    for page in DOCS.glob("*.md"):
        assert f"](docs/{page.name}" in readme, page.name
    assert "](CONTRIBUTING.md)" in readme


def test_entries_of_the_log_have_its_form_and_are_listed() -> None:
    entries = {page.name: page.read_text() for page in LOG.glob("*.md") if page.name != "README.md"}
    for name, text in entries.items():
        assert re.fullmatch(r"\d{4}-\d\d-\d\d-[\w-]+\.md", name)
        for label in ("Question", "Expectation", "Result", "Decision"):
            assert f"\n**{label}" in text, f"{name}: {label}"
    listed = re.findall(r"^- \[[^]]+\]\(([^)]+)\): .+\.$", (LOG / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(entries)
    dates = [name[:10] for name in listed]
    assert dates == sorted(dates, reverse=True)


def test_named_metrics_are_there() -> None:
    there = set(re.findall(r"^\| `(ray_vitray_\w+)`", (DOCS / "metrics.md").read_text(), re.MULTILINE))
    for page in PAGES:
        if page.parent != LOG and page.name != "CHANGELOG.md":
            named = set(re.findall(r"`(ray_vitray_\w+)`", page.read_text()))
            assert named <= there, page.name


def test_every_reason_for_an_eager_run_is_explained() -> None:
    table = (DOCS / "tune.md").read_text().partition("| reason | meaning | change |\n|---|---|---|\n")[2]
    first = re.findall(r"^\| (.+?) \|", table.partition("\n\n")[0], re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(first))) == sorted(Reason)


def measured() -> set[str]:
    """Decimal numbers of the log, of the measurements and of the documented run of the tests."""
    pages = (*LOG.glob("*.md"), DOCS / "measurements.md", DOCS / "install.md")
    return {number for page in pages for number in re.findall(r"\d+\.\d+", page.read_text())}


@pytest.mark.parametrize("name", ["request-path.md", "caches-and-transfer.md", "tune.md", "faq.md"])
def test_figures_are_those_of_the_log_and_the_results(name: str) -> None:
    text = re.sub(r"`[^`]*`", "", without_code((DOCS / name).read_text()))
    figures = set(re.findall(r"\d+\.\d+", text))
    assert len(figures) >= 1
    assert figures - measured() == set()


def test_picture_names_files_that_are_there() -> None:
    picture = ElementTree.parse(DOCS / "processes.svg").getroot()
    assert picture.tag.endswith("svg")
    files = [file for text in picture.itertext() for file in re.findall(r"[\w/]+\.py", text)]
    assert len(files) > 5
    for file in files:
        assert (ROOT / file).is_file() or list((ROOT / "deployments").rglob(file)), file


def python_block(page: Path) -> str:
    (block,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return str(block)


def test_the_towers_example_prints_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(python_block(TOWER), TOWER.name, "exec"), {})
    assert f"```console\n{capsys.readouterr().out}```" in TOWER.read_text()


def defined(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[str]:
    """Classes, functions and assigned names of a module, methods and fields as `Class.name`."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from defined(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign):
            yield from (prefix + target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield prefix + node.target.id


def defined_below(path: Path) -> set[str]:
    """What a module, or all modules of a folder, define."""
    modules = path.rglob("*.py") if path.is_dir() else [path] if path.suffix == ".py" else []
    return {name for module in modules for name in defined(ast.parse(module.read_text()))}


def test_the_towers_page_names_what_is_there() -> None:
    there = set[str]().union(*(defined_below(ROOT / package) for package in SOURCES))
    spans = re.findall(r"`([^`\n]+)`", without_code(TOWER.read_text()))
    names = {span for span in spans if re.fullmatch(r"_?[A-Za-z]\w*(\.\w+)?", span) and re.search(r"[A-Z_]", span)}
    names = {name for name in names if not name.endswith(".md")} - NOT_OURS
    assert len(names) > 25
    assert names - there == set()
    assert {"VisionConfig.from_dict", "build_tower", "MODELS", "SECTIONS"} <= names


def test_files_named_in_pages_are_there() -> None:
    for page in PAGES:
        if page.parent == LOG or page.name == "CHANGELOG.md":
            continue
        for span in re.findall(r"`([^`\n]+)`", without_code(page.read_text())):
            for word in span.split():
                if re.fullmatch(
                    r"(configs|encoder|deployments|tests|benchmarks|scripts|training|examples)(/[\w.-]+)+", word
                ):
                    assert (ROOT / word).exists(), f"{page.name}: {word}"


def cells_naming_places() -> list[str]:
    """Second column of the table "Where to change"."""
    table = ARCHITECTURE.read_text().partition("## Where to change\n")[2]
    return [row.split(" | ")[1] for row in table.splitlines() if row.startswith("| ") and "`" in row]


def undefined(cell: str) -> list[str]:
    """Names in code spans that no file of the cell defines; a setting may be named without its class."""
    spans = [span for span in re.findall(r"`([^`]+)`", cell) if " " not in span]
    files = [span for span in spans if (ROOT / span).exists()]
    there = set[str]().union(*(defined_below(ROOT / file) for file in files))
    there |= {name.rpartition(".")[2] for name in there}
    return [span for span in spans if span not in files and span not in there]


@pytest.mark.parametrize("cell", cells_naming_places(), ids=lambda cell: cell[:40])
def test_where_to_change_names_files_and_what_they_define(cell: str) -> None:
    """Renaming passes left names of functions that no longer existed."""
    assert undefined(cell) == []


def test_an_undefined_name_in_the_table_would_be_found() -> None:
    cell = "`Ingress`, `Ingress.gone`, `Counter` in `deployments/ingress/deployment.py` and `deployments/gone.py`"
    assert undefined(cell) == ["Ingress.gone", "Counter", "deployments/gone.py"]
    assert len(cells_naming_places()) > 10


def test_architecture_names_what_the_code_defines() -> None:
    there = set[str]().union(*(defined_below(ROOT / package) for package in SOURCES))
    there |= {name.rpartition(".")[2] for name in there}
    spans = re.findall(r"`([^`\n]+)`", without_code(ARCHITECTURE.read_text()))
    names = {span for span in spans if re.fullmatch(r"_?[A-Za-z]\w*(\.\w+)?", span)}
    assert {"Ingress", "ChatRequest.parse", "fetch_images"} <= names
    assert {name for name in names if not (ROOT / name).exists()} - there == set()


def test_the_map_lists_every_package() -> None:
    """Of `encoder` and `deployments`; and it names no file or folder that is gone."""
    tree = re.findall(r"^```\n(.*?)^```$", ARCHITECTURE.read_text(), re.DOTALL | re.MULTILINE)[0]
    listed: set[Path] = set()
    parents: list[Path] = []
    for indent, names in re.findall(r"^( *)([\w/.]+(?:, [\w/.]+)*)(?:  |$)", tree, re.MULTILINE):
        parent = ROOT.joinpath(*parents[: len(indent) // 2])
        paths = [parent / name for name in names.split(", ")]
        assert all(path.exists() for path in paths), names
        listed.update(paths)
        if paths[0].is_dir():
            parents[len(indent) // 2 :] = [Path(paths[0].name)]
    packages = {file.parent for name in ("encoder", "deployments") for file in (ROOT / name).glob("*/__init__.py")}
    assert packages - listed == set()
