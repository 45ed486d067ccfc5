"""The `vitray` command in this process, and configuration files for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner, Result

from deployments.cli import main as cli

ROOT = Path(__file__).parents[4]


def vitray(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, arguments)


def write_config(path: Path, **changes: object) -> Path:
    """serve_config.yaml with `changes` at dotted places below its application; `top__` for places outside of it."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    for place, value in changes.items():
        names = place.split("__")
        target: Any = config["applications"][0]
        if names[0] == "top":
            target, names = config, names[1:]
        for name in names[:-1]:
            target = target[int(name)] if isinstance(target, list) else target[name]
        target[names[-1]] = value
    path.write_text(yaml.safe_dump(config))
    return path
