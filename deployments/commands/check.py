"""`vitray check`: will the configuration run on this machine, and what is missing. It must not judge by itself."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from deployments.commands.config_option import config_option

if TYPE_CHECKING:
    from configs.schema import AppConfig
    from deployments.commands.readiness import Line

_COLOURS = {"ok": "green", "missing": "yellow", "problem": "red"}


@click.command()
@config_option
@click.option("--cluster", is_flag=True, help="This is one node of several: others may bring GPUs and vLLM.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, for programs.")
def check(config: Path, cluster: bool, as_json: bool) -> None:
    """Tell whether this machine can run a configuration: GPUs, packages, kernels, model, memory; each with its fix.

    \b
    vitray check
    vitray check --config my_config.yaml --cluster --json

    Starts nothing and downloads nothing. Exits with 1 where something that the configuration needs is missing.
    """
    found = _lines(config, cluster)
    failed = sum(line.failed for line in found)
    if as_json:
        rows = [{**asdict(line), "failed": line.failed} for line in found]
        click.echo(json.dumps({"ok": not failed, "config": str(config), "lines": rows}, indent=1))
    else:
        width = max(len(line.name) for line in found)
        for line in found:
            status = click.style(f"{line.status:8}", fg=_COLOURS[line.status])
            optional = "" if line.needed or line.status == "ok" else " (not needed)"
            click.echo(f"{status}{line.name:{width}}  {line.found}{optional}")
            if line.fix:
                click.echo(f"{'':{8 + width}}  → {line.fix}")
        things = "1 thing is" if failed == 1 else f"{failed} things are"
        click.echo(f"{config}: {things} in the way" if failed else f"{config}: nothing is in the way")
    if failed:
        raise SystemExit(1)


def _lines(path: Path, cluster: bool) -> list[Line]:
    """The configuration's own line first; with mistakes in it, the machine is held against the defaults."""
    from configs.schema import AppConfig
    from deployments.commands import facts
    from deployments.commands.readiness import Line, lines

    configs, mistakes = _read(path)
    found = [Line("configuration", "problem", mistake, "correct the file") for mistake in mistakes]
    found = found or [Line("configuration", "ok", str(path))]
    for config in configs or [AppConfig()]:
        found += [line for line in lines(facts.gather(config), config, cluster=cluster) if line not in found]
    return found


def _read(path: Path) -> tuple[list[AppConfig], list[str]]:
    """The applications' settings, and what is wrong with the file."""
    from configs.schema import AppConfig

    try:
        from deployments import check_config, vllm_compat
    except ImportError as error:
        return [], [f"cannot be checked: {error}"]  # Ray is missing, and has a line of its own
    try:
        read = check_config.read_config(path)
    except check_config.ConfigFileError as error:
        return [], [str(error)]
    mistakes = check_config.problems(read)
    if not mistakes and vllm_compat.is_installed():
        mistakes = check_config.vllm_problems(read)
    if mistakes:
        return [], mistakes
    applications = [application.get("args") or {} for _, application in check_config.our_applications(read)]
    return [AppConfig.model_validate(args) for args in applications], []
