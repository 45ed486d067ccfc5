"""Completion as a shell asks for it: the script that README's line evaluates, in a real bash."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from pathlib import Path

import pytest

from deployments.cli import main as cli
from tests.programs import output_of

ROOT = Path(__file__).parents[4]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """`vitray`, as pip would install it."""
    file = tmp_path / "vitray"
    file.write_text(f"#!{sys.executable}\nfrom deployments.cli.main import main\nmain()\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def completed(program: Path, line: str) -> list[str]:
    """What bash offers for `line` with the cursor at its end."""
    script = f"""
eval "$(_VITRAY_COMPLETE=bash_source vitray)"
COMP_WORDS=({line}{' ""' if line.endswith(" ") else ""})
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
COMP_LINE={line!r}
$(complete -p vitray | sed 's/.*-F \\([^ ]*\\) .*/\\1/') vitray
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    path = f"{program.parent}:{os.environ['PATH']}"
    return output_of(["bash", "-c", script], PATH=path, PYTHONPATH=str(ROOT)).split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed on this machine")
def test_bash_completes(program: Path) -> None:
    """Commands, a group's commands, options, and the values of a choice."""
    assert completed(program, "vitray ") == sorted(cli.main.commands)
    assert completed(program, "vitray che") == ["check", "check-config"]
    assert completed(program, "vitray bench ") == ["encoder", "packing", "serve"]
    assert {"--trace", "--model", "--slo", "--max-gpus"} <= set(completed(program, "vitray plan --"))
    assert completed(program, "vitray plan --arch qwen2") == ["qwen2_5_vl"]
