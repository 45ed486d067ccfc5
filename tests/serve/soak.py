"""Mixed good and bad traffic for as long as one wants, and what it leaves behind in the servers' processes.

Good requests are asked again where they are told to (503 with Retry-After) and must be answered rightly in the end; bad
ones must be refused with the status that they deserve.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from tests.hostile import files
from tests.hostile.sockets import ATTACKS, HEAD_TOO_LARGE, Address
from tests.serve import pictures
from tests.serve.conversations import Body, about, chat, image, text, user
from tests.serve.pictures import data_url
from tests.serve.processes import family, title

CHAT = "/v1/chat/completions"
ANSWER_S = 240.0
"""What a good request may take, all its tries together, on a machine with more to do."""
KNOWN = 12
MOST_WRONG = 20
"""Of these the first are kept."""

HOSTILE_FILES = {
    "half a png": files.PNG[: len(files.PNG) // 2],
    "half a jpeg": files.JPEG[: len(files.JPEG) // 2],
    "text": b"this is no image",
    "a png that states too much": files.png_stating(30_000, 30_000),
    **files.header_bombs(300_000),
}
WRONG_BODIES: dict[str, tuple[str, bytes, int]] = {
    "no json": (CHAT, b"{", 400),
    "too deep": (CHAT, b"[" * 100_000, 400),
    "too many values": (CHAT, b'{"a": [' + b"1," * 1_100_000 + b"1]}", 413),
    "no messages": (CHAT, b"{}", 400),
    "an embedding": (
        CHAT,
        json.dumps({"messages": [user({"type": "image_embeds", "image_embeds": "A"})]}).encode(),
        400,
    ),
    "a video": (CHAT, json.dumps({"messages": [user({"type": "video_url", "video_url": {"url": "x"}})]}).encode(), 400),
    "a closed route": ("/invocations", b"{}", 404),
    "images where text is served": ("/v1/completions", json.dumps({"input": [user(image("data:,x"))]}).encode(), 501),
}


@dataclass
class Tally:
    """What was asked and what came of it."""

    answered: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    asked_again: int = 0
    """Times that a good request was told to come back later."""
    wrong: list[str] = field(default_factory=list)

    def note_wrong(self, what: str) -> None:
        if len(self.wrong) < MOST_WRONG:
            self.wrong.append(what)


class Traffic:
    """Requests from many clients at once to one application."""

    def __init__(self, base_url: str, *, known: Sequence[list[int]], web_url: str | None, seed: int) -> None:
        """`known`: the right answers' token ids to `known_body(0)`, `known_body(1)`, …. `web_url`: a server of hostile
        answers, where the application may fetch."""
        self.tally = Tally()
        self._base_url = base_url
        self._known = known
        self._web_url = web_url
        self._rng = random.Random(seed)
        self._fresh = itertools.count(100_000)

    async def run(self, seconds: float, *, good: int, bad: int, raw: int) -> None:
        """So many clients of each kind, each with one request after the other."""
        end = asyncio.get_running_loop().time() + seconds
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=good + bad)
        async with httpx.AsyncClient(base_url=self._base_url, timeout=ANSWER_S, limits=limits) as client:
            asking = [self._repeat(self._ask_good, client, end) for _ in range(good)]
            asking += [self._repeat(self._ask_bad, client, end) for _ in range(bad)]
            asking += [self._repeat(self._attack, client, end) for _ in range(raw)]
            await asyncio.gather(*asking)

    async def _repeat(
        self, ask: Callable[[httpx.AsyncClient], Awaitable[None]], client: httpx.AsyncClient, end: float
    ) -> None:
        while asyncio.get_running_loop().time() < end:
            try:
                await ask(client)
            except httpx.HTTPError as error:
                self.tally.note_wrong(f"{ask.__name__}: {type(error).__name__} {error}")

    async def _ask_good(self, client: httpx.AsyncClient) -> None:
        kind = self._rng.choice(
            ("known", "known", "fresh", "fresh", "several", "text", "streamed", "tokenize", "models")
        )
        number = self._rng.randrange(KNOWN)
        body: Body = known_body(number)
        if kind in ("fresh", "streamed"):
            body = about(self._fresh_url(), max_tokens=8)
        elif kind == "several":
            body = chat(user(*(image(self._fresh_url()) for _ in range(3)), text("Compare.")), max_tokens=4)
        elif kind == "text":
            body = chat(user(text("Hello! " * self._rng.randrange(1, 30))), max_tokens=16)
        if kind == "models":
            answer = await self._answered(client, "GET", "/v1/models", None)
        elif kind == "tokenize":
            asked = {"model": body["model"], "messages": body["messages"]}
            answer = await self._answered(client, "POST", "/tokenize", asked)
        else:
            answer = await self._answered(client, "POST", CHAT, body | {"stream": kind == "streamed"})
        if answer is None:
            return
        self.tally.answered[kind] += 1
        if kind == "known" and (found := answer.json()["choices"][0]["token_ids"]) != self._known[number]:
            self.tally.note_wrong(f"image {number}: another answer than alone, {found}")
        if kind == "streamed" and not answer.text.endswith("data: [DONE]\n\n"):
            self.tally.note_wrong(f"a stream without its end: {answer.text[-200:]!r}")

    async def _answered(
        self, client: httpx.AsyncClient, method: str, path: str, body: Body | None
    ) -> httpx.Response | None:
        """The answer, with status 200; asked again for as long as the server asks for it."""
        deadline = asyncio.get_running_loop().time() + ANSWER_S
        while asyncio.get_running_loop().time() < deadline:
            answer = await client.request(method, path, json=body)
            if answer.status_code == 200:
                return answer
            if answer.status_code != 503 or "retry-after" not in answer.headers:
                self.tally.note_wrong(f"{method} {path}: {answer.status_code} {answer.text[:300]}")
                return None
            self.tally.asked_again += 1
            await asyncio.sleep(float(answer.headers["retry-after"]))
        self.tally.note_wrong(f"{method} {path}: no answer in {ANSWER_S:g} s")
        return None

    async def _ask_bad(self, client: httpx.AsyncClient) -> None:
        name = self._rng.choice(
            [*HOSTILE_FILES, *WRONG_BODIES, "too many headers", *(["fetch"] * 6 * bool(self._web_url))]
        )
        headers = {"content-type": "application/json"}
        path, content, status = CHAT, b"{}", 400
        slow = False
        if name in HOSTILE_FILES:
            content = json.dumps(about(data_url(HOSTILE_FILES[name]))).encode()
        elif name in WRONG_BODIES:
            path, content, status = WRONG_BODIES[name]
        elif name == "too many headers":
            headers |= {f"x-{number}": "y" for number in range(120)}
        else:
            where = self._rng.choice(
                ("/status/404", "/slow", "/endless", "/redirect/9", "/text", "/to/http://127.0.0.1:1/")
            )
            name, content = f"fetch {where}", json.dumps(about(f"{self._web_url}{where}")).encode()
            status, slow = (413, True) if where == "/endless" else (400, False)
        answer = await client.post(path, content=content, headers=headers)
        self.tally.refused[name] += 1
        too_slow = slow and answer.status_code == 400 and "took longer" in answer.text  # a busy machine
        wanted = HEAD_TOO_LARGE if name == "too many headers" else (status,)
        if answer.status_code not in wanted and not too_slow:
            self.tally.note_wrong(f"{name}: {answer.status_code} where {wanted} was due, {answer.text[:300]}")

    async def _attack(self, _: httpx.AsyncClient) -> None:
        name = self._rng.choice(tuple(ATTACKS))
        url = httpx.URL(self._base_url)
        body = json.dumps(about(self._fresh_url(), max_tokens=400, ignore_eos=True, stream=True)).encode()
        wrong = await ATTACKS[name](Address(url.host, url.port or 80, url.path + CHAT), body)
        self.tally.refused[name] += 1
        if wrong is not None:
            self.tally.note_wrong(f"{name}: {wrong}")

    def _fresh_url(self) -> str:
        """A picture that nobody has asked about."""
        return pictures.url(next(self._fresh), 80, 64)


def known_body(number: int) -> Body:
    return about(pictures.url(90_000 + number, 97, 61))


@dataclass(frozen=True)
class Sample:
    """What a process holds: anonymous memory in bytes, open files, threads."""

    own_bytes: int
    files: int
    threads: int


def sampled(pid: int) -> dict[tuple[int, str], Sample]:
    """Of every process below `pid`, by its id and its role."""
    found = {}
    for process in family(pid):
        try:
            with process.oneshot():
                memory = process.memory_info()
                own = memory.rss - memory.shared  # anonymous: not the object store's, nor a library's code
                found[process.pid, role(process)] = Sample(own, process.num_fds(), process.num_threads())
        except psutil.Error:  # gone meanwhile
            continue
    return found


def role(process: psutil.Process) -> str:
    """What a process is for; Ray's titles go on with what it does just now."""
    words = title(process).split()
    named = words[0] if words and words[0].startswith(("ray::", "VLLM::")) else process.name()
    return ":".join(named.split(":")[:5]).partition(".")[0]


@dataclass(frozen=True)
class Growth:
    """How much more of each a process holds at the end of a run than in its second quarter, medians."""

    role: str
    own_bytes: int
    files: int
    threads: int


def growth(samples: Sequence[Mapping[tuple[int, str], Sample]]) -> list[Growth]:
    """Of the processes that were there all the time, the largest first."""
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    lasting = set.intersection(*(({pid for pid, _ in sample}) for sample in (*early, *late)))
    roles = {pid: its_role for sample in late for pid, its_role in sample if pid in lasting}

    def median(part: Sequence[Mapping[tuple[int, str], Sample]], pid: int, what: str) -> int:
        values: list[Any] = [getattr(held, what) for sample in part for (one, _), held in sample.items() if one == pid]
        return int(statistics.median(values))

    grown = [
        Growth(
            roles[pid],
            *(median(late, pid, what) - median(early, pid, what) for what in ("own_bytes", "files", "threads")),
        )
        for pid in lasting
    ]
    return sorted(grown, key=lambda found: -found.own_bytes)


def series(samples: Sequence[Mapping[tuple[int, str], Sample]], its_role: str) -> list[int]:
    """Bytes of all processes in a role, one sum a sample."""
    return [sum(held.own_bytes for (_, found), held in sample.items() if found == its_role) for sample in samples]
