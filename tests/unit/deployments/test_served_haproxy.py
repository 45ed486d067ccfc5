"""Serve's HAProxy as `vitray serve --haproxy` starts it: who is silent is sent away, who waits for an answer is not."""

from __future__ import annotations

import ast
import textwrap

import pytest

from deployments.haproxy import CLIENT_TIMEOUT
from tests.programs import output_of_python

pytestmark = pytest.mark.slow

CLIENT_S = 2
ANSWER_S = 3 * CLIENT_S
PROGRAM = textwrap.dedent(
    """
    import asyncio, socket, sys, threading, time

    from benchmarks.own_serve import own_serve

    ANSWER_S = float(sys.argv[1])
    told = {}


    def silent(address, name, sent):
        with socket.create_connection(address) as connection:
            connection.settimeout(60)
            connection.sendall(sent)
            began = time.monotonic()
            told[name] = connection.recv(12).decode(), time.monotonic() - began


    with own_serve(haproxy=True, num_cpus=2) as (url, deploy):
        import httpx
        from tests.unit.deployments.test_served_haproxy import NAME

        deploy({"name": "slow", "route_prefix": "/", "import_path": NAME, "args": {"answer_s": ANSWER_S}})
        address = httpx.URL(url).host, httpx.URL(url).port
        head = b"POST /whole HTTP/1.1\\r\\nHost: x\\r\\n"
        threads = [
            threading.Thread(target=silent, args=(address, "head", head)),
            threading.Thread(target=silent, args=(address, "body", head + b"Content-Length: 9\\r\\n\\r\\nx")),
        ]
        for thread in threads:
            thread.start()
        for path in ("whole", "stream"):
            told[path] = httpx.post(f"{url}/{path}", timeout=60).text
        for thread in threads:
            thread.join()
    print(told)
    """
)
NAME = f"{__name__}:build"


def build(args: dict[str, float]) -> object:
    """An application that takes `answer_s` to answer, or for each of three pieces."""
    import asyncio
    from collections.abc import AsyncIterator

    from ray import serve
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response, StreamingResponse

    class Slow:
        async def __call__(self, request: Request) -> Response:
            if request.url.path == "/stream":
                return StreamingResponse(self._pieces())
            await asyncio.sleep(args["answer_s"])
            return PlainTextResponse("whole")

        async def _pieces(self) -> AsyncIterator[str]:
            for number in range(3):
                yield str(number)
                await asyncio.sleep(args["answer_s"])

    return serve.deployment(ray_actor_options={"num_cpus": 0.1})(Slow).bind()


def test_who_is_silent_is_sent_away_and_who_waits_is_answered() -> None:
    printed = output_of_python(PROGRAM, str(ANSWER_S), **{CLIENT_TIMEOUT: str(CLIENT_S)})
    told = ast.literal_eval(printed.splitlines()[-1])
    assert (told["whole"], told["stream"]) == ("whole", "012")
    for name, status in (("head", "408"), ("body", "400")):
        answer, seconds = told[name]
        assert answer == f"HTTP/1.1 {status}"
        assert CLIENT_S <= seconds < ANSWER_S
