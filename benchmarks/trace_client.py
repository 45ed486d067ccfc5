"""Sends requests at their times, whatever has been answered by then, and reads the streams: an open loop.

Times count from when a request was due and not from when it was sent, so that a client that is late cannot hide a
server's delay, and how late it was is measured twice: at each sending, and by a clock that asks the event loop to wake
it. It must not know of traces, nor anything of the server but OpenAI's chat route.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.latency_client import Answer

AHEAD_S = 2.0
"""How long before it is due a body is made."""
TICK_S = 0.01
_LINE_BYTES = 2**22


@dataclass
class Sent:
    """One request and what came of it."""

    index: int
    due_s: float
    """From the start of the run."""
    lag_s: float = 0.0
    """From when it was due until it was handed to the HTTP client."""
    answer: Answer = field(default_factory=Answer)
    """Its times are seconds from when the request was due."""
    retry_after: bool = False
    """Whether an error told when to come back."""


@dataclass
class Run:
    """What was sent, in order of the times, and the seconds until the last answer ended."""

    sent: list[Sent]
    duration_s: float
    loop_lags_s: list[float]
    """By how much the client's own event loop was late, measured every TICK_S."""


def joined(runs: Sequence[Run]) -> Run:
    """Pieces of a trace as one run; their durations add up."""
    return Run(
        [one for run in runs for one in run.sent],
        sum(run.duration_s for run in runs),
        [lag for run in runs for lag in run.loop_lags_s],
    )


def headers(key: str | None) -> dict[str, str]:
    return {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})


def session(key: str | None, timeout_s: float) -> aiohttp.ClientSession:
    """As many connections as there are requests under way. `timeout_s`: for one request. Make it in an event loop."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        headers=headers(key),
        read_bufsize=_LINE_BYTES,
    )


async def served_model(http: aiohttp.ClientSession, url: str) -> str:
    """The name of the first model that is served. Raises aiohttp.ClientError, LookupError."""
    async with http.get(f"{url}/v1/models") as listed:
        listed.raise_for_status()
        return str((await listed.json())["data"][0]["id"])


async def open_loop(http: aiohttp.ClientSession, url: str, due_s: Sequence[float], make: Callable[[int], bytes]) -> Run:
    """Sends request i at `due_s[i]` seconds, ascending. `make(i)` is its body, called in a thread a little before."""
    loop = asyncio.get_running_loop()
    sent = [Sent(index, due) for index, due in enumerate(due_s)]
    with ThreadPoolExecutor(2, thread_name_prefix="bodies") as threads:
        # The first bodies are there before the clock starts.
        first = [loop.run_in_executor(threads, make, one.index) for one in sent if one.due_s - due_s[0] <= AHEAD_S]
        await asyncio.gather(*first)
        began = loop.time() - due_s[0]

        async def later(one: Sent) -> None:
            if one.index < len(first):
                content = first[one.index].result()
                first[one.index] = loop.create_future()  # the body is not held for longer than it is sent
            else:
                await asyncio.sleep(began + one.due_s - AHEAD_S - loop.time())
                content = await loop.run_in_executor(threads, make, one.index)
            await asyncio.sleep(began + one.due_s - loop.time())
            one.lag_s = max(0.0, loop.time() - began - one.due_s)
            await ask(http, url, content, one, lambda: loop.time() - began - one.due_s)

        lags: list[float] = []
        clock = asyncio.create_task(_watch(lags))
        await asyncio.gather(*map(later, sent))
        duration_s = loop.time() - began - due_s[0]
        clock.cancel()
    return Run(sent, duration_s, lags)


async def _watch(lags: list[float]) -> None:
    """Until it is cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        asked = loop.time()
        await asyncio.sleep(TICK_S)
        lags.append(max(0.0, loop.time() - asked - TICK_S))


async def ask(http: aiohttp.ClientSession, url: str, content: bytes, sent: Sent, now_s: Callable[[], float]) -> None:
    """Sends one request and reads its stream to the end. Failures are in the answer."""
    answer = sent.answer
    try:
        async with http.post(f"{url}/v1/chat/completions", data=content) as response:
            answer.status = response.status
            answer.server_timing = response.headers.get("server-timing", "")
            sent.retry_after = "retry-after" in response.headers
            if response.status != 200:
                answer.error = (await response.read()).decode(errors="replace")[:200] or f"status {response.status}"
                return
            finished = False
            async for line in response.content:
                if line.startswith(b"data:"):
                    finished |= take(line[5:].strip(), now_s(), answer)
            if not finished:
                answer.error = answer.error or "the stream ended before [DONE]"
    except TimeoutError:
        answer.error = "timeout"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        answer.error = repr(error)[:200]
    finally:
        answer.total_s = now_s()


def take(event: bytes, now_s: float, answer: Answer) -> bool:
    """Notes one event of the stream; True for the last. Raises ValueError for what is no JSON."""
    if event == b"[DONE]":
        return True
    chunk: dict[str, Any] = json.loads(event)
    if "error" in chunk:
        answer.error = str(chunk["error"])[:200]
    if any(_text(choice.get("delta") or {}) for choice in chunk.get("choices") or ()):
        answer.chunks_s.append(now_s)
    if usage := chunk.get("usage"):
        answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    return False


def _text(delta: dict[str, Any]) -> bool:
    """Whether there is any: thinking models send theirs under another name first."""
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning"))


async def one_by_one(http: aiohttp.ClientSession, url: str, contents: Sequence[bytes]) -> list[Answer]:
    """Each when the one before is answered."""
    answers = []
    for content in contents:
        began = time.perf_counter()
        sent = Sent(0, 0.0)
        await ask(http, url, content, sent, lambda began=began: time.perf_counter() - began)  # type: ignore[misc]
        answers.append(sent.answer)
    return answers
