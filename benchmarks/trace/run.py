"""Sends a trace to one or two servers, in the order of a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from benchmarks.trace import bodies as trace_bodies
from benchmarks.trace.bodies import Bodies
from benchmarks.trace.client import Run, join_runs, one_by_one, open_loop, served_model, session
from benchmarks.trace.client_pool import ClientPool, piece_bodies
from benchmarks.trace.requests import Trace


class BenchError(Exception):
    """The run could not be made; the message gives the reason."""


@dataclass(frozen=True)
class Server:
    """One server; `url` has no /v1."""

    label: str
    url: str
    key: str | None = None
    """API key for this server only."""


@dataclass(frozen=True)
class Plan:
    """The requests to each server, and how they are sent."""

    trace: Trace
    speed: float
    """Factor on the trace's pace; infinite for all at once."""
    pieces: int
    """Number of pieces in which the servers take turns; with 1, each server gets the whole trace."""
    timeout_s: float
    model: str | None = None
    ignore_eos: bool = True
    detail: str | None = None
    warm_ups: int = 1
    prepared: bool = False
    """Whether all bodies of a piece are made before its clock starts, because making large ones delays the client."""

    def order(self, servers: Sequence[Server]) -> list[tuple[Server, Sequence[int]]]:
        """Returns servers and indices of their requests in order of sending; the order of servers alternates."""
        found: list[tuple[Server, Sequence[int]]] = []
        for number, piece in enumerate(self.trace.pieces(self.pieces)):
            turn = servers if number % 2 == 0 else list(reversed(servers))
            found += [(server, piece) for server in turn]
        return found

    def order_text(self, servers: Sequence[Server]) -> str:
        if len(servers) == 1:
            return "one server"
        labels = [server.label for server in servers]
        if self.pieces == 1:
            return "one after the other: " + ", then ".join(f"all to {label}" for label in labels)
        each = " and ".join(labels)
        return f"interleaved: {self.pieces} consecutive pieces, each to {each}, the order turned each time"


async def measure(
    plan: Plan,
    servers: Sequence[Server],
    files: Mapping[int, Path],
    say: Callable[[str], None],
    pool: ClientPool | None = None,
) -> dict[str, Run]:
    """Returns each server's run by label. Without `pool`, this process is the client.

    Raises BenchError if a server does not respond as required.
    """
    runs: dict[str, list[Run]] = {server.label: [] for server in servers}
    bodies: dict[str, Bodies] = {}
    tokens_per_word: float | None = None
    async with AsyncExitStack() as stack:
        sessions = {one.label: await stack.enter_async_context(session(one.key, plan.timeout_s)) for one in servers}
        for server in servers:
            http = sessions[server.label]
            model = plan.model or await _model(http, server)
            if tokens_per_word is None:  # measured on the first server, so that all get the same texts
                tokens_per_word = await _tokens_per_word(http, server, model)
                say(f"a word has {tokens_per_word:.2f} tokens")
            made = Bodies(plan.trace, files, model, tokens_per_word, plan.ignore_eos, plan.detail)
            bodies[server.label] = made
            await _warm_up(http, server, model, plan)
        for server, piece in plan.order(servers):
            say(f"{server.label}: {len(piece)} requests")
            due_s = [plan.trace.requests[index].at_s / plan.speed for index in piece]
            made = bodies[server.label]
            if pool is None:
                make = piece_bodies(made, piece, prepared=plan.prepared)
                run = await open_loop(sessions[server.label], server.url, due_s, make)
            else:
                run = await pool.open_loop(
                    server.url, server.key, plan.timeout_s, due_s, made, piece, prepared=plan.prepared
                )
            for one, index in zip(run.sent, piece, strict=True):
                one.index = index
            runs[server.label].append(run)
    return {label: join_runs(found) for label, found in runs.items()}


async def _model(http: aiohttp.ClientSession, server: Server) -> str:
    try:
        return await served_model(http, server.url)
    except (aiohttp.ClientError, OSError, LookupError, ValueError) as error:
        raise BenchError(f"{server.url}/v1/models: {error!r}") from error


async def _tokens_per_word(http: aiohttp.ClientSession, server: Server, model: str) -> float:
    answers = await one_by_one(http, server.url, trace_bodies.probes(model))
    for answer in answers:
        if not answer.ok and not answer.prompt_tokens:
            raise BenchError(f"{server.url} does not answer a question: status {answer.status} {answer.error}")
    try:
        return trace_bodies.tokens_per_word([answer.prompt_tokens for answer in answers])
    except ValueError as error:
        raise BenchError(f"{server.url}: {error}") from error


async def _warm_up(http: aiohttp.ClientSession, server: Server, model: str, plan: Plan) -> None:
    """Sends requests with pictures that are not in the trace."""
    pictures = trace_bodies.warm_up_pictures(plan.warm_ups)
    contents = [
        trace_bodies.body(model, trace_bodies.words(f"warm-up {number}", 16), [picture], 4, ignore_eos=False)
        for number, picture in enumerate(pictures)
    ]
    for answer in await one_by_one(http, server.url, contents):
        if answer.status != 200:
            raise BenchError(f"{server.url} does not answer about a picture: status {answer.status} {answer.error}")
