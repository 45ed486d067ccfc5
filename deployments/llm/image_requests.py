"""Requests at an LLM replica whose engine runs its own tower: decode the image files, submit the request to vLLM with
references to the pixels, stream the answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, aclosing, asynccontextmanager
from functools import partial

from PIL.Image import Image

from configs.schema import AppConfig
from deployments.common.api_error import ApiError, conversation_field, error_head_and_body
from deployments.common.messages import Accepted, HttpRequest, ImageJob, ItemReference, Piece
from deployments.llm.received import ReceivedEmbeddings
from deployments.llm.streams import PrefetchedStream
from deployments.llm.vllm_frontend import VllmFrontend
from deployments.telemetry import tracing
from deployments.vllm.compat import FirstTokenClock
from deployments.vllm.references import DecodedImages, drop_holder
from encoder.images.load import ImageError, load_rgb

BYTES_PER_PIXEL = 4
"""Of an RGB image in Pillow."""


class PixelMemory:
    """Bound on the bytes of decoded images. Requests wait in order of arrival. Used on one event loop."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._used = 0
        self._turn = asyncio.Lock()
        self._released = asyncio.Event()

    async def acquire(self, num_bytes: int) -> None:
        """`num_bytes` must not exceed the bound."""
        async with self._turn:
            while self._used + num_bytes > self.num_bytes:
                self._released.clear()
                await self._released.wait()
            self._used += num_bytes

    def release(self, num_bytes: int) -> None:
        self._used -= num_bytes
        self._released.set()


class ImageRequests:
    """Requests with images of one engine that runs its own tower. Used on its event loop."""

    def __init__(self, frontend: VllmFrontend, images: DecodedImages, config: AppConfig) -> None:
        """`images`: those that the application of `frontend` knows."""
        self._frontend = frontend
        self._images = images
        self._max_pixels = config.ingress.max_image_pixels
        self._formats = config.ingress.image_formats
        self._threads = ThreadPoolExecutor(config.encoder_replica.decode_workers, thread_name_prefix="decode")
        self._memory = PixelMemory(config.encoder_replica.decode_memory_bytes)
        self._holders: Counter[str] = Counter()
        """Calls that hold each key of `images`."""
        self.num_in_flight = 0
        """Requests that vLLM is answering."""

    async def answer(
        self,
        request: HttpRequest,
        references: Sequence[ItemReference],
        files: list[ImageJob],
        clock: FirstTokenClock,
    ) -> AsyncGenerator[Piece, None]:
        """Yields Accepted once the images are decoded, then a ResponseHead, then body chunks; the client's error if an
        image cannot be decoded. `files`: the images that `references` name by index; emptied once they are decoded."""
        request = dataclasses.replace(request, headers=tracing.inject_trace(request.headers))
        received = ReceivedEmbeddings(clock)
        try:
            async with self._decoded(references, files, clock, param=conversation_field(request.path)):
                received.mark_complete()
                answer = self._frontend.answer(request, references, (), received)
                self.num_in_flight += 1
                try:
                    async with aclosing(PrefetchedStream(answer)) as stream, aclosing(stream.read()) as pieces:
                        yield Accepted()
                        async for piece in pieces:
                            yield piece
                finally:
                    self.num_in_flight -= 1
        except ApiError as refused:
            yield Accepted()
            head, body = error_head_and_body(refused)
            yield head
            yield body

    @asynccontextmanager
    async def _decoded(
        self, references: Sequence[ItemReference], files: list[ImageJob], clock: FirstTokenClock, *, param: str
    ) -> AsyncIterator[None]:
        """Decodes the images, and makes them known to vLLM until the first token. Raises ApiError 400 or 413."""
        num_bytes = sum(BYTES_PER_PIXEL * width * height for width, height in (file.size for file in files))
        if num_bytes > (limit := self._memory.num_bytes):
            raise ApiError(
                413, f"the images have {num_bytes} bytes once they are decoded, the limit is {limit}", param=param
            )
        await self._memory.acquire(num_bytes)
        with ExitStack() as held:
            held.callback(self._memory.release, num_bytes)
            decoding = [*map(self._decode, files)]
            try:
                images = await asyncio.gather(*map(asyncio.wrap_future, decoding), return_exceptions=True)
            except asyncio.CancelledError:
                _close_after(held.pop_all(), decoding)
                raise
            for reference in references:
                image = images[reference.item]
                if isinstance(image, ImageError):
                    refusal = f"{reference.label}: {image}"
                    raise ApiError(400, refusal, param=param, code="invalid_image") from image
                if isinstance(image, BaseException):
                    raise image
                self._images[reference.key] = files[reference.item].digest, image
                self._holders[reference.key] += 1
                held.callback(self._forget, reference.key)
            del decoding, images, image  # each holds pixels
            files.clear()
            finish_prefill = clock.on_first_token

            def release_early() -> None:
                held.close()
                finish_prefill()

            clock.on_first_token = release_early  # vLLM has processed the images
            yield

    def _forget(self, key: str) -> None:
        """Removes an image, unless another call of its request holds it: a retry may come before the first ends."""
        if drop_holder(self._holders, key):
            del self._images[key]

    def _decode(self, file: ImageJob) -> Future[Image]:
        decode = partial(load_rgb, file.data, max_pixels_decoded=self._max_pixels, formats=self._formats)
        return self._threads.submit(decode)


def _close_after(held: ExitStack, decoding: Sequence[Future[Image]]) -> None:
    """Closes `held` once no thread decodes any more. A thread cannot be stopped: its pixels count until it ends."""
    running = [asyncio.wrap_future(future) for future in decoding if not future.cancel()]
    asyncio.gather(*running, return_exceptions=True).add_done_callback(lambda _: held.close())
