"""Published attacks on servers like this one: each works on code as it is often written, and not here.

Those on fetching (rebinding, redirects, …), on digests and on headers have files of their own; these are the rest.
"""

from __future__ import annotations

import asyncio
import base64
import io
import os
import pickle
import re
import warnings
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
import urllib3
from PIL import Image

from configs.schema import FetchConfig
from deployments.common.messages import ImageRefused, ResponseHead
from deployments.encoder_replica.decode.pool import DecodePool
from deployments.ingress.fetch.fetcher import MediaFetcher
from deployments.ingress.http.image_parts import MediaError
from encoder.images.size import ImageError, image_grid, read_header
from tests.hostile import attack_server as attacks
from tests.hostile.attack_server import PUBLIC, SECRET, Names
from tests.hostile.files import encoded, picture
from tests.hostile.ingress_server import CHAT, PICTURE, TEXT, asked, started
from tests.hostile.naive import naive_fetch
from tests.unit.deployments.llm.stand_in_replica import encoded as embedding
from tests.unit.deployments.llm.stand_in_replica import header, place, replica
from tests.unit.deployments.llm.stand_in_replica import request as chat_request
from tests.unit.deployments.samples import RULES, at_once
from tests.unit.deployments.stand_ins import Pieces, StandIns


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def test_a_backslash_that_two_parsers_read_differently() -> None:
    """CVE-2026-24779: one parser is asked whether the host is allowed, another one connects."""
    url = "http://127.0.0.1\\@a.example/secret"
    assert (urlsplit(url).hostname, urllib3.util.parse_url(url).host) == ("a.example", "127.0.0.1")

    async def naive(network: Any, resolve: Names) -> bytes:
        if resolve(str(urlsplit(url).hostname), 80) != [PUBLIC]:
            raise ValueError("not public")
        connected = urllib3.util.parse_url(url)
        stream = await network.connect_tcp(connected.host, 80)
        await stream.write(f"GET / HTTP/1.1\r\nHost: {connected.host}\r\n\r\n".encode())
        answer: bytes = await stream.read(1000)
        return answer

    async def scenario() -> None:
        async with attacks.network(public=attacks.good, local=attacks.secret) as network:
            resolve = Names(a_example=[[PUBLIC]])
            assert SECRET in await naive(network, resolve)
            network.connected.clear()
            fetcher = MediaFetcher(FetchConfig(http=True), max_bytes=10**6, resolve=resolve, network=network)
            with pytest.raises(MediaError, match="backslash"):
                await fetcher.fetch(url)
            assert network.connected == []
            assert await naive_fetch("http://a.example/", resolve=resolve, network=network) == attacks.IMAGE
            await fetcher.close()

    asyncio.run(scenario())


class Code:
    """What runs when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self._mark),)


def test_pickles_from_clients_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CVE-2025-62164, CVE-2026-3059, CVE-2026-3060: embeddings through torch.load, messages through pickle."""
    file = io.BytesIO()
    torch.save(Code(tmp_path / "by torch"), file)
    torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    pickle.loads(pickle.dumps(Code(tmp_path / "by pickle")))
    assert sorted(found.name for found in tmp_path.iterdir()) == ["by pickle", "by torch"]

    payloads = []
    for kind in ("torch", "pickle"):
        mark = Code(tmp_path / f"{kind} here")
        file = io.BytesIO()
        torch.save(mark, file)
        payloads.append(file.getvalue() if kind == "torch" else pickle.dumps(mark))
    bodies: list[tuple[str, Any]] = []
    for payload in payloads:
        text = base64.b64encode(payload).decode()
        parts = [
            {"type": "image_embeds", "image_embeds": text},
            {"type": "image_embeds", "image_embeds": {"image_embeds": text, "image_grid_thw": text}},
            {"type": "audio_embeds", "audio_embeds": text},
            {"type": "image_url", "image_url": {"url": data_url(payload)}},
        ]
        bodies += [(CHAT, {"messages": [{"role": "user", "content": [part]}]}) for part in parts]
        bodies += [("/v1/completions", {"prompt_embeds": text}), (CHAT, {**TEXT, "prompt_embeds": text})]
    stand_ins = StandIns()
    ingress = started(monkeypatch, stand_ins, mode="none")
    answers = asked(ingress, *({"url": path, "json": body} for path, body in bodies), {"json": TEXT})
    assert [answer.status_code for answer in answers] == [400] * len(bodies) + [200]
    assert len(stand_ins.requests) == 1, "that of the good request"
    assert sorted(found.name for found in tmp_path.iterdir()) == ["by pickle", "by torch"]


def test_an_image_of_one_pixel() -> None:
    """CVE-2026-22773: from a shape of (1, 1, 3) the place of the colours cannot be told, and a guess ends the engine.

    Here nothing is guessed: pixels have their colours last, from the decoder on.
    """

    def guessed_channels(shape: tuple[int, ...]) -> int:
        """As image libraries do: colours come first where the first side could be their number."""
        return shape[0] if shape[0] in (1, 3) else shape[-1]

    pixel = encoded(picture(1, 1), "PNG")
    assert guessed_channels(np.asarray(Image.open(io.BytesIO(pixel)).convert("RGB")).shape) == 1

    async def scenario() -> None:
        pool = DecodePool(RULES, workers=1, max_pixels=10**6, timeout_s=60, shm_bytes=2**26, resize=True)
        try:
            for size in ((1, 1), (1, 3), (3, 1), (3, 3)):
                pixels = await pool.decode(encoded(picture(*size), "PNG"), None, size)
                assert pixels.grid_thw == image_grid(*size, RULES)
        finally:
            pool.workers.stop()

    asyncio.run(scenario())


def test_a_decoders_words_do_not_reach_clients() -> None:
    """CVE-2026-22778: Pillow names the object that it could not read by its address on the heap."""
    file = b"this is no image"
    with pytest.raises(OSError, match=r"0x[0-9a-f]{6,}"):
        Image.open(io.BytesIO(file))
    with pytest.raises(ImageError) as told:
        read_header(file)
    assert not re.search(r"0x|object|BytesIO", str(told.value))


def test_a_decompression_bomb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some kilobytes that become eighty megabytes in whoever decodes them to see how large they are."""
    bomb = encoded(Image.new("L", (9000, 9000)), "PNG")
    assert len(bomb) < 200_000
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        assert len(Image.open(io.BytesIO(bomb)).tobytes()) == 81_000_000
    stand_ins = StandIns()
    ingress = started(monkeypatch, stand_ins, mode="none")
    ingress._limits = ingress._limits.model_copy(update={"max_image_pixels": 4_000_000})
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("decoded at the door"))
    parts = [{"type": "image_url", "image_url": {"url": data_url(bomb)}}]
    refused, good = asked(ingress, {"json": {"messages": [{"role": "user", "content": parts}]}}, {"json": TEXT})
    assert (refused.status_code, good.status_code) == (400, 200)
    assert "81000000 pixels, the limit is 4000000" in refused.json()["error"]["message"]
    assert stand_ins.encodings == []


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_an_image_that_could_not_be_encoded_is_never_left_out(lost: int) -> None:
    """One of three is refused by its encoder: a server that gathers what it can answers 200 about the other two."""

    def encoded() -> list[Any]:
        """Each is offered to one reader."""
        images: list[Any] = [embedding(float(number + 1)) for number in range(3)]
        images[lost] = ImageRefused("truncated or corrupt")
        return images

    gathered = [image for image in encoded() if not isinstance(image, ImageRefused)]
    places = [place(number, f"image {number + 1} of 3") for number in range(3)]

    async def pieces(of: list[Any], there: list[Any], headers: list[Any]) -> list[Any]:
        llm = replica()
        return [piece async for piece in llm.handle(chat_request(*there), there, headers, at_once(*of))]

    headers = [header(float(number + 1)) for number in range(3)]
    kept = [header for number, header in enumerate(headers) if number != lost]
    _, naive, *_ = asyncio.run(pieces(gathered, [place(number) for number in range(2)], kept))
    assert naive.status == 200
    _, head, *body = asyncio.run(pieces(encoded(), places, headers))
    assert isinstance(head, ResponseHead)
    assert head.status == 400
    assert f"image {lost + 1} of 3: truncated or corrupt".encode() in b"".join(body)


def test_an_encoder_that_fails_is_never_answered_with_200(monkeypatch: pytest.MonkeyPatch) -> None:
    """The language model finds that it failed, and the ingress why."""
    failing = Pieces(RuntimeError("out of memory at 0x7f0000000000"))
    ingress = started(monkeypatch, StandIns(failing), mode="none")
    broken, good = asked(ingress, {"json": PICTURE}, {"json": TEXT})
    assert broken.status_code == 500
    assert "0x" not in broken.text
    assert good.status_code == 200
