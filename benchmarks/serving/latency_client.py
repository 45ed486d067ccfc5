"""Client for streamed chat requests with pictures in an open loop, which records the times of their chunks."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from PIL import Image

TIMEOUT_S = 600.0
_WORDS = ("picture", "shape", "colour", "left", "right", "above", "below", "large", "small", "count", "which", "where")


@dataclass
class Answer:
    """Stream of one request. Seconds on the client's clock since it was sent."""

    status: int = 0
    error: str = ""
    chunks_s: list[float] = field(default_factory=list)
    """Arrival of each piece of text."""
    total_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    server_timing: str = ""

    @property
    def ok(self) -> bool:
        """Whether the answer is complete and contains text."""
        return self.status == 200 and not self.error and bool(self.chunks_s)


def picture(width: int, height: int, seed: int) -> str:
    """Returns a data: URL of a PNG: a colour gradient with noise, different for each seed."""
    chance = np.random.default_rng(seed)
    slope = np.linspace(0, 200, width)[None, :, None] * chance.uniform(0.3, 1.0, (1, 1, 3))
    noise = chance.integers(0, 56, (height, width, 3))
    out = io.BytesIO()
    Image.fromarray((slope + noise).astype(np.uint8)).save(out, "png")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def body(
    model: str, sizes: Sequence[tuple[int, int]], *, words: int, output_tokens: int, picture_seed: int, text_seed: int
) -> dict[str, Any]:
    """Returns a chat of one message: text, then pictures of `sizes` (width, height); greedy, full output length."""
    chance = random.Random(text_seed)
    text = " ".join(chance.choice(_WORDS) for _ in range(words))
    parts: list[dict[str, object]] = [{"type": "text", "text": text}]
    for number, (width, height) in enumerate(sizes):
        address = picture(width, height, 1_000 * picture_seed + number)
        parts.append({"type": "image_url", "image_url": {"url": address}})
    return {
        "model": model,
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def served_model(url: str) -> str:
    """Returns the name of the first served model. Raises httpx.HTTPError."""
    async with httpx.AsyncClient(timeout=30.0) as client:
        listed = await client.get(f"{url}/v1/models")
        listed.raise_for_status()
        return str(listed.json()["data"][0]["id"])


async def ask(client: httpx.AsyncClient, url: str, content: bytes) -> Answer:
    """Sends one request and reads its stream to the end. Failures are recorded in the answer."""
    answer = Answer()
    began = time.perf_counter()
    headers = {"content-type": "application/json"}
    try:
        async with client.stream("POST", f"{url}/v1/chat/completions", content=content, headers=headers) as response:
            answer.status = response.status_code
            answer.server_timing = response.headers.get("server-timing", "")
            if response.status_code != 200:
                answer.error = (await response.aread()).decode(errors="replace")[:200]
                return answer
            finished = False
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    finished |= _take(line[5:].strip(), time.perf_counter() - began, answer)
            if not finished:
                answer.error = answer.error or "the stream ended before [DONE]"
    except httpx.HTTPError as error:
        answer.error = repr(error)
    finally:
        answer.total_s = time.perf_counter() - began
    return answer


def _take(event: str, now_s: float, answer: Answer) -> bool:
    """Records one event of the stream; returns True for the last."""
    if event == "[DONE]":
        return True
    chunk: Mapping[str, Any] = json.loads(event)
    if "error" in chunk:
        answer.error = str(chunk["error"])[:200]
    if any(choice.get("delta", {}).get("content") for choice in chunk.get("choices", ())):
        answer.chunks_s.append(now_s)
    if usage := chunk.get("usage"):
        answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    return False


async def open_loop(
    url: str, bodies: Sequence[Mapping[str, Any]], rate: float, seed: int
) -> tuple[list[Answer], float]:
    """Sends each request at its time, regardless of earlier answers; returns the answers in order and the total
    seconds.

    `rate`: requests per second, with exponential gaps; infinite for all at once.
    """
    chance = random.Random(seed)
    at = 0.0
    arrivals: list[float] = []
    for _ in bodies:
        arrivals.append(at)
        at += 0.0 if rate == float("inf") else chance.expovariate(rate)
    contents = [json.dumps(one).encode() for one in bodies]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
        began = time.perf_counter()

        async def later(when: float, content: bytes) -> Answer:
            await asyncio.sleep(max(0.0, when - (time.perf_counter() - began)))
            return await ask(client, url, content)

        answers = await asyncio.gather(*(later(when, one) for when, one in zip(arrivals, contents, strict=True)))
        return list(answers), time.perf_counter() - began


async def one_by_one(url: str, bodies: Sequence[Mapping[str, Any]]) -> list[Answer]:
    """Sends each request when the previous one is answered."""
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        return [await ask(client, url, json.dumps(one).encode()) for one in bodies]
