"""Several client processes send the same requests at the same times as one, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import bench_serve
from benchmarks.trace.bodies import Bodies
from benchmarks.trace.client import Run
from benchmarks.trace.client_pool import ClientPool
from benchmarks.trace.images import make_images
from benchmarks.trace.requests import Trace, alike_trace
from benchmarks.trace.run import Plan, Server, measure
from tests.unit.deployments.cli.chat_server import ChatServer

SPEED = 20.0


@pytest.fixture
def server() -> Iterator[ChatServer]:
    made = ChatServer()
    yield made
    made.close()


@pytest.fixture
def trace() -> Trace:
    return alike_trace(1, 24, 40, 6, 7)


def send(server: ChatServer, trace: Trace, processes: int, folder: Path) -> tuple[Run, list[dict[str, Any]]]:
    before = len(server.bodies)
    plan = Plan(trace, SPEED, 1, 60.0, warm_ups=0, prepared=True)
    with ClientPool(processes) if processes > 1 else nullcontext() as pool:
        runs = asyncio.run(measure(plan, [Server("one", server.url)], make_images(trace, folder), lambda _: None, pool))
    return runs["one"], server.bodies[before:]


def test_requests_and_answers_are_those_of_one_process(server: ChatServer, trace: Trace, tmp_path: Path) -> None:
    one, bodies = send(server, trace, 1, tmp_path)
    many, their_bodies = send(server, trace, 3, tmp_path)
    assert len(bodies) == 7
    assert sorted(map(json.dumps, bodies)) == sorted(map(json.dumps, their_bodies))
    assert [each.index for each in many.sent] == [each.index for each in one.sent] == list(range(7))
    assert [each.due_s for each in many.sent] == [each.due_s for each in one.sent]
    assert all(each.answer.ok and each.answer.output_tokens == 6 for each in many.sent)
    assert many.duration_s >= (trace.requests[-1].at_s - trace.requests[0].at_s) / SPEED
    assert len(many.loop_lags_s) > 0


def test_more_processes_than_requests(server: ChatServer, tmp_path: Path) -> None:
    run, _ = send(server, alike_trace(0, 24, 40, 6, 2), 3, tmp_path)
    assert [each.answer.ok for each in run.sent] == [True, True]


@pytest.mark.timeout(60)  # less than READY_S
@pytest.mark.parametrize("prepared", [True, False])
def test_a_picture_that_is_gone_stops_all_processes(
    server: ChatServer, trace: Trace, tmp_path: Path, prepared: bool
) -> None:
    """The others would wait for the process that failed."""
    files = make_images(trace, tmp_path)
    files[trace.requests[-1].images[0].id].unlink()
    bodies = Bodies(trace, files, "model", 1.0)
    due_s = [0.0] * len(trace.requests)
    with ClientPool(2) as pool, pytest.raises(FileNotFoundError):
        asyncio.run(pool.open_loop(server.url, None, 60.0, due_s, bodies, range(7), prepared=prepared))


@pytest.mark.timeout(60)  # less than until the last request is due
def test_a_picture_that_goes_during_the_run_stops_all_processes(
    server: ChatServer, trace: Trace, tmp_path: Path
) -> None:
    files = make_images(trace, tmp_path)
    files[trace.requests[3].images[0].id].unlink()
    bodies = Bodies(trace, files, "model", 1.0)
    due_s = [0.0, 0.0, 0.0, 2.5, 600.0, 600.0, 600.0]  # the body of the fourth is made after the start
    with pytest.raises(FileNotFoundError), ClientPool(2) as pool:
        asyncio.run(pool.open_loop(server.url, None, 60.0, due_s, bodies, range(7), prepared=False))
    assert len(server.bodies) <= 3


@pytest.mark.timeout(60)  # less than until the requests are due
def test_an_interrupted_run_does_not_send_the_rest(server: ChatServer, trace: Trace, tmp_path: Path) -> None:
    bodies = Bodies(trace, make_images(trace, tmp_path), "model", 1.0)
    due_s = [0.0, *(600.0 for _ in range(6))]

    arrived = threading.Event()

    async def note(_: int) -> None:
        arrived.set()

    server.before = note

    async def interrupted(pool: ClientPool) -> None:
        sending = asyncio.ensure_future(pool.open_loop(server.url, None, 60.0, due_s, bodies, range(7), prepared=True))
        await asyncio.to_thread(arrived.wait)
        sending.cancel()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), ClientPool(2) as pool:
        asyncio.run(interrupted(pool))
    assert len(server.bodies) == 1


def test_the_program_has_an_option_for_it(server: ChatServer, tmp_path: Path) -> None:
    arguments = [server.url, "--client-processes", "2", "--speed", "inf", "--requests", "4", "--max-output-tokens", "3",
                 "--max-lag-ms", "60000", "--images", str(tmp_path)]  # fmt: skip
    done = CliRunner().invoke(bench_serve.main, arguments)
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout.splitlines()[-1])["servers"].values()
    assert (found["sent"], found["successful"]) == (4, 4)
