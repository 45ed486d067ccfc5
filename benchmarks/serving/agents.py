"""An agent's conversation: `python benchmarks/serving/agents.py --url http://127.0.0.1:8000 --against URL`.

Each turn adds a screenshot and sends all earlier ones again. The same conversation goes to a running application and to
vLLM alone, which take turns in random order; so does a conversation of text with as many prompt tokens. Reports the
encodings of each turn and the bytes of embeddings that were transferred, by `Server-Timing`, and the time to first
token of the last turn over that of the second. The last line on stdout is JSON. Needs httpx, numpy and pillow.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import random
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.record import provenance, write
from benchmarks.serving.latency_client import Answer, one_by_one, served_model

OURS, ALONE = "vitray", "vllm"
WORDS = ("click", "scroll", "window", "button", "field", "menu", "below", "above", "type", "wait", "open", "close")
CALIBRATION_WORDS = 500
WORDS_AFTER = 40
"""Words after each screenshot. Images that share the last block of a prompt with its end are needed in the next turn;
on the CPU a block has 128 tokens, and `--words` must be larger."""
IMAGE = re.compile(r'image-\d+;desc="tokens=(\d+)([^"]*)"')


@dataclass(frozen=True)
class Turn:
    """Measurements of one turn."""

    ttft_s: float
    prompt_tokens: int
    received: int
    """Embeddings that were sent to the engine."""
    encoded: int
    """Those of them that were encoded for this turn."""
    tokens_received: int

    @classmethod
    def of(cls, answer: Answer) -> Turn:
        """Raises RuntimeError if the request failed."""
        if not answer.ok:
            raise RuntimeError(f"a turn failed: status {answer.status} {answer.error}")
        images = IMAGE.findall(answer.server_timing)
        return cls(
            answer.chunks_s[0],
            answer.prompt_tokens,
            len(images),
            sum("cached" not in rest for _, rest in images),
            sum(int(tokens) for tokens, _ in images),
        )


def words(number: int, seed: int) -> str:
    chance = random.Random(seed)
    return " ".join(chance.choice(WORDS) for _ in range(number))


def screenshot(width: int, height: int, seed: int) -> str:
    """Returns a data: URL of a PNG: windows of text, about 100 kB for 1280x800. Twenty pictures of noise would exceed
    the bound on a body."""
    chance = random.Random(seed)
    image = Image.new("RGB", (width, height), tuple(chance.randrange(256) for _ in range(3)))
    canvas = ImageDraw.Draw(image)
    for window in range(4):
        left, top = chance.randrange(width // 2), chance.randrange(height // 2)
        right, bottom = left + width // 2, top + height // 2
        canvas.rectangle((left, top, right, bottom), tuple(chance.randrange(200, 256) for _ in range(3)), "black")
        for line in range(top + 4, bottom - 12, 14):
            canvas.text((left + 6, line), words(12, seed * 10_000 + window * 1_000 + line), "black")
    file = io.BytesIO()
    image.save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def turn_bodies(model: str, contents: Sequence[Any], output_tokens: int) -> list[dict[str, Any]]:
    """Returns the request of each turn. `contents`: content of each user message."""
    messages: list[dict[str, Any]] = []
    bodies = []
    for number, content in enumerate(contents):
        messages.append({"role": "user", "content": content})
        bodies.append(
            {
                "model": model,
                "messages": list(messages),
                "max_tokens": output_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        messages.append({"role": "assistant", "content": f"Step {number + 1} is done."})
    return bodies


def screenshots(options: argparse.Namespace, seed: int) -> list[Any]:
    width, height = options.size
    return [
        [
            {"type": "image_url", "image_url": {"url": screenshot(width, height, 1_000 * seed + turn)}},
            {"type": "text", "text": words(options.words, 1_000 * seed + turn)},
        ]
        for turn in range(options.turns)
    ]


async def ask_turns(url: str, bodies: Sequence[dict[str, Any]]) -> list[Turn]:
    return [Turn.of(answer) for answer in await one_by_one(url, bodies)]


async def text_contents(url: str, model: str, prompt_tokens: Sequence[int], seed: int) -> list[str]:
    """Returns user messages of text such that each turn's prompt has about as many tokens as given."""
    bodies = [*turn_bodies(model, [WORDS[0]] * 2, 1), *turn_bodies(model, [words(CALIBRATION_WORDS, seed)], 1)]
    one, two, long = (turn.prompt_tokens for turn in await ask_turns(url, bodies))
    per_word = (long - one) / (CALIBRATION_WORDS - 1)
    added = [prompt_tokens[0] - one, *(after - before - (two - one) for before, after in pairwise(prompt_tokens))]
    return [words(1 + max(0, round(tokens / per_word)), 7_000 + seed + n) for n, tokens in enumerate(added)]


def summary(conversations: Sequence[Sequence[Turn]], row_bytes: int | None) -> dict[str, Any]:
    """Returns the figures of repeated conversations of one server."""
    ratios = [turns[-1].ttft_s / turns[1].ttft_s for turns in conversations]
    count = len(conversations)
    per_turn = list(zip(*conversations, strict=True))
    found: dict[str, Any] = {
        "ttft_ratio": statistics.median(ratios),
        "ttft_ratios": ratios,
        "ttft_s": [statistics.median(turn.ttft_s for turn in turns) for turns in per_turn],
        "prompt_tokens": [turns[0].prompt_tokens for turns in per_turn],
        "encoded_per_turn": [sum(turn.encoded for turn in turns) / count for turns in per_turn],
        "received_per_turn": [sum(turn.received for turn in turns) / count for turns in per_turn],
        "tokens_received": sum(turn.tokens_received for turns in conversations for turn in turns) / count,
    }
    if row_bytes is not None:
        found["bytes_transferred"] = found["tokens_received"] * row_bytes
    return found


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    urls = {OURS: options.url} | ({ALONE: options.against} if options.against else {})
    models = {name: await served_model(url) for name, url in urls.items()}
    measured: dict[tuple[str, str], list[list[Turn]]] = {}
    chance = random.Random(options.seed)
    for repeat in range(options.repeats + 1):  # the first one warms up
        seed = 100 * options.seed + repeat
        contents: dict[str, Sequence[Any]] = {"images": screenshots(options, seed)}
        for kind in ("images", "text"):
            for name in chance.sample(list(urls), len(urls)):
                bodies = turn_bodies(models[name], contents[kind], options.output_tokens)
                turns = await ask_turns(urls[name], bodies)
                if repeat:
                    measured.setdefault((name, kind), []).append(turns)
            if kind == "images":
                tokens = [turn.prompt_tokens for turn in turns]
                contents["text"] = await text_contents(urls[OURS], models[OURS], tokens, seed)
    rows: dict[str, Any] = {name: {} for name in urls}
    for (name, kind), conversations in measured.items():
        rows[name][kind] = summary(conversations, options.row_bytes if name == OURS else None)
    for row in rows.values():
        row["ratio_over_text"] = row["images"]["ttft_ratio"] / row["text"]["ttft_ratio"]
    return {"models": models, "servers": rows}


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    return int(width), int(height)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="An agent's conversation of screenshots.")
    parser.add_argument("--url", required=True, help="URL of the application, without /v1")
    parser.add_argument("--against", help="URL of vLLM alone")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--size", type=_size, default=(1280, 800), help="of a screenshot: WIDTHxHEIGHT")
    parser.add_argument("--words", type=int, default=WORDS_AFTER, help="words after each screenshot")
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3, help="conversations that are measured, after one that is not")
    parser.add_argument("--row-bytes", type=int, help="bytes of an embedding's row: width times bytes of its dtype")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu", help="name of the application's GPU, stored in the result")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="commit of the sources, if they are not a git checkout")
    options = parser.parse_args(arguments)
    if options.turns < 3:
        parser.error(f"--turns is {options.turns}; the last one is compared with the second: at least 3")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    found = asyncio.run(measure(options))
    for name, row in found["servers"].items():
        for kind in ("images", "text"):
            one = row[kind]
            print(
                f"{name}, {kind}: TTFT of turn {options.turns} over turn 2 {one['ttft_ratio']:.2f}, "
                f"{one['ttft_s'][1] * 1e3:.0f} to {one['ttft_s'][-1] * 1e3:.0f} ms, {one['prompt_tokens'][-1]} tokens"
            )
        print(f"{name}: this ratio over that of text {row['ratio_over_text']:.2f}")
    ours = found["servers"][OURS]["images"]
    print(f"encodings of each turn: {ours['encoded_per_turn']}, embeddings sent: {ours['received_per_turn']}")
    settings = {
        name: getattr(options, name) for name in ("turns", "size", "words", "output_tokens", "repeats", "row_bytes")
    }
    made = provenance(options.commit, arguments)
    write({"benchmark": "agents", "gpu": options.gpu, **settings, **found, **made}, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
