"""`vitray check`: whether this machine can run a configuration, and what it lacks."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deployments.cli.config_option import config_option

if TYPE_CHECKING:
    from configs.schema import AppConfig
    from deployments.cli.readiness import Line

_COLOURS = {"ok": "green", "missing": "yellow", "problem": "red"}


@click.command()
@config_option
@click.option(
    "--cluster",
    is_flag=True,
    help="Treat this machine as one node of a cluster whose other nodes may have GPUs and vLLM.",
)
@click.option("-u", "--url", help="Also report encoder fallbacks of the application at this address.")
@click.option(
    "-k", "--key", envvar="VITRAY_API_KEY", show_envvar=True, help="API key, if the application requires one."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(config: Path, cluster: bool, url: str | None, key: str | None, as_json: bool) -> None:
    """Check whether this machine can run a configuration: GPUs, packages, kernels, model, memory; with a fix for each.

    \b
    vitray check
    vitray check --config my_config.yaml --cluster --json
    vitray check --url http://127.0.0.1:8000

    Starts nothing and downloads nothing. Exits with 1 if something that the configuration needs is missing.
    """
    found = ([] if url is None else _running(url, key)) + _lines(config, cluster)
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


def _running(url: str, key: str | None) -> list[Line]:
    from deployments.cli.chat_client import AskError, ChatClient
    from deployments.cli.readiness import Line, fallbacks

    try:
        with ChatClient(url, key) as client:
            return list(fallbacks(client.cluster()))
    except AskError as error:
        what, _, remedy = str(error).partition("\n")
        return [Line("fused kernels", "problem", what, remedy)]


def _lines(path: Path, cluster: bool) -> list[Line]:
    """Lines for the configuration file, then for this machine; a file with mistakes is replaced by the defaults."""
    from configs.schema import AppConfig
    from deployments.cli import facts
    from deployments.cli.readiness import Line, asked_for, lines

    configs, read, mistakes = _read(path)
    found = [Line("configuration", "problem", mistake, "correct the file") for mistake in mistakes]
    found = found or [Line("configuration", "ok", str(path))]
    for config in configs or [AppConfig()]:
        found += [line for line in lines(facts.gather(config), config, cluster=cluster) if line not in found]
    if configs:  # so Ray is installed
        from deployments.cli.config_check import reservations
        from deployments.common.ray_private import num_cpus, num_gpus

        found += [asked_for(*each, cluster=cluster) for each in reservations(read, num_cpus(), num_gpus())]
    return found


def _read(path: Path) -> tuple[list[AppConfig], dict[str, Any], list[str]]:
    """Returns the settings of the file's applications, the file, and the mistakes in it."""
    from configs.schema import AppConfig

    try:
        from deployments.cli import config_check
    except ImportError as error:
        return [], {}, [f"cannot be checked: {error}"]  # Ray is missing, which another line reports
    try:
        read = config_check.read_config(path)
    except config_check.ConfigFileError as error:
        return [], {}, [str(error)]
    if mistakes := config_check.all_problems(read):
        return [], {}, mistakes
    applications = [application.get("args") or {} for _, application in config_check.our_applications(read)]
    return [AppConfig.model_validate(args) for args in applications], read, []
