"""The `vitray` command. Everything heavy is imported inside the command that needs it, so that `--help` is instant.

Exit codes: 0 done, 1 refused or failed with a message that says why, 2 the command line was wrong. This module must not
hold logic: what a command does is a function elsewhere.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import click

from deployments.commands.ask import ask
from deployments.commands.bench import bench
from deployments.commands.budgets import budgets
from deployments.commands.check import check
from deployments.commands.config_option import PROJECT_ROOT, config_option, default_config
from deployments.commands.encode import encode
from deployments.commands.plan import plan
from training.architectures import ARCHITECTURES


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="vitray", message="%(prog)s %(version)s")
def main() -> None:
    """Vision encoders and language models that scale apart, on one Ray Serve cluster.

    \b
    vitray serve                          start the application here; Ctrl-C stops it
    vitray ask "What is it?" photo.jpg    ask a running server about pictures
    vitray check                          what this machine lacks to run a configuration
    vitray check-config my_config.yaml    find mistakes in a configuration before starting it
    vitray encode pictures/ --out embeddings/ --model DIR
                                          embeddings of a folder of pictures, without a server
    vitray bench serve URL                latency and goodput of a running server, on a trace of requests
    vitray plan --trace t.jsonl --model M --slo 2
                                          whether encoders of their own pay, how many, and the configuration
    vitray budgets t.jsonl --model M      budgets of the encoder's CUDA graphs that fit a trace of images
    vitray settings                       every key below `args:` with its default
    vitray routes                         every HTTP route and what becomes of it
    vitray new-key NAME                   an API key, and the line that lets it in
    vitray checkpoint --arch qwen3_vl --out DIR
                                          a small checkpoint with random weights

    `vitray COMMAND --help` shows examples. Completion for bash (or zsh, fish), in a file that the shell reads:

    \b
    eval "$(_VITRAY_COMPLETE=bash_source vitray)"

    A running cluster takes the same file from Ray's own commands: `serve deploy`, `serve status`, `serve shutdown`.
    """


for _command in (ask, bench, budgets, check, encode, plan):
    main.add_command(_command)


@main.command()
@config_option
@click.option(
    "-d", "--app-dir", default=str(PROJECT_ROOT), show_default=True, help="Where `deployments` is imported from."
)
@click.option("-a", "--address", help="A running Ray cluster, host:port. Default: RAY_ADDRESS, else a new one here.")
@click.option("--check/--no-check", default=True, show_default=True, help="Check the configuration before starting.")
@click.option("--haproxy", is_flag=True, help="Serve's HAProxy in place of its own proxy, for a Ray that this starts.")
def serve(config: Path, app_dir: str, address: str | None, check: bool, haproxy: bool) -> None:
    """Start the application and stay; Ctrl-C stops it. The same as `serve run` with a check before it.

    \b
    vitray serve
    vitray serve --haproxy
    vitray serve --config my_config.yaml --address 10.0.0.1:6379
    """
    if haproxy and (address or os.environ.get("RAY_ADDRESS")):
        raise click.UsageError(
            "--haproxy is for a Ray that starts here; a cluster's nodes start with it (docs/deploy.md)"
        )
    if check:
        _check(config)
    program = Path(sys.executable).with_name("serve")
    if not program.exists():
        raise click.ClickException(f"Ray Serve's command is not at {program}: pip install 'ray[serve]'")
    where = ["--address", address] if address else []
    from deployments import haproxy as other_proxy
    from deployments import proxy_bounds

    if haproxy:
        folder = Path(tempfile.mkdtemp(prefix="vitray-haproxy-"))
        for name, value in other_proxy.environment(folder).items():
            os.environ.setdefault(name, value)
    os.environ.setdefault(proxy_bounds.VARIABLE, proxy_bounds.IMPORT_PATH)  # for a Ray that this starts
    os.execv(program, [str(program), "run", "--app-dir", app_dir, *where, str(config)])


@main.command("check-config")
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=default_config)
def check_config(config: Path) -> None:
    """Check a configuration without starting anything.

    \b
    vitray check-config my_config.yaml

    Holds `args:` to the settings that exist, and names the keys in the rest that Serve does not know: Serve itself
    ignores them silently. vLLM's own names are checked where vLLM is installed.
    """
    _check(config)
    click.echo(f"{config}: no mistakes found")


@main.command()
@click.option("--arch", required=True, type=click.Choice(ARCHITECTURES), help="The checkpoint's architecture.")
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder to write.")
@click.option("--seed", default=0, show_default=True, help="The weights follow from it, on every machine the same.")
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16"]))
def checkpoint(arch: str, out: Path, seed: int, dtype: str) -> None:
    """Make a small checkpoint with random weights: complete and valid, a few MB, and its answers are noise.

    \b
    vitray checkpoint --arch qwen2_5_vl --out checkpoints/tiny
    """
    from training.checkpoints import make_checkpoint

    try:
        click.echo(make_checkpoint(arch, out, seed=seed, dtype=dtype))
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise click.ClickException(reason) from error


@main.command("new-key")
@click.argument("name")
def new_key(name: str) -> None:
    """Make an API key for NAME: the key for its owner, and the line for `ingress.door.api_keys_file`.

    \b
    vitray new-key alice

    The key is shown once and kept nowhere; the line holds its hash.
    """
    from deployments import api_keys

    try:
        key, line = api_keys.new_key(name)
    except api_keys.KeysError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"key:  {key}\nline: {line}")


@main.command()
@click.option("--markdown", is_flag=True, help="As a Markdown table.")
def routes(markdown: bool) -> None:
    """List every HTTP route; what is not listed is closed.

    \b
    vitray routes --markdown
    """
    from deployments.routes import ROUTES, table

    if markdown:
        click.echo(table())
        return
    width = max(len(route.path) for route in ROUTES)
    for route in ROUTES:
        note = f"  ({route.note})" if route.note else ""
        click.echo(f"{' '.join(route.methods):8} {route.path:{width}}  {route.service.value}{note}")


@main.command()
@click.option("--markdown", is_flag=True, help="As a Markdown table.")
def settings(markdown: bool) -> None:
    """List every key below `args:` with its default, what it may be, and what it does.

    \b
    vitray settings | grep -A1 cache
    """
    from configs import reference

    if markdown:
        click.echo(reference.markdown())
        return
    for setting in reference.settings():
        click.echo(f"{click.style(setting.key, bold=True)}: {setting.default}")
        click.echo(f"    {setting.values}{'. ' + setting.meaning if setting.meaning else ''}")


def _check(path: Path) -> None:
    """Returns if nothing is wrong with the file; else says what and exits with 1."""
    from deployments import check_config, vllm_compat

    try:
        config = check_config.read_config(path)
    except check_config.ConfigFileError as error:
        raise click.ClickException(str(error)) from error
    found = check_config.problems(config)
    if not found and check_config.vllm_args(config):
        if vllm_compat.is_installed():
            click.echo("checking llm.engine_args and llm.server_args against vLLM …", err=True)
            found = check_config.vllm_problems(config)
        else:
            click.echo("vLLM is not installed here: llm.engine_args and llm.server_args were not checked", err=True)
    if found:
        listed = "\n".join(f"  {problem}" for problem in found)
        count = "1 mistake" if len(found) == 1 else f"{len(found)} mistakes"
        raise click.ClickException(f"{path}: {count}\n{listed}")


if __name__ == "__main__":
    main()
