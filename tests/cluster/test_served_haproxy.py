"""HAProxy as `vitray serve` starts it, before a real ingress replica: who is silent is sent away, who waits for an
answer is not, and the replica's own port is bounded as Serve's proxy is."""

from __future__ import annotations

import ast
import textwrap
from typing import Any

import pytest

from deployments.http_proxy import limits as proxy_bounds
from deployments.http_proxy.haproxy import CLIENT_TIMEOUT
from tests.programs import output_of_python

pytestmark = pytest.mark.slow

CLIENT_S = 2
ANSWER_S = 3 * CLIENT_S
PROGRAM = textwrap.dedent(
    """
    import asyncio, os, re, socket, sys, threading, time
    from pathlib import Path

    from benchmarks.serving.own_serve import own_serve

    ANSWER_S = float(sys.argv[1])
    told = {}


    def silent(address, name, sent):
        began = time.monotonic()
        with socket.create_connection(address) as connection:
            connection.settimeout(60)
            connection.sendall(sent)
            told[name] = connection.recv(12).decode(), time.monotonic() - began


    def answered(at, sent):
        # Who goes on sending to a server that has closed may lose its answer, by TCP's own rules.
        for _ in range(5):
            if found := statuses(asyncio.run(replies(at, sent))):
                break
        return found


    with own_serve(haproxy=True, num_cpus=2) as (url, deploy):
        import httpx, psutil
        from tests.hostile.sockets import Address, head, replies, statuses
        from tests.cluster.test_served_haproxy import NAME

        deploy({"name": "slow", "route_prefix": "/", "import_path": NAME, "args": {"answer_s": ANSWER_S}})
        address = httpx.URL(url).host, httpx.URL(url).port
        begun = b"POST /whole HTTP/1.1\\r\\nHost: x\\r\\n"
        threads = [
            threading.Thread(target=silent, args=(address, "head", begun)),
            threading.Thread(target=silent, args=(address, "body", begun + b"Content-Length: 9\\r\\n\\r\\nx")),
        ]
        for thread in threads:
            thread.start()
        for path in ("whole", "stream"):
            told[path] = httpx.post(f"{url}/{path}", timeout=60).text
        for thread in threads:
            thread.join()

        instructions = ["X-Request-Disconnect-Disabled", "X-Request-Timeout-Seconds", "serve_multiplexed_model_id"]
        asked = {name: "1" for name in instructions} | {"x-request-id": "mine"}
        kept = httpx.get(f"{url}/headers", headers=asked, timeout=60)
        told["instructions"] = [name for name in kept.json() if name in map(str.lower, instructions)]
        told["identifier"] = kept.json()["x-request-id"]
        claims = httpx.Client(timeout=60, transport=httpx.HTTPTransport(local_address="127.0.0.2"))
        told["client"] = claims.get(f"{url}/headers", headers={"x-forwarded-for": "1.2.3.4"}).json()["client"]

        (config,) = Path(os.environ["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"]).parent.glob("*/haproxy.cfg")
        (port,) = set(re.findall(r"server \\S*Slow\\S* 127\\.0\\.0\\.1:(\\d+) ", config.read_text()))
        upgrade = ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: eA=="]
        for name, at in (("front", Address(*address, "/")), ("replica", Address("127.0.0.1", int(port), "/"))):
            flood = head(at)[:-2] + b"".join(b"X-%d: y\\r\\n" % number for number in range(100_000))
            routes = head(Address(at.host, at.port, "/-/routes"), "Connection: close", method="GET")
            sent = {"routes": routes, "flood": flood, "websocket": head(at, *upgrade, method="GET")}
            told[name] = {what: answered(at, data) for what, data in sent.items()}
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        told["open"] = [
            (process.name(), *listening.laddr)
            for process in family
            for listening in process.net_connections("tcp")
            if listening.status == "LISTEN" and (process.name() == "haproxy" or listening.laddr.port == int(port))
        ]
    print(told)
    """
)
NAME = f"{__name__}:build"


def build(args: dict[str, float]) -> object:
    """An application that takes `answer_s` to answer, or for each of three pieces; `/headers` tells what came."""
    import asyncio
    from collections.abc import AsyncIterator

    from ray import serve
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

    class Slow:
        async def __call__(self, request: Request) -> Response:
            if request.url.path == "/headers":
                return JSONResponse(dict(request.headers) | {"client": request.client.host if request.client else None})
            if request.url.path == "/stream":
                return StreamingResponse(self._pieces())
            await asyncio.sleep(args["answer_s"])
            return PlainTextResponse("whole")

        async def _pieces(self) -> AsyncIterator[str]:
            for number in range(3):
                yield str(number)
                await asyncio.sleep(args["answer_s"])

    return serve.deployment(ray_actor_options={"num_cpus": 0.1})(Slow).bind()


def test_haproxy_before_a_replica() -> None:
    """On loopback nothing listens on another address, where HAProxy alone shows its state on every one; its bounds and
    the replica's hold at both ports."""
    variables: dict[str, Any] = {CLIENT_TIMEOUT: str(CLIENT_S), proxy_bounds.VARIABLE: proxy_bounds.IMPORT_PATH}
    printed = output_of_python(PROGRAM, str(ANSWER_S), **variables)
    told = ast.literal_eval(printed.splitlines()[-1])
    assert (told["whole"], told["stream"]) == ("whole", "012")
    for name in ("head", "body"):
        answer, seconds = told[name]
        assert answer == "HTTP/1.1 408"
        assert seconds >= CLIENT_S
    assert (told["instructions"], told["identifier"]) == ([], "mine")
    assert told["client"] == "127.0.0.2", "neither HAProxy's address nor the one that the client names"
    assert told["front"] == {"routes": [404], "flood": [400], "websocket": [400]}
    assert told["replica"] == {"routes": [404], "flood": [431], "websocket": [400]}
    assert len(told["open"]) == 2
    assert {host for _, host, _ in told["open"]} == {"127.0.0.1"}
