"""The `vitray` command. Each command imports its heavy dependencies itself, so that `--help` is instant.

Exit codes: 0 success, 1 refusal or failure with a message that states the reason, 2 a mistake on the command line. This
module contains no logic: a command calls functions of other modules.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import click

from deployments.cli.ask import ask
from deployments.cli.bench import bench
from deployments.cli.check import check
from deployments.cli.config_option import PROJECT_ROOT, config_option, default_config
from deployments.cli.plan import plan


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="vitray", message="%(prog)s %(version)s")
def main() -> None:
    """Vision encoders and language models that scale independently, on one Ray Serve cluster.

    \b
    vitray serve                          start the application here; Ctrl-C stops it
    vitray ask "What is it?" photo.jpg    ask a running server about pictures
    vitray check                          report what this machine lacks to run a configuration
    vitray check-config my_config.yaml    find mistakes in a configuration before starting it
    vitray bench serve URL                measure latency and goodput of a running server, on a trace of requests
    vitray plan --trace t.jsonl --model M --slo 2
                                          estimate whether separate encoders pay off, how many, and configure them
    vitray settings                       list every key below `args:` with its default
    vitray routes                         list every HTTP route and how it is served
    vitray models                         list every model architecture and which encoder serves it
    vitray new-key NAME                   make an API key and the line that admits it

    `vitray COMMAND --help` shows examples. For shell completion, add this line to the shell's start-up file (bash;
    likewise zsh and fish):

    \b
    eval "$(_VITRAY_COMPLETE=bash_source vitray)"

    Ray's own commands accept the same file on a running cluster: `serve deploy`, `serve status`, `serve shutdown`.
    """


for _command in (ask, bench, check, plan):
    main.add_command(_command)


@main.command()
@config_option
@click.option(
    "-d", "--app-dir", default=str(PROJECT_ROOT), show_default=True, help="Folder from which `deployments` is imported."
)
@click.option(
    "-a", "--address", help="Address host:port of a running Ray cluster. Default: RAY_ADDRESS, else a new local one."
)
@click.option("--check/--no-check", default=True, show_default=True, help="Check the configuration before starting.")
@click.option(
    "--haproxy/--no-haproxy",
    default=None,
    help="Use HAProxy or Serve's own proxy. Default: HAProxy if it is installed and a local Ray is started.",
)
def serve(config: Path, app_dir: str, address: str | None, check: bool, haproxy: bool | None) -> None:
    """Start the application and run it until Ctrl-C: `serve run` with a check before it and HAProxy in front.

    \b
    vitray serve
    vitray serve --no-haproxy
    vitray serve --config my_config.yaml --address 10.0.0.1:6379
    """
    from deployments.http_proxy import haproxy as proxy
    from deployments.http_proxy import limits as proxy_bounds

    address = address or os.environ.get("RAY_ADDRESS") or "local"  # without one, Ray joins a cluster of this machine
    starts_ray = address == "local"
    if haproxy and not starts_ray:
        raise click.UsageError(
            "--haproxy is for a Ray that starts here; a cluster's nodes start with it (docs/deploy.md)"
        )
    if haproxy and not proxy.is_installed():
        raise click.ClickException("HAProxy is not installed here: pip install 'ray[serve]' brings it, on Linux")
    if haproxy is None:
        haproxy = starts_ray and proxy.is_installed()
    if check:
        _check(config, starts_ray=starts_ray)
    program = Path(sys.executable).with_name("serve")
    if not program.exists():
        raise click.ClickException(f"Ray Serve's command is not at {program}: pip install 'ray[serve]'")
    variables = {proxy_bounds.VARIABLE: proxy_bounds.IMPORT_PATH, **os.environ}  # for a Ray started by this command
    if haproxy:
        variables |= proxy.environment(Path(tempfile.mkdtemp(prefix="vitray-", dir="/tmp")))
    os.execve(program, [str(program), "run", "--app-dir", app_dir, "--address", address, str(config)], variables)


@main.command("check-config")
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=default_config)
def config_check(config: Path) -> None:
    """Check a configuration without starting anything.

    \b
    vitray check-config my_config.yaml

    Checks `args:` against the existing settings, and names the other keys that Serve does not know and would silently
    ignore. Of vLLM's own arguments the names are checked, not the values, if vLLM is installed.
    """
    _check(config)
    click.echo(f"{config}: no mistakes found")


@main.command("new-key")
@click.argument("name")
def new_key(name: str) -> None:
    """Make an API key for NAME: the key for its owner, and its line for `ingress.auth.api_keys_file`.

    \b
    vitray new-key alice

    The key is shown once and not stored; the line contains its hash.
    """
    from deployments.ingress.auth import api_keys

    try:
        key, line = api_keys.new_key(name)
    except api_keys.KeysError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"the key, for its owner:\n{key}\nthe line for the file of keys:\n{line}")


@main.command()
def routes() -> None:
    """List every HTTP route; all others are closed.

    \b
    vitray routes | grep -i models
    """
    from deployments.ingress.http.routes import ROUTES

    width = max(len(route.path) for route in ROUTES)
    for route in ROUTES:
        note = f"  ({route.note})" if route.note else ""
        click.echo(f"{' '.join(route.methods):8} {route.path:{width}}  {route.service.value}{note}")


@main.command()
def models() -> None:
    """List every multimodal architecture of the installed vLLM, and which encoder serves it.

    \b
    vitray models | grep -i gemma

    "own tower": vitray's own, with its own CUDA graphs. "generic": vLLM's model class without its language model, with
    the answers of vLLM alone in tests; "untested" ones were not compared.
    """
    from deployments.vllm import architectures, compat

    try:
        found = architectures.model_support()
    except compat.VllmNotUsableError as error:
        raise click.ClickException(str(error)) from error
    width = max(len(model.architecture) for model in found)
    for model in found:
        notes = f"  ({model.notes})" if model.notes else ""
        click.echo(f"{model.architecture:{width}}  {model.support.value}{notes}")


@main.command()
def settings() -> None:
    """List every key below `args:` with its default, its possible values and its meaning.

    \b
    vitray settings | grep -A1 cache
    """
    from configs import reference

    for setting in reference.settings():
        click.echo(f"{click.style(setting.key, bold=True)}: {setting.default}")
        click.echo(f"    {setting.values}{'. ' + setting.meaning if setting.meaning else ''}")


def _check(path: Path, *, starts_ray: bool = False) -> None:
    """Prints the mistakes in the file and exits with 1 if there are any. `starts_ray`: also why a Ray that starts on
    this machine cannot run it."""
    from deployments.cli import config_check
    from deployments.vllm import compat

    try:
        config = config_check.read_config(path)
    except config_check.ConfigFileError as error:
        raise click.ClickException(str(error)) from error
    found = config_check.all_problems(config)
    if not found and starts_ray:
        from deployments.common.ray_private import num_cpus, num_gpus

        found = config_check.start_problems(config, num_cpus(), num_gpus())
    if not found and config_check.vllm_args(config) and not compat.is_installed():
        click.echo("vLLM is not installed here: llm.engine_args and llm.server_args were not checked", err=True)
    if found:
        listed = "\n".join(f"  {problem}" for problem in found)
        count = "1 mistake" if len(found) == 1 else f"{len(found)} mistakes"
        raise click.ClickException(f"{path}: {count}\n{listed}")


if __name__ == "__main__":
    main()
