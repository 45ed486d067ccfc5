"""HAProxy itself, with the configuration that Serve writes for it and `vitray-haproxy` amends, before two servers that
stand in for ingresses: what becomes of a request when one of them dies, and what strangers may do.

`test_served_haproxy.py` and `test_chaos.py` have it before the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from configs.resolve import PROJECT_ROOT
from deployments.common.api_error import ApiError, error_head_and_body
from deployments.http_proxy import haproxy
from tests.hostile.sockets import Address, connected, head, replies, statuses
from tests.programs import free_port, output_of_python

CLIENT_S = 2
RENDERED = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from ray.serve._private import haproxy
    from ray.serve.config import HTTPOptions

    folder, ports = Path(sys.argv[1]), [int(port) for port in sys.argv[2:]]
    servers = [haproxy.ServerConfig(name, "127.0.0.1", port) for name, port in zip(("first", "second"), ports[1:])]
    backend = haproxy.BackendConfig(name="http-app", path_prefix="/", app_name="app", servers=servers)
    options = HTTPOptions(host="127.0.0.1", port=ports[0])
    config = haproxy.HAProxyConfig(http_options=options, has_received_routes=True, has_received_servers=True)
    api = haproxy.HAProxyApi(config, {backend.name: backend}, str(folder / "haproxy.cfg"))
    api._generate_config_file_internal()
    """
)
"""Serve's own code, which has the two servers from the controller otherwise. It reads its variables at import."""


@pytest.fixture(scope="module")
def ports() -> list[int]:
    """Of HAProxy and of both servers."""
    return [free_port() for _ in range(3)]


@pytest.fixture(scope="module")
def folder(ports: list[int]) -> Any:
    """With Serve's configuration."""
    with tempfile.TemporaryDirectory(prefix="vt", dir="/tmp") as path:
        variables: dict[str, Any] = haproxy.environment(Path(path)) | {haproxy.CLIENT_TIMEOUT: str(CLIENT_S)}
        output_of_python(RENDERED, path, *map(str, ports), **variables)
        yield Path(path)


@pytest.fixture(scope="module")
def serves_own(folder: Path) -> str:
    return (folder / "haproxy.cfg").read_text()


class Ingress:
    """A server that notes what it is sent, and answers, or dies with its connections. One connection a request."""

    def __init__(self, answer: Callable[[asyncio.StreamWriter], Awaitable[None]] | None) -> None:
        """`answer`: None for a server that dies when it has the whole request."""
        self._answer = answer
        self.requests: list[tuple[str, bytes]] = []
        """Heads and bodies."""
        self.heads: list[str] = []
        """Of requests whose body may still be coming."""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            if head.startswith("get /-/healthz "):
                await answer_ok(writer)
            else:
                self.heads.append(head)
                length = int(head.partition("content-length: ")[2].partition("\r\n")[0] or 0)
                self.requests.append((head, await reader.readexactly(length)))
                if self._answer is None:
                    writer.transport.abort()
                else:
                    await self._answer(writer)
        writer.close()


async def answer_ok(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
    await writer.drain()


@asynccontextmanager
async def behind_haproxy(
    folder: Path, ports: list[int], *ingresses: Ingress, amended: bool = True, **variables: str
) -> AsyncIterator[str]:
    """The URL of an HAProxy before both, or before the one that there is. `amended`: as `vitray-haproxy` has it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_SERVE_HAPROXY")}
    environment |= {haproxy.CLIENT_TIMEOUT: str(CLIENT_S), **variables}
    program = Path(sys.executable).with_name("vitray-haproxy") if amended else Path(haproxy.haproxy_binary())
    config = folder / "running.cfg"
    config.write_text((folder / "haproxy.cfg").read_text())
    async with contextlib.AsyncExitStack() as stack:
        for ingress, port in zip(ingresses, ports[1:], strict=False):
            await stack.enter_async_context(await asyncio.start_server(ingress, "127.0.0.1", port, limit=2**27))
        process = await asyncio.create_subprocess_exec(
            program, "-db", "-f", config, env=environment, stderr=asyncio.subprocess.PIPE
        )
        try:
            while process.returncode is None:
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", ports[0])).close()
                    break
                await asyncio.sleep(0.02)
            assert process.returncode is None, (await process.communicate())[1].decode()
            yield f"http://127.0.0.1:{ports[0]}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()


def asked(
    folder: Path, ports: list[int], *ingresses: Ingress, body: bytes, **how: Any
) -> tuple[httpx.Response | Exception, list[int]]:
    """The answer, or the error where there is none, and the sizes of the bodies that each ingress got."""

    async def scenario() -> httpx.Response | Exception:
        async with (
            behind_haproxy(folder, ports, *ingresses, **how) as url,
            httpx.AsyncClient(timeout=30) as client,
        ):
            try:
                return await client.post(f"{url}/v1/chat/completions", content=body)
            except httpx.HTTPError as error:
                return error

    found = asyncio.run(scenario())
    return found, [len(got) for ingress in ingresses for _, got in ingress.requests]


@pytest.mark.parametrize("num_bytes", [12_000, 300_000, 900_000, 1_040_000])
def test_a_request_without_a_byte_of_its_answer_is_sent_to_the_other_ingress(
    num_bytes: int, folder: Path, ports: list[int]
) -> None:
    """An ingress that was killed with requests in flight cost each of them a bare 500: Serve has HAProxy send again
    what reached no server, and no more."""
    body = b"x" * num_bytes
    found, sizes = asked(folder, ports, Ingress(None), Ingress(answer_ok), body=body)
    assert isinstance(found, httpx.Response)
    assert (found.status_code, sizes) == (200, [num_bytes, num_bytes])


@pytest.mark.parametrize("part", [b"", b"x" * 50], ids=["its head", "half of its body"])
def test_a_request_that_has_part_of_its_answer_is_not_sent_again(part: bytes, folder: Path, ports: list[int]) -> None:
    """The client would get the beginning of one answer and the end of another."""

    async def answer_in_part(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + part)
        await writer.drain()
        writer.transport.abort()

    found, sizes = asked(folder, ports, Ingress(answer_in_part), Ingress(answer_ok), body=b"x" * 12_000)
    assert isinstance(found, httpx.RemoteProtocolError), found
    assert sizes == [12_000]


def test_serves_configuration_alone_loses_it(folder: Path, ports: list[int]) -> None:
    """It would wait for no body, and what HAProxy has passed on before it had all of it cannot be sent again."""

    async def scenario() -> tuple[list[int], int]:
        dying, living = Ingress(None), Ingress(answer_ok)
        async with behind_haproxy(folder, ports, dying, living, amended=False):
            address = Address("127.0.0.1", ports[0], "/")
            async with connected(address) as (reader, writer):
                writer.write(head(address, "Content-Length: 12000"))
                while not dying.heads + living.heads:  # noqa: ASYNC110 - a server of another task
                    await asyncio.sleep(0.01)
                writer.write(b"x" * 12_000)
                return statuses(await reader.read(1000)), len(living.requests)

    assert asyncio.run(scenario()) == ([500], 0)


def test_a_request_that_ends_two_ingresses_ends_no_third(folder: Path, ports: list[int]) -> None:
    """Sent again once: the client is told in OpenAI's shape, and when to come back."""
    found, sizes = asked(folder, ports, Ingress(None), Ingress(None), body=b"poison")
    assert isinstance(found, httpx.Response)
    assert (found.status_code, sizes) == (503, [6, 6])
    error = ApiError(503, haproxy.UNANSWERED, code="replica_lost", retry_after_s=1)
    told, body = error_head_and_body(error)
    assert found.json() == json.loads(body)
    assert {name.decode(): value.decode() for name, value in told.headers}.items() <= dict(found.headers).items()


def test_a_body_over_the_buffer_is_sent_once(folder: Path, ports: list[int]) -> None:
    """64 MiB, the largest that an ingress takes, arrive whole; where the ingress dies the client has to try again."""
    large = b"x" * 2**26
    found, sizes = asked(folder, ports, Ingress(answer_ok), body=large)
    assert isinstance(found, httpx.Response)
    assert (found.status_code, sizes) == (200, [2**26])
    found, sizes = asked(folder, ports, Ingress(None), Ingress(answer_ok), body=large[: 2**20])
    assert not (isinstance(found, httpx.Response) and found.status_code == 200)
    assert sizes == [2**20]


def test_a_larger_buffer_is_the_operators_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(haproxy.BUFFER_BYTES, str(2**22))
    assert haproxy.environment(Path("/tmp/x"))[haproxy.BUFFER_BYTES] == str(2**22)


def test_each_piece_of_a_stream_is_passed_on_at_once(folder: Path, ports: list[int]) -> None:
    """With buffers of 1 MiB: the server sends the second piece when the client has the first."""

    async def scenario() -> list[bytes]:
        had = asyncio.Event()

        async def stream(writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
            await writer.drain()
            await had.wait()
            writer.write(b"3\r\ntwo\r\n0\r\n\r\n")
            await writer.drain()

        found = []
        async with (
            behind_haproxy(folder, ports, Ingress(stream)) as url,
            httpx.AsyncClient(timeout=30) as client,
            client.stream("POST", url, content=b"x" * 300_000) as response,
        ):
            async for piece in response.aiter_raw():
                found.append(piece)
                had.set()
        return found

    assert asyncio.run(scenario()) == [b"one", b"two"]


def test_slow_requests_do_not_reach_an_ingress(folder: Path, ports: list[int]) -> None:
    """A head, or as much of a body as a buffer holds, has to come in the client's time, however many bytes come in
    between: HAProxy would wait as long again for each."""

    async def scenario() -> tuple[list[list[int]], list[str]]:
        ingress = Ingress(answer_ok)
        async with behind_haproxy(folder, ports, ingress, Ingress(answer_ok)):
            address = Address("127.0.0.1", ports[0], "/")
            begun = [head(address)[:-2], head(address, "Content-Length: 100000")]
            return [statuses(answer) for answer in await asyncio.gather(*(dripped(address, b) for b in begun))], (
                ingress.heads
            )

    async def dripped(address: Address, begun: bytes) -> bytes:
        async with connected(address) as (reader, writer):
            writer.write(begun)
            answer = asyncio.create_task(reader.read(1000))
            while not answer.done():
                with contextlib.suppress(ConnectionError):
                    writer.write(b"x")
                await asyncio.wait([answer], timeout=CLIENT_S / 10)
            return answer.result()

    assert asyncio.run(scenario()) == ([[408], [408]], [])


def test_what_strangers_are_not_told(folder: Path, ports: list[int], serves_own: str) -> None:
    """Serve's list of applications, and what HAProxy shows of itself on ports of every address."""

    async def scenario() -> list[int]:
        async with behind_haproxy(folder, ports, Ingress(answer_ok)) as url, httpx.AsyncClient() as client:
            return [(await client.get(url + path)).status_code for path in ("/-/routes", "/-/healthz")]

    assert asyncio.run(scenario()) == [404, 200]
    opened = [line.split()[1] for line in (folder / "running.cfg").read_text().splitlines() if "bind " in line]
    assert opened == [f"127.0.0.1:{ports[0]}"]
    assert serves_own.count("bind ") == 3
    errors = folder / "unanswered.http"
    wanted = {haproxy.METRICS_PORT: "9101", haproxy.STATS_PORT: "8404"}
    assert haproxy.amend(serves_own, errors=errors, variables=wanted).count("bind ") == 3


def test_a_client_cannot_name_its_own_address(folder: Path, ports: list[int]) -> None:
    """uvicorn believes `X-Forwarded-For` from its own machine, where HAProxy is: whoever is elsewhere could have passed
    for others, whose quotas go by addresses where there are no keys."""

    async def scenario() -> list[str]:
        ingress = Ingress(answer_ok)
        async with behind_haproxy(folder, ports, ingress):
            for source in ("127.0.0.2", "127.0.0.1"):
                reader, writer = await asyncio.open_connection("127.0.0.1", ports[0], local_addr=(source, 0))
                writer.write(head(Address("127.0.0.1", ports[0], "/"), "X-Forwarded-For: 1.2.3.4", method="GET"))
                await reader.readuntil(b"ok")
                writer.close()
        return [line for got in ingress.heads for line in got.splitlines() if line.startswith("x-forwarded-for")]

    assert asyncio.run(scenario()) == ["x-forwarded-for: 127.0.0.2", "x-forwarded-for: 1.2.3.4"]


@pytest.mark.parametrize(
    "sent",
    [
        lambda a: head(a, "Content-Length: 2", "Content-Length: 40") + b"{}",
        lambda a: head(a)[:-2] + b"".join(b"X-%d: y\r\n" % number for number in range(200)) + b"\r\n",
        lambda a: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=["two lengths", "200 headers", "HTTP/2"],
)
def test_what_is_no_request(sent: Callable[[Address], bytes], folder: Path, ports: list[int]) -> None:
    async def scenario() -> tuple[list[int], list[str]]:
        ingress = Ingress(answer_ok)
        async with behind_haproxy(folder, ports, ingress, ingress):
            address = Address("127.0.0.1", ports[0], "/")
            return statuses(await replies(address, sent(address))), ingress.heads

    assert asyncio.run(scenario()) == ([400], [])


def test_another_configuration_of_serves_is_refused(serves_own: str, tmp_path: Path) -> None:
    """HAProxy does not start, and Serve tells why, when a Ray writes something else: nothing is left open silently."""
    errors = tmp_path / "unanswered.http"
    good = haproxy.amend(serves_own, errors=errors, variables={})
    assert haproxy.amend(good, errors=errors, variables={}) == good
    for line in ("option abortonclose", "listen stats", "if routes\n"):
        with pytest.raises(haproxy.TemplateError, match="0 lines"):
            haproxy.amend(serves_own.replace(line, ""), errors=errors, variables={})


def test_paths_of_sockets_are_short_enough() -> None:
    """Serve puts a folder with the node's id below the one that it is given; HAProxy counts 97 characters."""
    limit = 97 - len("/metrics.sock") - len("/") - haproxy.NODE_ID_LENGTH
    haproxy.environment(Path("/" + "x" * (limit - 1)))
    with pytest.raises(ValueError, match=f"a path of {limit + 1} characters, the limit is {limit}"):
        haproxy.environment(Path("/" + "x" * limit))


def test_the_variables_of_a_clusters_nodes_are_documented() -> None:
    page = (PROJECT_ROOT / "docs" / "deploy.md").read_text()
    block = page.partition("## HAProxy in front")[2].partition("```sh\n")[2].partition("```")[0]
    named = dict(line.removeprefix("export ").split("=", 1) for line in block.splitlines())
    assert named.pop(haproxy.PROGRAM) == "$(command -v vitray-haproxy)"
    assert {name: value.strip("'") for name, value in named.items()} == haproxy.SETTINGS
