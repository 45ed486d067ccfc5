"""The option that names an application's configuration, and where that is found without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import click

PROJECT_ROOT = Path(__file__).resolve().parent.parent.parent

P = ParamSpec("P")
R = TypeVar("R")


def default_config() -> Path:
    """serve_config.yaml of the working directory, else the one beside this project."""
    here = Path("serve_config.yaml")
    return here if here.is_file() else PROJECT_ROOT / "serve_config.yaml"


def config_option(command: Callable[P, R]) -> Callable[P, R]:
    """Adds `--config`, whose value is a file that is there."""
    return click.option(
        "-c",
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        default=default_config,
        show_default="serve_config.yaml here, else the one of this project",
        help="The application's configuration.",
    )(command)
