"""Servers that attack whoever fetches from them: each gets through to a naive fetch, and not to ours.

After every attack a good image is fetched by the same fetcher.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from configs.schema import FetchConfig
from deployments.ingress.fetch.fetcher import MediaBusyError, MediaFetcher
from deployments.ingress.http.image_parts import MediaError, MediaTooLargeError
from tests.hostile import attack_server as attacks
from tests.hostile.attack_server import IMAGE, METADATA, OTHER_PUBLIC, PUBLIC, SECRET, MappedNetwork, Names
from tests.hostile.naive import naive_fetch
from tests.unit.deployments.ingress.fetch.loopback import Respond, answer

MAX_BYTES = 200_000
TIMEOUT_S = 1.0
QUICK = FetchConfig(http=True, timeout_s=TIMEOUT_S)
"""Where the limit that is tested is the time."""

PATIENT_S = 60.0
CONFIG = FetchConfig(http=True, timeout_s=PATIENT_S)
"""Where it is another: no pause of this machine is as long."""

URL = "http://a.example/image.png"


def names(*answers: list[str]) -> Names:
    """`a.example` with these answers one after the other; good.example is the good server."""
    return Names(a_example=answers or [[PUBLIC]], good_example=[[OTHER_PUBLIC]])


async def refused(
    url: str, network: MappedNetwork, resolve: Names, kind: type[MediaError] = MediaError, config: FetchConfig = CONFIG
) -> str:
    """What our fetcher says; it fetches from the good server then, and leaves no connection open."""
    fetcher = MediaFetcher(config, max_bytes=MAX_BYTES, resolve=resolve, network=network)
    with pytest.raises(kind) as error:
        await fetcher.fetch(url)
    assert await fetch_good(fetcher) == IMAGE
    await fetcher.close()
    return str(error.value)


async def fetch_good(fetcher: MediaFetcher, client: str = "") -> bytes:
    """The good server's file, asked for again where this machine paused for longer than the fetcher's time limit."""
    for _ in range(10):
        try:
            return await fetcher.fetch("http://good.example/", client=client)
        except MediaError as error:
            if "took longer" not in str(error):
                raise
    raise AssertionError("the good server could not be reached in ten tries")


def test_a_name_that_changes_its_address_after_the_check() -> None:
    """DNS rebinding: the first answer is public, the second the metadata service of a cloud."""

    async def scenario() -> None:
        async with attacks.network(public=attacks.good, other=attacks.good, metadata=attacks.secret) as network:
            rebinding = names([PUBLIC], [METADATA])
            assert await naive_fetch(URL, resolve=rebinding, network=network) == SECRET

            rebinding = names([PUBLIC], [METADATA])
            fetcher = MediaFetcher(CONFIG, max_bytes=MAX_BYTES, resolve=rebinding, network=network)
            network.connected.clear()
            assert await fetcher.fetch(URL) == IMAGE
            assert (rebinding.asked, network.connected) == (["a.example"], [PUBLIC])
            await fetcher.close()
            assert "not public" in await refused(URL, network, names([METADATA]))
            assert "not public" in await refused(URL, network, names([PUBLIC, METADATA]))
            assert METADATA not in network.connected

    asyncio.run(scenario())


def test_a_kept_connection_is_not_a_way_around_the_check() -> None:
    """The second fetch goes over the connection of the first, whatever the name's address is by then."""

    async def scenario() -> None:
        async with attacks.network(public=attacks.good, other=attacks.good, metadata=attacks.secret) as network:
            rebinding = names([PUBLIC], [METADATA])
            fetcher = MediaFetcher(CONFIG, max_bytes=MAX_BYTES, resolve=rebinding, network=network)
            assert [await fetcher.fetch(URL) for _ in range(3)] == [IMAGE] * 3
            assert network.connected == [PUBLIC]
            with pytest.raises(MediaError, match="not public"):
                await fetcher.fetch("https://a.example/")  # another port, another connection
            await fetcher.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("location", "address"),
    [
        (f"http://{METADATA}/latest/meta-data", METADATA),
        ("http://127.0.0.1/secret", "127.0.0.1"),
        ("//127.0.0.1/secret", "127.0.0.1"),
        ("http://inner.example/", METADATA),
    ],
)
def test_a_redirect_to_where_strangers_cannot_go(location: str, address: str) -> None:
    async def scenario() -> None:
        resolve = Names(a_example=[[PUBLIC]], good_example=[[OTHER_PUBLIC]], inner_example=[[METADATA]])
        servers = {"metadata" if address == METADATA else "local": attacks.secret}
        redirecting = attacks.redirect(location)
        async with attacks.network(public=redirecting, other=attacks.good, **servers) as network:
            assert await naive_fetch(URL, resolve=resolve, network=network) == SECRET
            network.connected.clear()
            assert "not public" in await refused(URL, network, resolve)
            assert network.connected == [PUBLIC, OTHER_PUBLIC]

    asyncio.run(scenario())


def test_redirects_without_end() -> None:
    async def scenario() -> None:
        async with attacks.network(public=attacks.endless_redirects, other=attacks.good) as network:
            with pytest.raises(ValueError, match="30 redirects"):
                await naive_fetch(URL + "/0", resolve=names(), network=network)
            assert "redirects more than 3 times" in await refused(URL + "/0", network, names())

    asyncio.run(scenario())


def test_a_redirect_answered_in_two_ways() -> None:
    """Two locations: which of them a client takes differs from one to the next."""

    async def scenario() -> None:
        both = answer(b"", "Location: http://good.example/", f"Location: http://{METADATA}/", status="302 Found")
        async with attacks.network(public=both, other=attacks.good, metadata=attacks.secret) as network:
            assert await naive_fetch(URL, resolve=names(), network=network) == SECRET
            assert "status 302" in await refused(URL, network, names())

    asyncio.run(scenario())


async def still_going(fetching: Awaitable[bytes]) -> bool:
    """Whether a fetch takes several times as long as ours may."""
    try:
        await asyncio.wait_for(fetching, 3 * TIMEOUT_S)
    except TimeoutError:
        return True
    return False


@pytest.mark.parametrize("attack", ["drip", "drip_header", "endless_interim"])
def test_a_server_that_takes_its_time(attack: str) -> None:
    async def scenario() -> None:
        async with attacks.network(public=getattr(attacks, attack), other=attacks.good) as network:
            assert await still_going(naive_fetch(URL, resolve=names(), network=network))
            assert (
                await refused(URL, network, names(), config=QUICK)
                == f"fetching the file took longer than {TIMEOUT_S:g} s"
            )

    asyncio.run(scenario())


def test_a_server_that_never_answers() -> None:
    async def silent(_: str, __: asyncio.StreamWriter) -> None:
        await asyncio.sleep(100)

    async def scenario() -> None:
        async with attacks.network(public=silent, other=attacks.good) as network:
            assert await still_going(naive_fetch(URL, resolve=names(), network=network))
            assert "took longer" in await refused(URL, network, names(), config=QUICK)

    asyncio.run(scenario())


def test_a_name_server_that_never_answers() -> None:
    """The look-up cannot be cancelled, but it does not keep others from theirs."""

    async def scenario() -> None:
        asked, answered = threading.Event(), threading.Event()

        def slow(host: str, port: int) -> list[str]:
            if host == "a.example":
                asked.set()
                answered.wait(PATIENT_S)
            return [OTHER_PUBLIC]

        async with attacks.network(other=attacks.good) as network:
            fetcher = MediaFetcher(QUICK, max_bytes=MAX_BYTES, resolve=slow, network=network)
            with pytest.raises(MediaError, match="took longer"):
                await fetcher.fetch(URL)
            await fetcher.close()
            fetcher = MediaFetcher(CONFIG, max_bytes=MAX_BYTES, resolve=slow, network=network)
            asked.clear()
            waiting = asyncio.ensure_future(fetcher.fetch(URL))
            assert await asyncio.to_thread(asked.wait, PATIENT_S)
            assert await fetcher.fetch("http://good.example/") == IMAGE
            assert not waiting.done()
            answered.set()
            assert await waiting == IMAGE
            await fetcher.close()

    asyncio.run(scenario())


async def peak_bytes(fetching: Callable[[], Awaitable[object]]) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        await fetching()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("attack", "told", "kind"),
    [
        (attacks.endless, f"more than {MAX_BYTES} bytes", MediaTooLargeError),
        (attacks.gzip_bomb(20_000_000), "content encoding", MediaError),
    ],
    ids=["endless", "gzip bomb"],
)
def test_more_bytes_than_allowed(attack: Respond, told: str, kind: type[MediaError]) -> None:
    """20 KB on the wire become 20 MB; a body without end becomes as large as memory is."""

    async def scenario() -> None:
        many = 20_000_000
        async with attacks.network(public=attack, other=attacks.good) as network:
            assert len(await naive_fetch(URL, resolve=names(), network=network, max_bytes=many - 1)) >= many
            said = []

            async def ours() -> None:
                said.append(await refused(URL, network, names(), kind))

            assert await peak_bytes(ours) < many / 2
            assert told in said[0]

    asyncio.run(scenario())


def test_a_header_without_end() -> None:
    async def scenario() -> None:
        async with attacks.network(public=attacks.endless_header, other=attacks.good) as network:
            assert await refused(URL, network, names()) == "the file could not be fetched"

    asyncio.run(scenario())


def test_a_body_in_crumbs() -> None:
    """A thousand times the work for each byte, on the event loop that every request shares."""

    async def scenario() -> None:
        async with attacks.network(public=attacks.crumbs, other=attacks.good) as network:
            crumbs = await naive_fetch(URL, resolve=names(), network=network, max_bytes=20_000)
            assert len(crumbs) > 20_000
            assert "too small pieces" in await refused(URL, network, names())

    asyncio.run(scenario())


def test_lengths_that_are_not_true() -> None:
    async def scenario() -> None:
        for attack in (
            attacks.wrong_length(100, b"half", close=True),
            attacks.wrong_length(10**12, bytes(MAX_BYTES), close=True),
        ):
            async with attacks.network(public=attack, other=attacks.good) as network:
                assert await refused(URL, network, names()) == "the file could not be fetched"
        endless = attacks.wrong_length(10**12, bytes(2 * MAX_BYTES), close=False)
        async with attacks.network(public=endless, other=attacks.good) as network:
            await refused(URL, network, names(), MediaTooLargeError)

    asyncio.run(scenario())


def test_an_answer_that_nobody_asked_for_reaches_no_other_host() -> None:
    """It follows the first on a connection that is kept. A host may lie about its own images, not about another's, be
    it at the same address."""

    async def scenario() -> None:
        more = IMAGE + b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged"
        forging = attacks.wrong_length(len(IMAGE), more, close=False)

        async def respond(head: str, writer: asyncio.StreamWriter) -> None:
            await (forging if "Host: a.example" in head else attacks.good)(head, writer)

        async with attacks.network(public=respond) as network:
            resolve = Names(a_example=[[PUBLIC]], good_example=[[PUBLIC]])
            fetcher = MediaFetcher(CONFIG, max_bytes=MAX_BYTES, resolve=resolve, network=network)
            fetched = [await fetcher.fetch(url) for url in (URL, "http://good.example/", URL, "http://good.example/")]
            assert fetched == [IMAGE, IMAGE, b"forged", IMAGE]
            await fetcher.close()

    asyncio.run(scenario())


def test_a_client_that_fetches_too_much_holds_up_nobody_else() -> None:
    """All of its fetches hang; another client's go through, and so do its own when its time is over."""

    async def scenario() -> None:
        limits = {"max_concurrent": 6, "max_concurrent_per_client": 4}
        async with attacks.network(public=attacks.drip, other=attacks.good) as network:
            fetcher = MediaFetcher(
                CONFIG.model_copy(update=limits), max_bytes=MAX_BYTES, resolve=names(), network=network
            )
            hanging = [asyncio.create_task(fetcher.fetch(URL, client="greedy")) for _ in range(40)]
            while network.connected.count(PUBLIC) < 4:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.01)
            for _ in range(10):
                assert await fetcher.fetch("http://good.example/", client="other") == IMAGE
            assert not any(task.done() for task in hanging)
            assert network.connected.count(PUBLIC) == 4
            for task in hanging:
                task.cancel()
            await asyncio.wait(hanging)
            await fetcher.close()

            fetcher = MediaFetcher(
                QUICK.model_copy(update=limits), max_bytes=MAX_BYTES, resolve=names(), network=network
            )
            fetches = [fetcher.fetch(URL, client="greedy") for _ in range(40)]
            ends = await asyncio.gather(*fetches, return_exceptions=True)
            assert all(isinstance(end, MediaError) for end in ends)
            assert sum(isinstance(end, MediaBusyError) for end in ends) >= 40 - 2 * 4
            assert await fetch_good(fetcher, client="greedy") == IMAGE
            assert len(fetcher._client_slots) <= 1, "clients who have gone are forgotten"
            await fetcher.close()

    asyncio.run(scenario())


def test_nothing_is_left_open() -> None:
    """A hundred attacks of every kind leave as many descriptors as there were."""

    def descriptors() -> int:
        gc.collect()
        return len(list(Path(f"/proc/{os.getpid()}/fd").iterdir()))

    async def scenario() -> None:
        quick = QUICK.model_copy(update={"timeout_s": 0.1})
        kinds: list[Any] = [attacks.drip, attacks.endless, attacks.endless_header, attacks.crumbs]
        for attack in [*kinds, attacks.gzip_bomb(10**6)]:
            async with attacks.network(public=attack, other=attacks.good) as network:
                fetcher = MediaFetcher(quick, max_bytes=MAX_BYTES, resolve=names(), network=network)
                tasks = [fetcher.fetch(URL, client=str(number)) for number in range(20)]
                assert all(isinstance(end, MediaError) for end in await asyncio.gather(*tasks, return_exceptions=True))
                await fetcher.close()
        await asyncio.sleep(0.2)

    asyncio.run(scenario())
    before = descriptors()
    asyncio.run(scenario())
    assert descriptors() <= before
