"""TTFT of videos: `python benchmarks/serving/videos.py vitray=http://127.0.0.1:8000 vllm=http://127.0.0.1:8001`.

Each server gets new videos, each of them again, alike and behind another text (which no prefix cache knows), and texts
with as many prompt tokens; servers take turns in random order. vLLM needs `--trust-request-mm-kwargs`. The last line on
stdout is JSON. Needs av, httpx and numpy.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.record import provenance, write
from benchmarks.serving.agents import words
from benchmarks.serving.latency_client import TIMEOUT_S, Answer, ask, one_by_one, served_model
from benchmarks.serving.latency_figures import summary

FPS = 2
"""Frames a second of the clips, at most the rate at which models sample them, so that every frame is encoded."""


def clip(num_frames: int, side: int, seed: int) -> str:
    """Returns a data: URL of an MP4: a picture of coloured squares that moves."""
    coarse = np.random.default_rng(seed).integers(0, 256, (side // 32, side // 32, 3), dtype=np.uint8)
    picture = np.kron(coarse, np.ones((32, 32, 1), np.uint8))
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=FPS)
        assert isinstance(stream, av.VideoStream)
        stream.width = stream.height = side
        stream.pix_fmt = "yuv420p"
        for number in range(num_frames):
            frame = av.VideoFrame.from_ndarray(np.roll(picture, 3 * number, axis=1), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return "data:video/mp4;base64," + base64.b64encode(file.getvalue()).decode()


def body(model: str, content: list[dict[str, object]], num_frames: int) -> dict[str, Any]:
    """Returns a chat of one message, whose answer has one token."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "media_io_kwargs": {"video": {"num_frames": num_frames}},
        "max_tokens": 1,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def measure_load(
    urls: Mapping[str, str], *, frames: int, side: int, clients: int, requests: int, rounds: int = 2, seed: int = 0
) -> dict[str, Any]:
    """Returns requests per second and seconds to the first token, by server. In a round, each is sent the same
    `requests` new videos, by `clients` that send one after the other; servers take turns in random order. The first
    round is not counted. An answer has 32 tokens.
    """
    found: dict[str, list[Answer]] = {name: [] for name in urls}
    seconds = dict.fromkeys(urls, 0.0)
    chance = random.Random(seed)
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1)) as makers:
        for number in range(rounds + 1):
            seeds = range(100_000 * seed + requests * number, 100_000 * seed + requests * (number + 1))
            clips = list(makers.map(partial(clip, frames, side), seeds))
            for name in chance.sample(list(urls), len(urls)):
                shown = partial(_question, await served_model(urls[name]))
                began = time.perf_counter()
                answers = await _from_clients(urls[name], [json.dumps(shown(each)).encode() for each in clips], clients)
                if number:
                    seconds[name] += time.perf_counter() - began
                    found[name] += answers
    return {
        name: {
            "requests_per_s": sum(one.ok for one in answers) / seconds[name],
            "ttft_s": summary([one.chunks_s[0] for one in answers if one.ok]),
            "prompt_tokens": max(one.prompt_tokens for one in answers),
            "failed": sum(not one.ok for one in answers),
            "errors": sorted({one.error for one in answers if not one.ok})[:3],
        }
        for name, answers in found.items()
    }


def _question(model: str, url: str) -> dict[str, Any]:
    """Returns a chat about a video, whose frames the server samples as it does by itself."""
    video: dict[str, object] = {"type": "video_url", "video_url": {"url": url}}
    asked = body(model, [video, {"type": "text", "text": "What moves?"}], 0)
    del asked["media_io_kwargs"]
    return asked | {"max_tokens": 32}


async def _from_clients(url: str, contents: Sequence[bytes], clients: int) -> list[Answer]:
    waiting = iter(contents)

    async def client_of(session: httpx.AsyncClient, waiting: Iterator[bytes]) -> list[Answer]:
        return [await ask(session, url, content) for content in waiting]

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as session:
        answers = await asyncio.gather(*(client_of(session, waiting) for _ in range(clients)))
    return [answer for own in answers for answer in own]


async def asked(url: str, content: dict[str, Any]) -> Answer:
    """Returns an answer. Raises RuntimeError if the request failed."""
    (answer,) = await one_by_one(url, [content])
    if not answer.ok:
        raise RuntimeError(f"a request failed: status {answer.status} {answer.error}")
    return answer


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    urls = dict(pair.split("=", 1) for pair in options.servers)
    models = {name: await served_model(url) for name, url in urls.items()}
    rows: dict[str, dict[str, list[float]]] = {name: {"new": [], "again": [], "moved": [], "text": []} for name in urls}
    prompt_tokens: dict[str, int] = {}
    per_word: dict[str, float] = {}
    chance = random.Random(options.seed)
    for repeat in range(options.videos + 1):  # the first one warms up
        video: dict[str, object] = {"url": clip(options.frames, options.side, 1_000 * options.seed + repeat)}
        shown: list[dict[str, object]] = [
            {"type": "video_url", "video_url": video},
            {"type": "text", "text": f"What moves? {repeat}"},
        ]
        for name in chance.sample(list(urls), len(urls)):
            url, model = urls[name], models[name]
            moved: list[dict[str, object]] = [{"type": "text", "text": f"Number {repeat}:"}, *shown]
            found = [await asked(url, body(model, content, options.frames)) for content in (shown, shown, moved)]
            prompt_tokens[name] = found[0].prompt_tokens
            if name not in per_word:
                sample = await asked(url, body(model, [{"type": "text", "text": words(500, repeat)}], options.frames))
                per_word[name] = sample.prompt_tokens / 500
            text = words(round(prompt_tokens[name] / per_word[name]), 7_000 + 1_000 * options.seed + repeat)
            found.append(await asked(url, body(model, [{"type": "text", "text": text}], options.frames)))
            if repeat:
                for kind, answer in zip(rows[name], found, strict=True):
                    rows[name][kind].append(answer.chunks_s[0])
    medians = {
        name: {kind: statistics.median(times) for kind, times in row.items()} | {"prompt_tokens": prompt_tokens[name]}
        for name, row in rows.items()
    }
    return {"models": models, "ttft_s": medians, "ttfts_s": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="TTFT of new videos, repeated ones and texts.")
    parser.add_argument("servers", nargs="+", help="NAME=URL, without /v1")
    parser.add_argument("--videos", type=int, default=7, help="new videos that are measured, after one that is not")
    parser.add_argument("--frames", type=int, default=64)
    parser.add_argument("--side", type=int, default=448, help="width and height of a frame in pixels, a multiple of 32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="commit of the sources, if they are not a git checkout")
    options = parser.parse_args(arguments)
    settings = {name: getattr(options, name) for name in ("videos", "frames", "side", "seed")}
    made = provenance(options.commit, arguments)
    record: dict[str, Any] = {"benchmark": "videos", **settings, **asyncio.run(measure(options)), **made}
    for name, row in record["ttft_s"].items():
        print(f"{name}: " + ", ".join(f"{kind} {value:.3g}" for kind, value in row.items()))
    write(record, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
