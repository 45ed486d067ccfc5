"""The option for an application's configuration file, and its default."""

from __future__ import annotations

from pathlib import Path

import click

PROJECT_ROOT = Path(__file__).resolve().parent.parent.parent


def default_config() -> Path:
    """Returns serve_config.yaml of the working directory, else that of this project."""
    here = Path("serve_config.yaml")
    return here if here.is_file() else PROJECT_ROOT / "serve_config.yaml"


config_option = click.option(
    "-c",
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=default_config,
    show_default="serve_config.yaml here, else the one of this project",
    help="Configuration file of the application.",
)
"""Adds `--config`, the path of an existing file."""
