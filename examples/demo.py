"""`make demo`: starts the application, asks it about two generated pictures, prints the durations of the stages, stops
it.

    python examples/demo.py [--config serve_config.yaml] [--model FOLDER_OR_HUB_NAME] [--keep]

Exits with 0 only if both answers are as expected, so that it serves as a smoke test. `ask_streamed` and `ask_whole`
contain the calls of the official `openai` client.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import openai
from local_app import ROOT, LocalApp, StartError
from PIL import Image, ImageDraw

from configs.resolve import load_preset
from deployments.cli.config_check import ConfigFileError, args_problems, our_applications, read_config

SMALL = load_preset("laptop")  # the preset of `model: auto` without a GPU; the demo uses it with GPUs too
STAGES = ("fetch", "preprocess", "encode", "transfer", "first-token")
NAMES = {
    "LLM": "language model (vLLM)",
    "Encoder": "vision encoder",
    "Ingress": "ingress",
    "Ray": "Ray",
    "Serve": "Serve",
}
QUIET_S = 30.0  # without a terminal, the interval between messages while waiting


class DemoError(Exception):
    """An answer was not as expected."""


class Interrupted(BaseException):
    """A signal asked the demo to end; like KeyboardInterrupt, no other code should catch it as an error."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(frozen=True)
class Answer:
    text: str
    timing: str
    """The Server-Timing response header."""
    total_ms: float
    """From sending the request to the last token, measured by the client."""


def pictures() -> list[Image.Image]:
    """Returns two pictures: a red circle and a blue square; three green triangles."""
    first = Image.new("RGB", (448, 336), "white")
    canvas = ImageDraw.Draw(first)
    canvas.ellipse((60, 90, 200, 230), fill="red")
    canvas.rectangle((280, 190, 360, 270), fill="blue")
    second = Image.new("RGB", (320, 320), "lightgrey")
    canvas = ImageDraw.Draw(second)
    for x, y in ((70, 80), (220, 110), (130, 230)):
        canvas.polygon(((x, y - 45), (x + 45, y + 36), (x - 45, y + 36)), fill="green")
    return [first, second]


def message(images: list[Image.Image], question: str) -> list[dict[str, Any]]:
    """Returns one user message with pictures as data: URLs, which any OpenAI-compatible server accepts."""
    parts: list[dict[str, Any]] = []
    for image in images:
        file = io.BytesIO()
        image.save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


def ask_streamed(client: openai.OpenAI, model: str, images: list[Image.Image], question: str) -> Answer:
    """Prints the answer as it arrives and returns it."""
    started = time.perf_counter()
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=message(images, question), max_tokens=32, temperature=0, stream=True
    )
    text = ""
    for chunk in raw.parse():
        piece = chunk.choices[0].delta.content if chunk.choices else None
        if piece:
            text += piece
            print(printable(piece), end="", flush=True)
    return Answer(text, raw.headers.get("server-timing", ""), (time.perf_counter() - started) * 1e3)


def ask_whole(client: openai.OpenAI, model: str, images: list[Image.Image], question: str) -> Answer:
    started = time.perf_counter()
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=message(images, question), max_tokens=32, temperature=0
    )
    text = raw.parse().choices[0].message.content or ""
    print(printable(text), end="", flush=True)
    return Answer(text, raw.headers.get("server-timing", ""), (time.perf_counter() - started) * 1e3)


def printable(text: str) -> str:
    """Replaces characters that could control a terminal: a model with random weights generates arbitrary bytes."""
    return "".join(character if character.isprintable() or character == "\n" else "·" for character in text)


def durations_ms(timing: str) -> dict[str, float]:
    """Parses `fetch;dur=1.2, encode;dur=3.4` into a dict."""
    return {name: float(ms) for name, ms in re.findall(r"([\w-]+);dur=([\d.]+)", timing)}


def header() -> str:
    """Returns the header of the table of durations in milliseconds."""
    return f"{'ms':10}{''.join(f'{stage:>13}' for stage in STAGES)}{'total':>13}{'from cache':>12}"


def row(label: str, answer: Answer) -> str:
    """Returns a line of the table of durations. Raises DemoError if the server did not send one of them."""
    durations = durations_ms(answer.timing)
    missing = [stage for stage in STAGES if stage not in durations]
    if missing:
        raise DemoError(f"{label}: Server-Timing lacks {', '.join(missing)}: {answer.timing!r}")
    cached = re.search(r'cache;desc="([^"]*)"', answer.timing)
    times = "".join(f"{durations[stage]:13.1f}" for stage in STAGES)
    return f"{label:10}{times}{answer.total_ms:13.1f}{cached[1] if cached else '?':>12}"


class Progress:
    """Prints a line per part that is up, and on a terminal, a line with the awaited parts that is overwritten."""

    def __init__(self) -> None:
        self._started = self._spoke = time.monotonic()
        self._terminal = sys.stdout.isatty()

    def done(self, name: str) -> None:
        self._print(f"{NAMES.get(name, name)} is up")

    def waiting(self, names: str) -> None:
        text = f"waiting for {', '.join(NAMES.get(name, name) for name in names.split(', '))}"
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{f'{self._seconds()} … {text}'[:width]}", end="", flush=True)
        elif time.monotonic() - self._spoke > QUIET_S:
            self._print(text)

    def clear(self) -> None:
        if self._terminal:
            print("\r\033[K", end="", flush=True)

    def _print(self, text: str) -> None:
        self.clear()
        print(f"{self._seconds()}   {text}", flush=True)
        self._spoke = time.monotonic()

    def _seconds(self) -> str:
        return f"{time.monotonic() - self._started:4.0f} s"


def demo_config(path: Path, model: str | None, num_gpus: int) -> dict[str, Any]:
    """Returns the user's configuration adapted to the demo: a small model unless one is named, on one GPU or none."""
    config: dict[str, Any] = read_config(path)
    ours = [application for _, application in our_applications(config)]
    if len(ours) != 1:
        raise ConfigFileError(f"{path}: it has {len(ours)} applications of vitray; it must have one")
    args: dict[str, Any] = ours[0].setdefault("args", {})
    mistakes = args_problems(args, "args")
    if mistakes:
        raise ConfigFileError(f"{path}:\n  " + "\n  ".join(mistakes))
    if model is not None or args.get("model", "auto") == "auto":
        args["model"] = model or SMALL.model
    encoder, llm = args.setdefault("encoder_replica", {}), args.setdefault("llm", {})
    if args["model"] == SMALL.model:
        llm["engine_args"] = {"max_model_len": SMALL.llm.engine_args["max_model_len"], **(llm.get("engine_args") or {})}
    if num_gpus == 1 and encoder.get("num_gpus", "auto") == "auto" and llm.get("num_gpus", "auto") == "auto":
        encoder["num_gpus"], llm["num_gpus"] = 0.2, 0.8
    return config


def count_gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    return listed.count("GPU ")


def has_random_weights(model: str) -> bool:
    """Whether the model has a recipe, which training.checkpoints stores with random weights, not with trained ones."""
    return (ROOT / model / "recipe.json").is_file()


def converse(base_url: str) -> None:
    client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=300)
    model = client.models.list().data[0].id
    if has_random_weights(model):
        print(f"\n{model} has random weights: it was never trained, so its answers are noise.\n")
    else:
        print(f"\n{model} answers:\n")
    first, second = pictures()
    print("Picture 1: a red circle and a blue square. Picture 2: three green triangles.\n")
    print("you    [picture 1] Describe the picture.\nmodel  ", end="", flush=True)
    streamed = ask_streamed(client, model, [first], "Describe the picture.")
    print("   (streamed)")
    print("you    [picture 1, picture 2] Which picture has more shapes?\nmodel  ", end="", flush=True)
    whole = ask_whole(client, model, [first, second], "Which picture has more shapes?")
    print("   (whole)\n")
    print(header())
    print(row("streamed", streamed))
    print(row("whole", whole))


def main() -> int:
    parser = argparse.ArgumentParser(description="Start the application, ask it about two pictures, stop it.")
    parser.add_argument("--config", type=Path, default=ROOT / "serve_config.yaml")
    parser.add_argument("--model", help=f"a checkpoint folder or a hub name; default: the file's, or {SMALL.model}")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="SECONDS", help="time limit of the start")
    parser.add_argument("--keep", action="store_true", help="keep it running until Ctrl-C")
    arguments = parser.parse_args()
    os.environ["NO_PROXY"] = ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1"]))

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)

    progress = Progress()
    app: LocalApp | None = None
    code = 1
    try:
        app = LocalApp(demo_config(arguments.config, arguments.model, count_gpus()))
        app.start()
        print(f"starting the application; its log: {app.log}", flush=True)
        app.wait(arguments.timeout, progress.done, progress.waiting)
        converse(app.base_url)
        code = 0
        if arguments.keep:
            print(f"\nlistening at {app.base_url}; Ctrl-C stops it", flush=True)
            signal.pause()
    except Interrupted as stopped:
        progress.clear()
        print(f"\nstopped by {signal.Signals(stopped.number).name}", flush=True)
        code = code if arguments.keep and code == 0 else 128 + stopped.number
    except (ConfigFileError, StartError, DemoError, openai.OpenAIError) as error:
        progress.clear()
        print(f"\nThe demo failed. {error}", file=sys.stderr)
        if app is not None and app.log.is_file():
            print(f"\nFrom its log, {app.log}:\n{app.last_words()}", file=sys.stderr, flush=True)
    finally:
        if app is not None and app.started:
            end(app, keep_log=code == 1)
    return code


def end(app: LocalApp, *, keep_log: bool) -> None:
    """Stops the application; another Ctrl-C during that kills it immediately."""

    def hurry(number: int, frame: FrameType | None) -> None:
        app.kill()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, hurry)
    print("\nstopping …", end="", flush=True)
    app.stop(keep_log=keep_log)
    print(" stopped", flush=True)


if __name__ == "__main__":
    sys.exit(main())
