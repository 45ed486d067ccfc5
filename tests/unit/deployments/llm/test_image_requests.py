"""Image files at a language model with its own tower: decoded within bounds, known until the first token."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from io import BytesIO
from threading import Event
from typing import Any

import pytest
from PIL import Image
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from configs.schema import AppConfig
from deployments.common.messages import Accepted, HttpRequest, ImageJob, ItemReference, ResponseHead, new_key
from deployments.llm import image_requests
from deployments.llm.image_requests import ImageRequests, PixelMemory
from deployments.llm.vllm_frontend import VllmFrontend
from deployments.vllm.compat import FirstTokenClock, first_token_clock
from deployments.vllm.references import DecodedImages, References
from tests.unit.deployments.samples import png

SIDE = 56
NUM_BYTES = 4 * SIDE**2


def file(colour: int, data: bytes | None = None) -> ImageJob:
    data = png(SIDE, SIDE, (colour, 0, 0)) if data is None else data
    return ImageJob(data, None, f"{colour:064}", "identity", (SIDE, SIDE), 4)


class Replica:
    """Around a stand-in for vLLM that answers with the images it finds by their keys, before its first token and after
    it."""

    def __init__(self, **encoder_replica: int) -> None:
        self.images: DecodedImages = {}
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.prefilled = 0
        app: Any = Starlette(routes=[Route("/v1/chat/completions", self._chat, methods=["POST"])])
        config = AppConfig.model_validate({"encoder": {"implementation": "none"}, "encoder_replica": encoder_replica})
        self.requests = ImageRequests(VllmFrontend(app, References()), self.images, config)

    async def _chat(self, request: Request) -> Response:
        keys = (await request.json())["keys"]
        found = [self.images[key] for key in keys]
        await self.goes_on.wait()
        clock = first_token_clock.get()
        assert clock is not None
        clock.tick()
        return JSONResponse(
            {"red": [[digest, image.getpixel((0, 0))[0]] for digest, image in found], "left": len(self.images)}  # type: ignore[index]
        )

    async def ask(self, references: list[ItemReference], files: list[ImageJob]) -> tuple[int, Any]:
        """Status and body."""
        body = json.dumps({"keys": [reference.key for reference in references]}).encode()
        http = HttpRequest("POST", "/v1/chat/completions", b"", [], body)
        clock = FirstTokenClock(on_first_token=self._count_prefill)
        accepted, head, *chunks = [p async for p in self.requests.answer(http, references, files, clock)]
        assert isinstance(accepted, Accepted)
        assert isinstance(head, ResponseHead)
        return head.status, json.loads(b"".join([head.body, *chunks]))  # type: ignore[list-item]

    def _count_prefill(self) -> None:
        self.prefilled += 1


def references_to(*items: int) -> list[ItemReference]:
    return [ItemReference(new_key(), item, f"image {at} of {len(items)}") for at, item in enumerate(items, 1)]


def test_images_are_there_by_their_keys_until_the_first_token() -> None:
    async def scenario() -> None:
        replica = Replica()
        status, body = await replica.ask(references_to(1, 0, 1), [file(10), file(20)])
        assert (status, replica.prefilled) == (200, 1)
        assert body == {"red": [[f"{colour:064}", colour] for colour in (20, 10, 20)], "left": 0}

    asyncio.run(scenario())


@pytest.mark.parametrize("is_first_later", [False, True])
def test_a_retry_that_comes_before_the_first_call_has_ended_keeps_its_images(is_first_later: bool) -> None:
    """Also if the first call's images were decoded after its own."""

    async def scenario() -> None:
        replica, references = Replica(), references_to(0)
        replica.goes_on.clear()
        first = asyncio.create_task(replica.ask(references, [file(10)]))
        while not replica.images:  # noqa: ASYNC110  # a stand-in has no event for it
            await asyncio.sleep(0)
        before = replica.images[references[0].key]
        retry = asyncio.create_task(replica.ask(references, [file(10)]))
        while replica.images[references[0].key] is before:  # noqa: ASYNC110
            await asyncio.sleep(0)
        if is_first_later:
            first, retry = retry, first
        first.cancel()
        await asyncio.wait([first])
        assert references[0].key in replica.images
        replica.goes_on.set()
        assert (await retry)[0] == 200
        assert replica.images == {}

    asyncio.run(scenario())


@pytest.mark.parametrize("data", [png(SIDE, SIDE)[:-30], b"GIF89a and no image"])
def test_a_file_that_cannot_be_decoded_is_a_400_that_names_it(data: bytes) -> None:
    async def scenario() -> None:
        replica = Replica(decode_memory_bytes=2 * NUM_BYTES)
        for _ in range(2):  # nothing is held after the first
            status, body = await replica.ask(references_to(0, 1), [file(10), file(20, data)])
            assert (status, body["error"]["code"]) == (400, "invalid_image")
            assert body["error"]["message"].startswith("image 2 of 2: ")
            assert (len(replica.images), replica.prefilled) == (0, 0)

    asyncio.run(scenario())


def test_a_request_over_the_memory_for_pixels_is_refused() -> None:
    async def scenario() -> None:
        replica = Replica(decode_memory_bytes=2 * NUM_BYTES - 1)
        status, body = await replica.ask(references_to(0, 1), [file(10), file(20)])
        assert (status, str(2 * NUM_BYTES) in body["error"]["message"]) == (413, True)
        status, _ = await replica.ask(references_to(0, 0), [file(10)])
        assert status == 200, "an image that is repeated is decoded once"

    asyncio.run(scenario())


def test_requests_wait_for_the_memory_of_others() -> None:
    async def scenario() -> None:
        replica = Replica(decode_memory_bytes=NUM_BYTES)
        replica.goes_on.clear()
        first, second = (asyncio.create_task(replica.ask(references_to(0), [file(10)])) for _ in range(2))
        while not replica.images:  # noqa: ASYNC110 - threads decode
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(replica.images) == 1
        replica.goes_on.set()
        assert [(await asked)[0] for asked in (first, second)] == [200, 200]
        assert replica.requests.num_in_flight == 0

    asyncio.run(scenario())


def test_pixels_are_freed_at_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory is counted until then: what holds them longer is held beyond the bound."""
    decoded: list[weakref.ref[Image.Image]] = []

    def load(data: bytes, **_: object) -> Image.Image:
        image = Image.open(BytesIO(data)).convert("RGB")
        decoded.append(weakref.ref(image))
        return image

    monkeypatch.setattr(image_requests, "load_rgb", load)

    async def scenario() -> None:
        replica, references = Replica(), references_to(0)
        body = json.dumps({"keys": [reference.key for reference in references]}).encode()
        http = HttpRequest("POST", "/v1/chat/completions", b"", [], body)
        answer = replica.requests.answer(http, references, [file(10)], FirstTokenClock())
        _, head = await anext(answer), await anext(answer)
        assert isinstance(head, ResponseHead)
        async with asyncio.timeout(10):  # the thread that decoded it may not have let go of it yet
            while any(image() is not None for image in decoded):
                gc.collect()
                await asyncio.sleep(0.01)
        assert len(decoded) == 1
        await answer.aclose()

    asyncio.run(scenario())


def test_files_are_given_up_once_they_are_decoded() -> None:
    """They were held until the last token, beyond every bound."""

    async def scenario() -> None:
        files = [file(10)]
        await Replica().ask(references_to(0), files)
        assert files == []

    asyncio.run(scenario())


def test_pixels_of_a_client_that_leaves_count_until_threads_have_decoded_them(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding, goes_on = Event(), Event()

    def load(data: bytes, **_: object) -> Image.Image:
        decoding.set()
        goes_on.wait()
        return Image.open(BytesIO(data))

    monkeypatch.setattr(image_requests, "load_rgb", load)

    async def scenario() -> None:
        replica = Replica(decode_memory_bytes=4 * NUM_BYTES, decode_workers=1)
        leaves = asyncio.create_task(replica.ask(references_to(0, 1), [file(10), file(20)]))
        await asyncio.to_thread(decoding.wait)
        leaves.cancel()
        await asyncio.wait([leaves])
        asked = asyncio.create_task(replica.ask(references_to(0, 1, 2), [file(10), file(20), file(30)]))
        await asyncio.sleep(0.1)
        assert not replica.images
        waiting = replica.requests._memory._used
        goes_on.set()
        assert (waiting, (await asked)[0]) == (2 * NUM_BYTES, 200)
        assert replica.requests._memory._used == 0

    asyncio.run(scenario())


def test_a_client_that_leaves_gives_back_its_turn() -> None:
    async def scenario() -> None:
        memory = PixelMemory(10)
        await memory.acquire(8)
        large, small = (asyncio.create_task(memory.acquire(each)) for each in (5, 2))
        await asyncio.sleep(0)
        assert not small.done(), "in order of arrival"
        large.cancel()
        await small
        memory.release(8)
        await memory.acquire(8)

    asyncio.run(scenario())
