"""Fetching over HTTP: redirects, statuses, limits in bytes and in time."""

from __future__ import annotations

import asyncio
import gzip

import pytest

from configs.schema import FetchConfig
from deployments.ingress.http.image_parts import MediaTooLargeError
from tests.unit.deployments.ingress.fetch.loopback import MAX_BYTES, OPEN, answer, fetching, redirects, refusal, serving


def test_the_body_is_fetched() -> None:
    async def scenario() -> None:
        async with serving(answer(b"image")) as server, fetching() as fetcher:
            assert await fetcher.fetch(f"{server.url}/a.png?size=1#part") == b"image"
            (request,) = server.requests
            assert request.startswith("GET /a.png?size=1 HTTP/1.1\r\n")

    asyncio.run(scenario())


def test_data_urls_need_no_fetching() -> None:
    async def scenario() -> None:
        async with fetching(FetchConfig()) as fetcher:
            assert await fetcher.fetch("data:;base64,QUJD") == b"ABC"
            with pytest.raises(MediaTooLargeError):
                await fetcher.fetch("data:;base64," + "A" * 2 * MAX_BYTES)

    asyncio.run(scenario())


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
def test_redirects_are_followed_relative_ones_too(status: str) -> None:
    async def scenario() -> None:
        chain = {"/a/b.png": "../c.png?x", "/c.png?x": "//127.0.0.1:{port}/d.png", "/d.png": "/e.png"}
        async with serving(redirects(chain, status=status)) as server, fetching() as fetcher:
            chain["/c.png?x"] = chain["/c.png?x"].format(port=server.port)
            assert await fetcher.fetch(f"{server.url}/a/b.png") == b"image"
            assert [request.split()[1] for request in server.requests] == ["/a/b.png", "/c.png?x", "/d.png", "/e.png"]

    asyncio.run(scenario())


def test_redirects_end_at_the_limit() -> None:
    async def scenario() -> None:
        async with serving(redirects({"/": "/"})) as server:
            assert "redirects more than 3 times" in await refusal(f"{server.url}/")
            assert len(server.requests) == 1 + 3
            none = OPEN.model_copy(update={"max_redirects": 0})
            assert "redirects more than 0 times" in await refusal(f"{server.url}/", none)

    asyncio.run(scenario())


def test_a_redirect_with_spaces_is_followed() -> None:
    async def scenario() -> None:
        async with serving(redirects({"/": "/a cat.png"})) as server, fetching() as fetcher:
            assert await fetcher.fetch(f"{server.url}/") == b"image"
            assert server.requests[1].startswith("GET /a%20cat.png ")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("location", "told"),
    [
        ("file:///etc/passwd", "http: and https: addresses only"),
        ("data:image/png;base64,AAAA", "http: and https: addresses only"),
        ("ftp://127.0.0.1/a.png", "http: and https: addresses only"),
        ("http://user:password@127.0.0.1/", "must not carry credentials"),
        ("http://127.0.0.1:99999/", "port is 99999"),
        ("http://[::1/", "could not be fetched"),
        ("http://127.0.0.1 .example/", "could not be fetched"),
        ("http://exa\\mple/", "backslash"),
    ],
)
def test_a_redirect_is_checked_as_the_url_was(location: str, told: str) -> None:
    async def scenario() -> None:
        async with serving(redirects({"/": location})) as server:
            assert told in await refusal(f"{server.url}/")
            assert len(server.requests) == 1

    asyncio.run(scenario())


def test_a_redirect_to_a_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first hop's name passes as public; the server it stands for sends the client on to 127.0.0.1."""

    async def scenario() -> None:
        monkeypatch.setattr(
            "deployments.ingress.fetch.pinned_network.is_public", lambda address: str(address) == "127.0.0.2"
        )
        async with (
            serving(answer(b"secret")) as inner,
            serving(redirects({"/": f"{inner.url}/secret"}), host="127.0.0.2") as outer,
        ):
            assert "not public" in await refusal(f"http://127.0.0.2:{outer.port}/", FetchConfig(http=True))
            assert (len(outer.requests), inner.connections) == (1, 0)

    asyncio.run(scenario())


def test_a_redirect_out_of_the_allowed_domains_is_refused() -> None:
    async def scenario() -> None:
        async with (
            serving(answer(b"other")) as other,
            serving(redirects({"/": f"http://localhost:{other.port}/"})) as first,
        ):
            config = OPEN.model_copy(update={"allowed_domains": ("127.0.0.1",)})
            assert "not on this server's list" in await refusal(f"{first.url}/", config)
            assert (len(first.requests), other.connections) == (1, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize("status", ["204 No Content", "206 Partial", "304 Not Modified", "404 Not Found", "500 Oops"])
def test_another_status_is_told(status: str) -> None:
    async def scenario() -> None:
        async with serving(answer(b"", status=status)) as server:
            assert await refusal(f"{server.url}/") == f"fetching the file gave status {status[:3]}"

    asyncio.run(scenario())


def test_a_redirect_without_a_location_is_a_status() -> None:
    async def scenario() -> None:
        async with serving(answer(b"", status="302 Found")) as server:
            assert "status 302" in await refusal(f"{server.url}/")

    asyncio.run(scenario())


def test_an_endless_body_is_cut_off_at_the_limit() -> None:
    async def scenario() -> None:
        written = 0

        async def endless(_: str, writer: asyncio.StreamWriter) -> None:
            nonlocal written
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                writer.write(b"x" * 1000)
                written += 1000
                await writer.drain()

        async with serving(endless) as server:
            told = await refusal(f"{server.url}/", kind=MediaTooLargeError)
            assert f"more than {MAX_BYTES} bytes" in told
            assert written < 100 * 2**20, "what the sockets buffer, and no more"

    asyncio.run(scenario())


@pytest.mark.parametrize(("size", "fits"), [(MAX_BYTES, True), (MAX_BYTES + 1, False)])
def test_the_limit_is_exact(size: int, fits: bool) -> None:
    async def scenario() -> None:
        async with serving(answer(b"x" * size)) as server:
            if fits:
                async with fetching() as fetcher:
                    assert len(await fetcher.fetch(f"{server.url}/")) == size
            else:
                await refusal(f"{server.url}/", kind=MediaTooLargeError)

    asyncio.run(scenario())


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, gzip", "GZIP"])
def test_a_compressed_body_is_refused_unread(encoding: str) -> None:
    """64 KiB of gzip unpack to 64 MB in one piece, and of gzip within gzip to far more: nothing may be unpacked."""
    bomb = gzip.compress(b"\0" * 5_000_000)
    assert len(bomb) < MAX_BYTES

    async def scenario() -> None:
        async with serving(answer(bomb, f"Content-Encoding: {encoding}")) as server:
            assert "content encoding" in await refusal(f"{server.url}/")
            assert "accept-encoding: identity\r\n" in server.requests[0].lower()

    asyncio.run(scenario())


@pytest.mark.parametrize("encoding", ["identity", "Identity", ""])
def test_identity_is_no_encoding(encoding: str) -> None:
    async def scenario() -> None:
        async with serving(answer(b"image", f"Content-Encoding: {encoding}")) as server, fetching() as fetcher:
            assert await fetcher.fetch(f"{server.url}/") == b"image"

    asyncio.run(scenario())


def test_a_server_that_drips_is_timed_out_as_a_whole() -> None:
    """Each byte comes well within a timeout for reading; the time counts from the start, redirects included."""

    async def scenario() -> None:
        async def drip(_: str, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.02)

        async with serving(drip) as server:
            config = OPEN.model_copy(update={"timeout_s": 0.2})
            assert await refusal(f"{server.url}/", config) == "fetching the file took longer than 0.2 s"

    asyncio.run(scenario())


def test_a_server_that_says_nothing_is_timed_out() -> None:
    async def scenario() -> None:
        async def silent(_: str, __: asyncio.StreamWriter) -> None:
            await asyncio.sleep(10)

        async with serving(silent) as server:
            told = await refusal(f"{server.url}/", OPEN.model_copy(update={"timeout_s": 0.1}))
            assert told in ("fetching the file took longer than 0.1 s", "the file could not be fetched")

    asyncio.run(scenario())


@pytest.mark.parametrize("garbage", [b"", b"\r\n\r\n", b"SSH-2.0-OpenSSH_9\r\n", b"HTTP/1.1 abc\r\n\r\n"])
def test_what_speaks_no_http_could_not_be_fetched(garbage: bytes) -> None:
    async def scenario() -> None:
        async def respond(_: str, writer: asyncio.StreamWriter) -> None:
            writer.write(garbage)
            await writer.drain()
            writer.close()

        async with serving(respond) as server:
            assert await refusal(f"{server.url}/") == "the file could not be fetched"

    asyncio.run(scenario())


def test_a_body_that_breaks_off_is_refused() -> None:
    async def scenario() -> None:
        async def respond(_: str, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
            await writer.drain()
            writer.close()

        async with serving(respond) as server:
            assert await refusal(f"{server.url}/") == "the file could not be fetched"

    asyncio.run(scenario())


def test_nobody_listens() -> None:
    async def scenario() -> None:
        async with serving(answer(b"")) as server:
            port = server.port
        assert await refusal(f"http://127.0.0.1:{port}/") == "the file could not be fetched"

    asyncio.run(scenario())


def test_fetches_at_once_are_bounded() -> None:
    async def scenario() -> None:
        at_once = most = 0

        async def slow(head: str, writer: asyncio.StreamWriter) -> None:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0.02)
            at_once -= 1
            await answer(b"image")(head, writer)

        async with serving(slow) as server, fetching(OPEN.model_copy(update={"max_concurrent": 2})) as fetcher:
            assert await asyncio.gather(*[fetcher.fetch(f"{server.url}/") for _ in range(6)]) == [b"image"] * 6
        assert most == 2

    asyncio.run(scenario())
