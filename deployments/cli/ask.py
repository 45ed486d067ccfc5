"""`vitray ask`: asks a question about pictures, sounds or videos and prints the answer as it arrives.

The answer is written to stdout, everything else to stderr.
"""

from __future__ import annotations

import sys
import time
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from deployments.cli.chat_client import Answer

DEFAULT_URL = "http://127.0.0.1:8000"


@click.command()
@click.argument("question")
@click.argument("pictures", nargs=-1)
@click.option("-u", "--url", default=DEFAULT_URL, show_default=True, help="Address of the server.")
@click.option("-m", "--model", help="Model to ask. Default: the first model that the server lists.")
@click.option("-k", "--key", envvar="VITRAY_API_KEY", show_envvar=True, help="API key, if the server requires one.")
@click.option(
    "--detail",
    type=click.Choice(["auto", "low", "high"]),
    help='Resolution: "low" shrinks large pictures to the server\'s limit. Default: the limits of the checkpoint.',
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    help="Maximum number of tokens in the answer. Default: the server's limit.",
)
@click.option("--timing", is_flag=True, help="Print the duration of each stage to stderr after the answer.")
def ask(
    question: str,
    pictures: tuple[str, ...],
    url: str,
    model: str | None,
    key: str | None,
    detail: str | None,
    max_tokens: int | None,
    timing: bool,
) -> None:
    """Ask a running server about pictures, sounds or videos: files or http(s) URLs, in the order of the question.

    \b
    vitray ask "What is in the picture?" picture.png
    vitray ask "Which picture has more circles?" one.png two.png --timing
    vitray ask "What is said?" speech.mp3

    Exits with 0 after a complete answer, with 1 if the server refused or the answer was cut off.
    """
    from deployments.cli.chat_client import AskError, ChatClient, chat_body, picture_url

    missing = [name for name in pictures if not name.startswith(("http://", "https://")) and not Path(name).is_file()]
    if missing:
        raise click.UsageError(f"file not found: {', '.join(missing)}")
    if any(unicodedata.category(mark) == "Cs" for mark in question):
        raise click.UsageError("the question has bytes that are not UTF-8")
    started = time.perf_counter()
    first_s: float | None = None
    try:
        with ChatClient(url, key) as client:
            body = chat_body(
                question,
                map(picture_url, pictures),
                model=model or client.first_model(),
                detail=detail,
                max_tokens=max_tokens,
            )
            asked = time.perf_counter()
            with client.ask(body) as answer:
                try:
                    for piece in answer.pieces:
                        first_s = first_s or time.perf_counter() - asked
                        click.echo(
                            _strip_control_characters(piece, sys.stdout.isatty()), nl=False, color=True
                        )  # unchanged
                finally:
                    if first_s is not None:
                        click.echo()
    except AskError as error:
        raise click.ClickException(_strip_control_characters(str(error), True)) from error
    if answer.finish_reason == "length":
        click.echo("(the answer reached its limit of tokens; raise --max-tokens)", err=True)
    if timing:
        click.echo(
            _strip_control_characters(timing_lines(answer, first_s, time.perf_counter() - started), True), err=True
        )


def timing_lines(answer: Answer, first_s: float | None, total_s: float) -> str:
    """Returns a line per metric of the server, then the durations measured by the client, in milliseconds."""
    here = [("first text (client)", first_s), ("total (client)", total_s)]
    rows = [*answer.server_timing, *((name, f"{s * 1e3:8.1f} ms") for name, s in here if s is not None)]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows)


def _strip_control_characters(text: str, on_terminal: bool) -> str:
    """Removes the control characters by which a text could control a terminal."""
    return (
        "".join(mark for mark in text if mark in "\n\t" or unicodedata.category(mark) != "Cc") if on_terminal else text
    )
