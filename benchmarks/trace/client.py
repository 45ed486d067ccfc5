"""Open-loop client: sends requests at their times, regardless of earlier answers, and reads the streams.

Latencies count from when a request was due, not from when it was sent, so that a late client cannot hide a server's
delay. The client's lag is measured twice: at each sending, and by the lateness of a periodic timer of the event loop.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.serving.latency_client import Answer

AHEAD_S = 2.0
"""Seconds before its due time at which a body is made."""
TICK_S = 0.01
_LINE_BYTES = 2**22


@dataclass
class Sent:
    """One request and its answer."""

    index: int
    due_s: float
    """Seconds from the start of the run."""
    lag_s: float = 0.0
    """Seconds from the due time until the request was passed to the HTTP client."""
    answer: Answer = field(default_factory=Answer)
    """The answer; its times are seconds since the due time."""
    retry_after: bool = False
    """Whether an error had a Retry-After header."""


@dataclass
class Run:
    """Sent requests in order of their times, and the seconds until the last answer ended."""

    sent: list[Sent]
    duration_s: float
    loop_lags_s: list[float]
    """Lateness of the client's event loop, measured every TICK_S."""


def join_runs(runs: Sequence[Run]) -> Run:
    """Returns pieces of a trace as one run; their durations are added."""
    return Run(
        [one for run in runs for one in run.sent],
        sum(run.duration_s for run in runs),
        [lag for run in runs for lag in run.loop_lags_s],
    )


def headers(key: str | None) -> dict[str, str]:
    return {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})


def session(key: str | None, timeout_s: float) -> aiohttp.ClientSession:
    """Returns a session without a limit on connections. `timeout_s`: of one request. Call it in an event loop."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        headers=headers(key),
        read_bufsize=_LINE_BYTES,
    )


async def served_model(http: aiohttp.ClientSession, url: str) -> str:
    """Returns the name of the first served model. Raises aiohttp.ClientError, LookupError."""
    async with http.get(f"{url}/v1/models") as listed:
        listed.raise_for_status()
        return str((await listed.json())["data"][0]["id"])


async def open_loop(
    http: aiohttp.ClientSession, url: str, due_s: Sequence[float], make: Callable[[int], bytes],
    begin_s: float | None = None, ready: Callable[[], object] = lambda: None,
) -> Run:  # fmt: skip
    """Sends request i at `due_s[i]` seconds, ascending. A thread calls `make(i)` for its body shortly before.

    Args:
        begin_s: when the run begins, by default at the first request.
        ready: called before the clock starts; may wait for other clients.
    """
    begin_s = due_s[0] if begin_s is None else begin_s
    loop = asyncio.get_running_loop()
    sent = [Sent(index, due) for index, due in enumerate(due_s)]
    with ThreadPoolExecutor(2, thread_name_prefix="bodies") as threads:
        # The first bodies are made before the clock starts.
        first = [loop.run_in_executor(threads, make, one.index) for one in sent if one.due_s - begin_s <= AHEAD_S]
        await asyncio.gather(*first)
        ready()
        began = loop.time() - begin_s

        async def later(one: Sent) -> None:
            if one.index < len(first):
                content = first[one.index].result()
                first[one.index] = loop.create_future()  # releases the body after it is sent
            else:
                await asyncio.sleep(began + one.due_s - AHEAD_S - loop.time())
                content = await loop.run_in_executor(threads, make, one.index)
            await asyncio.sleep(began + one.due_s - loop.time())
            one.lag_s = max(0.0, loop.time() - began - one.due_s)
            await ask(http, url, content, one, lambda: loop.time() - began - one.due_s)

        lags: list[float] = []
        clock = asyncio.create_task(_watch(lags))
        with _no_garbage_collection():
            await asyncio.gather(*map(later, sent))
        duration_s = loop.time() - began - begin_s
        clock.cancel()
    return Run(sent, duration_s, lags)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A full collection stops the client for 0.1 to 0.2 s with some hundred streams open."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def _watch(lags: list[float]) -> None:
    """Records the event loop's lateness until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        asked = loop.time()
        await asyncio.sleep(TICK_S)
        lags.append(max(0.0, loop.time() - asked - TICK_S))


async def ask(http: aiohttp.ClientSession, url: str, content: bytes, sent: Sent, now_s: Callable[[], float]) -> None:
    """Sends one request and reads its stream to the end. Failures are recorded in the answer."""
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
    """Records one event of the stream; returns True for the last. Raises ValueError for invalid JSON."""
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
    """Whether the delta contains text, which thinking models first send under another name."""
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning"))


async def one_by_one(http: aiohttp.ClientSession, url: str, contents: Sequence[bytes]) -> list[Answer]:
    """Sends each request when the previous one is answered."""
    answers = []
    for content in contents:
        began = time.perf_counter()
        sent = Sent(0, 0.0)
        await ask(http, url, content, sent, lambda began=began: time.perf_counter() - began)  # type: ignore[misc]
        answers.append(sent.answer)
    return answers
