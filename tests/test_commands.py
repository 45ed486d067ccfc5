"""Every command of the pages and of examples/ is run by a test, or the page says beside it where it was run.

`BY_TESTS` names the test, `HERE` is run below, and what has neither needs a mark: `<!-- run: where -->` in the page, or
words that a reader sees, "Not run yet: why". Nothing heavy is started.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from PIL import Image

from deployments.cli import bench
from deployments.cli import main as cli
from tests.programs import output_of
from training import card

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "models").glob("*/README.md")),
]
PROGRAMS = ("make", "pip", "serve", "vitray", "vllm", "python", "python3", "ray", "kubectl", "docker", "sh", "curl",
            "git", "eval", "export")  # fmt: skip
MARK = re.compile(r"<!-- run: \S.*? -->|\bNot run yet:\s\S", re.DOTALL)
# A page on its own record: the command is in it, word for word.
RECORDS = sorted((ROOT / "training" / "results").glob("*.json"))

BY_TESTS = {
    "make test": ".ci/run",
    "make check": ".ci/run",
    "vitray serve --config my_config.yaml": "tests/unit/deployments/cli/test_main.py::test_serve_becomes_serve_run",
    "vitray ask 'What is in the picture?' picture.png":
        "tests/test_readme.py::test_the_command_asks_what_the_ingress_takes",
    "vitray ask 'Which picture has more circles?' one.png two.png --timing":
        "tests/unit/deployments/cli/test_ask.py::test_timing_tells_what_the_server_and_the_client_measured",
    "curl http://127.0.0.1:8000/v1/chat/completions":
        "tests/test_readme.py::test_curl_snippet_and_script_ask_what_the_ingress_takes",
    "vitray bench serve http://127.0.0.1:8000": "tests/unit/benchmarks/test_bench_serve.py::test_a_generated_trace",
    "vitray bench serve http://127.0.0.1:8000 --trace chat.jsonl --speed 2 --plot chat.png":
        "tests/unit/benchmarks/test_bench_serve.py::test_a_plot",
    "vitray bench serve http://127.0.0.1:8000 --against http://127.0.0.1:8100 --trace chat.jsonl":
        "tests/unit/benchmarks/test_bench_serve.py::test_two_servers_one_after_the_other",
    "vitray bench serve URL": "tests/serve/test_bench_clients.py::test_ours",
    "vitray bench serve URL --trace trace.jsonl": "tests/unit/benchmarks/test_bench_serve.py::test_requests_are_the_traces",
    "vitray bench serve URL --against URL": "tests/unit/benchmarks/test_bench_serve.py::test_two_servers_one_after_the_other",
    "vllm bench serve --backend openai-chat": "tests/serve/test_bench_clients.py::test_vllms_own",
    'eval "$(_VITRAY_COMPLETE=bash_source vitray)"': "tests/unit/deployments/cli/test_completion.py::test_bash_completes",
    "python scripts/readme.py": "tests/test_readme.py::test_tables_are_those_that_the_code_makes",
    "python scripts/reference.py": "tests/unit/scripts/test_reference.py::test_regenerating_changes_nothing",
    "python scripts/models_page.py": "tests/unit/deployments/vllm/test_architectures.py::test_the_page_is_current",
    "python scripts/count_path.py": "tests/unit/scripts/test_count_path.py::test_this_repository_keeps_its_path_short",
    "python scripts/audit.py --osv-url URL":
        "tests/unit/scripts/test_audit.py::test_every_locked_package_is_looked_up_and_a_flaw_fails",
    "python -m training.checkpoints --arch qwen2_5_vl --out DIR":
        "tests/unit/training/test_checkpoints.py::test_the_command_line",
    "python benchmarks/bench_encoder.py --ladder": "tests/unit/benchmarks/test_bench_encoder.py",
    "python benchmarks/bench_encoder.py --accuracy MODEL": "tests/unit/benchmarks/test_bench_encoder.py"
    "::test_errors_on_a_checkpoints_own_weights",
    "vitray bench packing trace.jsonl":
        "tests/unit/benchmarks/test_bench_packing.py::test_the_configured_packer_and_budgets_count",
    "python benchmarks/simulation/simulate.py trace.jsonl": "tests/unit/benchmarks/test_bench_simulate.py::test_the_report",
    "vitray check --config my_config.yaml": "tests/unit/deployments/cli/test_check.py::test_the_command_speaks_json",
    "vitray check --url http://127.0.0.1:8000":
        "tests/unit/deployments/cli/test_check.py::test_a_fallback_of_a_running_replica_is_reported_first",
    "vitray check --config my_config.yaml --cluster": "tests/unit/deployments/cli/test_check.py::test_the_command_speaks_json",
    "sh examples/ask.sh picture.png 'What is in the picture?' [http://127.0.0.1:8000]":
        "tests/test_readme.py::test_curl_snippet_and_script_ask_what_the_ingress_takes",
    "python examples/ask_openai.py 'What is in the picture?' picture.jpg [another.png …]":
        "tests/test_readme.py::test_example_program_asks_what_the_ingress_takes",
    "python examples/ask_langchain.py 'What is in the picture?' picture.jpg [another.png …]":
        "tests/test_readme.py::test_example_program_asks_what_the_ingress_takes",
    "python examples/demo.py [--config serve_config.yaml] [--model FOLDER_OR_HUB_NAME] [--keep]":
        "tests/unit/scripts/test_demo.py",
}  # fmt: skip
"""Command -> the file, or the test in it, that runs it. Addresses and files may be others there."""


def of_our_command(*arguments: str) -> Callable[[Path], None]:
    """`vitray` in a folder with what the pages' examples need."""

    def run(folder: Path) -> None:
        result = CliRunner().invoke(cli.main, arguments)
        assert result.exit_code == 0, result.output
        assert result.output

    return run


def git_archive(folder: Path) -> None:
    """As deploy.md says what the zip must hold: one folder at its top."""
    out = folder / "vitray.zip"
    words = ["git", "archive", "--format=zip", "--prefix=vitray/", f"--output={out}", "HEAD", "serve_config.yaml"]
    output_of(words)
    assert shutil.which("unzip") is None or b"vitray/serve_config.yaml" in out.read_bytes()


HERE: dict[str, Callable[[Path], None]] = {
    "vitray check-config my_config.yaml": of_our_command("check-config", "my_config.yaml"),
    "vitray new-key NAME": of_our_command("new-key", "NAME"),
    "git archive --format=zip --prefix=vitray/ --output=/tmp/vitray.zip HEAD": git_archive,
}  # fmt: skip


@dataclass(frozen=True)
class Command:
    """A command of a page; `beside` is what a reader sees with it: its paragraph or block and the paragraph after."""

    page: str
    text: str
    beside: str


def words_of(line: str) -> str | None:
    """The command without comments and with one kind of quotes; None for what is no command of PROGRAMS."""
    try:
        words = shlex.split(line.removeprefix("$ "), comments=True)
    except ValueError:
        return None
    if not words or words[0] not in PROGRAMS:
        return None
    if words[0] == "eval":
        return line.strip()
    optional = [word[0] == "[" or (word[-1:] == "]" and "[" not in word) for word in words]  # in a line of usage
    return " ".join(word if plain else shlex.quote(word) for word, plain in zip(words, optional, strict=True))


def commands_of_page(page: Path) -> Iterator[Command]:
    """Those in fenced blocks and indented lines, and those with arguments that stand in a text."""
    text = page.read_text()
    text = re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", text, flags=re.DOTALL)
    blocks = re.findall(r"^```.*?^```$|(?:^(?!```)[^\n]+\n?)+", text, re.DOTALL | re.MULTILINE)
    for number, block in enumerate(blocks):
        beside = "\n\n".join(blocks[number : number + 2])
        fenced = re.search(r"^```(sh|console)\n(.*?)(?:^```|\Z)", block, re.DOTALL | re.MULTILINE)
        if fenced is not None:
            kind, inside = fenced.groups()
            lines = inside.replace("\\\n", " ").splitlines()
            if kind == "console":
                lines = [line for line in lines if line.startswith("$ ")]
            elif "<<EOF" in inside:
                lines = [" ".join(inside.split()[:2])]
            found = [words for line in lines if (words := words_of(line))]
        elif block.startswith("```"):
            continue
        else:
            lines = re.findall(r"^    (\S.*)$", block, re.MULTILINE)
            lines += [span for span in re.findall(r"`([^`\n]+)`", block) if " " in span]
            found = [words for line in lines if (words := words_of(line)) and not bare(words)]
        yield from (Command(shown_name(page), words, beside) for words in found)


def shown_name(page: Path) -> str:
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name


def bare(words: str) -> bool:
    """The name of a command, a subcommand or a target alone: its purpose is stated where it is shown."""
    name, *rest = (word for word in words.split()[1:] if not word.startswith("-"))
    group = cli.main.commands.get(name)
    if words.startswith("vitray ") and isinstance(group, click.Group) and rest:
        return len(rest) == 1 and rest[0] in group.commands
    return words.startswith(("vitray ", "serve ", "ray ", "make ", "vllm ", "git ")) and not rest and bool(name)


def commands_of_examples() -> Iterator[Command]:
    for file in sorted((ROOT / "examples").iterdir()):
        if file.suffix in (".py", ".sh"):
            for line in file.read_text().splitlines()[:12]:
                words = words_of(line.lstrip("# "))
                if words and words.startswith(("python ", "sh ", "pip ")):
                    yield Command(file.name, words, file.read_text())


EVERY = [*(found for page in PAGES for found in commands_of_page(page)), *commands_of_examples()]


def recorded(command: str) -> bool:
    """Whether a result says that it was made by this command."""
    for file in RECORDS:
        found = json.loads(file.read_text())
        if file.name.startswith("train_") and command == card.train_command(found["arguments"]):
            return True
        said = found.get("command") or ""
        if command == (said if isinstance(said, str) else "python " + " ".join(said)):
            return True
    return False


def shown_to_run(command: Command) -> bool:
    return (
        command.text in BY_TESTS
        or command.text in HERE
        or recorded(command.text)
        or MARK.search(command.beside) is not None
    )


def test_every_command_is_run_by_a_test_or_says_where_it_was_run() -> None:
    assert len(EVERY) > 50
    assert [f"{one.page}: {one.text}" for one in EVERY if not shown_to_run(one)] == []


def test_a_command_without_either_would_be_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Text `vitray check`, `vitray ask --made-up 1`.\n\n```sh\nmake flight   # never\n\nserve deploy a.yaml\n```\n\n"
        "More.\n\n```sh\nray start --head\n```\n\nNot run yet: no cluster.\n\n    python -m training.fly\n\n"
        "<!-- run: by hand -->\n"
    )
    found = list(commands_of_page(page))
    assert [one.text for one in found] == [
        "vitray ask --made-up 1", "make flight", "serve deploy a.yaml", "ray start --head", "python -m training.fly"
    ]  # fmt: skip
    assert [shown_to_run(one) for one in found] == [False, False, False, True, True]


def test_what_runs_them_is_there() -> None:
    said = {one.text for one in EVERY}
    assert set(BY_TESTS) | set(HERE) <= said, "these are in no page any more"
    for command, where in BY_TESTS.items():
        file, _, name = where.partition("::")
        source = (ROOT / file).read_text()
        if name:
            defined = {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
            assert name in defined, f"{command}: {where}"
        elif file == ".ci/run":
            assert command.split()[1] in source.split(), command


@pytest.mark.parametrize("command", HERE)
def test_it_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "serve_config.yaml", "my_config.yaml")
    Path("models").symlink_to(ROOT / "models")
    Path("pictures").mkdir()
    Image.new("RGB", (96, 64), "red").save("pictures/one.png")
    HERE[command](tmp_path)


def examples_of_help(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Command lines that the help texts show, with the command that shows them."""
    for name, command in group.commands.items():
        lines = re.sub(r" *\\\n *", " ", (command.help or "").replace("\b", "")).splitlines()
        for line in lines:
            if line.strip().startswith("vitray "):
                yield (*path, name), shlex.split(re.split(r"  +|→| > |\|", line.strip())[0])
        if isinstance(command, click.Group):
            yield from examples_of_help(command, (*path, name))


def test_what_help_shows_is_taken() -> None:
    """Every example in a help text is a command line that the command takes, without it being run."""
    found = list(examples_of_help(cli.main))
    assert {path[0] for path, _ in found} == set(cli.main.commands)
    for _, words in found:
        command: click.Command = cli.main
        rest = words[1:]
        while isinstance(command, click.Group) and rest:
            command, rest = command.commands[rest[0]], rest[1:]
        if command in (bench.serve, bench.encoder):
            continue  # the programs', held to them in test_readme.py
        rest = [
            str(ROOT / "serve_config.yaml") if word.endswith((".yaml", ".json", ".jsonl")) else word for word in rest
        ]
        rest = [str(ROOT / "docs") if word == "pictures/" else word for word in rest]
        rest = [str(ROOT / "docs" / "ladder.png") if word.endswith((".png", ".jpg")) else word for word in rest]
        command.make_context(words[-1], rest, resilient_parsing=False)


@pytest.mark.parametrize("module", ["training.evaluate", "training.evaluate_served", "training.train"])
def test_documented_options_of_programs_are_theirs(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {word for one in EVERY if module in one.text.split() for word in one.text.split() if word.startswith("--")}
    assert asked
    monkeypatch.setattr("sys.argv", [module, "--help"])
    with pytest.raises(SystemExit):
        importlib.import_module(module).main()
    assert asked <= set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
