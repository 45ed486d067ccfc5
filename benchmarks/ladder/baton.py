"""A peer in a separate process that runs only on request, so that it can take turns with our contestants on one GPU.

The parent sends one message and waits for the reply; between messages the child waits with its GPU work completed. Its
output is written to a log file. A child that exits, or does not reply in time, fails only its own runs:

    with Peer(make_vllm, log) as peer:
        built = peer.ask(Build(...), Built) peer.contestant("vllm launched eager").run(0, read_clock=False)
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from benchmarks.ladder.turns import RunFailedError, Spell, Timed

if TYPE_CHECKING:
    from benchmarks.ladder.towers import Shape

_ERROR = re.compile(r"[\w.]*(Error|Exception)\b")
_END_S = 20.0
RUN_S, BUILD_S = 60.0, 300.0
"""Timeouts of a reply in seconds: of a run (plus the duration of a sustained one), and of building a tower."""


@dataclass(frozen=True)
class Build:
    """Request to build all contestants of one tower. `checkpoint`: folder with its weights; `dtype`: torch's name."""

    tower: str
    checkpoint: str
    shapes: tuple[Shape, ...]
    seed: int
    tiny: bool
    dtype: str


@dataclass(frozen=True)
class Built:
    """Reply to Build: labels by contestant, reasons by unavailable contestant, facts for the record."""

    labels: Mapping[str, str]
    skipped: Mapping[str, str]
    facts: Mapping[str, object]


@dataclass(frozen=True)
class Take:
    """Request to load a shape's inputs and run every contestant once. `reference`: file with expected embeddings."""

    shape: str
    reference: str | None


@dataclass(frozen=True)
class Taken:
    """Reply to Take: relative errors of images by contestant, with a reference; reasons by failed contestant."""

    errors: Mapping[str, list[float]]
    failed: Mapping[str, str]


@dataclass(frozen=True)
class Run:
    """Request to run one contestant on input set `number`."""

    name: str
    number: int
    read_clock: bool


@dataclass(frozen=True)
class Sustain:
    """Request to run one contestant back to back."""

    name: str
    settle_s: float
    seconds: float


@dataclass(frozen=True)
class End:
    """Request to end the process."""


@dataclass(frozen=True)
class Failed:
    """Reply to a message whose handling raised."""

    reason: str


class Side(Protocol):
    """The child's implementation. Each method may raise anything; the child replies with `Failed` and continues."""

    def build(self, asked: Build) -> Built: ...

    def take(self, asked: Take) -> Taken: ...

    def run(self, asked: Run) -> Timed: ...

    def sustain(self, asked: Sustain) -> Spell: ...


Message = Build | Take | Run | Sustain | End
Reply = TypeVar("Reply", Built, Taken, Timed, Spell)


class PeerEndedError(RunFailedError):
    """The peer's process has ended."""


class Peer:
    """The parent's side of the connection."""

    def __init__(self, make: Callable[[], Side], log: Path) -> None:
        """Starts the process. `make`: a module's function, called in the child; `log`: file for the child's output."""
        self._log = log
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, make, str(log)))
        self._process.start()
        theirs.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def ask(self, message: Message, kind: type[Reply], timeout_s: float = RUN_S) -> Reply:
        """Sends a message and waits for the reply.

        Raises:
            RunFailedError: the child failed to handle it. PeerEndedError: the child has exited, or was killed because
            it did not reply within `timeout_s`.
        """
        try:
            self._connection.send(message)
            if not self._connection.poll(timeout_s):
                self._process.kill()
                raise PeerEndedError(f"no answer to {type(message).__name__} within {timeout_s:.0f} s")
            reply = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join(_END_S)
            raise PeerEndedError(self._last_words()) from error
        if isinstance(reply, Failed):
            raise RunFailedError(reply.reason)
        assert isinstance(reply, kind)
        return reply

    def contestant(self, name: str) -> RemoteContestant:
        return RemoteContestant(self, name)

    def close(self) -> None:
        """Ends the process if it still runs."""
        with contextlib.suppress(OSError):
            self._connection.send(End())
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_END_S)
        self._connection.close()

    def _last_words(self) -> str:
        """Returns the last line of the log that names an error, else the last line."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        print("\n".join(lines[-200:]), file=sys.stderr, flush=True)
        said = [line for line in lines if _ERROR.match(line)] or [line for line in lines if line.strip()]
        code = self._process.exitcode
        return f"the process ended with {code}: {said[-1][:400] if said else 'no message'}"


@dataclass(frozen=True)
class RemoteContestant:
    """A contestant of a peer; see `turns.Contestant`."""

    peer: Peer
    name: str

    def run(self, number: int, *, read_clock: bool) -> Timed:
        return self.peer.ask(Run(self.name, number, read_clock), Timed)

    def sustain(self, settle_s: float, seconds: float) -> Spell:
        return self.peer.ask(Sustain(self.name, settle_s, seconds), Spell, RUN_S + settle_s + seconds)


def serve(connection: Connection, make: Callable[[], Side], log: str) -> None:
    """Runs the child's loop until `End` or until the parent has exited."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    side = make()
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        if isinstance(message, End):
            return
        try:
            connection.send(_answer(side, message))
        except Exception as error:  # a contestant that fails must not stop the others
            traceback.print_exc()
            connection.send(Failed(f"{type(error).__name__}: {error}"[:500]))


def _answer(side: Side, message: Message) -> Built | Taken | Timed | Spell:
    match message:
        case Build():
            return side.build(message)
        case Take():
            return side.take(message)
        case Run():
            return side.run(message)
        case Sustain():
            return side.sustain(message)
        case End():
            raise AssertionError("handled by the loop")
