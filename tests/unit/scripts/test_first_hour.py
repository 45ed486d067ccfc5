"""The timed first minutes of a new user: which lines are steps, and what is carried into the fresh environment."""

from __future__ import annotations

from pathlib import Path

from scripts import first_hour

ROOT = Path(__file__).parents[3]


def test_the_documented_demo_has_every_step() -> None:
    """Its lines a second apart."""
    shown = (ROOT / "docs" / "install.md").read_text().partition("$ make demo\n")[2].partition("```")[0].splitlines()
    found, answer = first_hour.steps(iter(shown), iter(map(float, range(1000))))
    assert [step.name for step in found] == ["installation", "Ray", "all replicas", "first answer"]
    assert answer == first_hour.RIGHT
    places = [shown.index(line) for line in shown if any(mark.search(line) for _, mark in first_hour.MARKS)]
    assert sum(step.seconds for step in found) == places[-1] + 1


def test_what_ends_early_has_fewer_steps() -> None:
    found, answer = first_hour.steps(iter(["vitray: ready after 3 s", "error"]), iter([0.0, 1.0, 2.0]))
    assert ([step.name for step in found], answer) == (["installation"], None)


def test_the_fresh_environment_knows_pip_and_the_network_alone(tmp_path: Path) -> None:
    given = {
        "PATH": "/bin",
        "PIP_FIND_LINKS": "/w",
        "https_proxy": "p",
        "PYTHONPATH": "x",
        "RAY_ADDRESS": "y",
        "HOME": "z",
    }
    assert first_hour.environment(given, tmp_path) == {
        "PATH": "/bin", "PIP_FIND_LINKS": "/w", "https_proxy": "p", "HOME": str(tmp_path)
    }  # fmt: skip
