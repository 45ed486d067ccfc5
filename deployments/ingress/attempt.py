"""Attempts at a request: starts the encoding of its images and its answer, and streams the answer to the client.

If a replica is lost, a request is retried as long as no byte of its answer has been sent.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from starlette.responses import Response, StreamingResponse

from deployments.common.api_error import ApiError, error_event
from deployments.common.messages import Accepted, Deferred, ImageJob, NotEncoded, ResponseHead, TooEarly
from deployments.ingress.admission import Visit
from deployments.ingress.coalescing import SharedCall
from deployments.ingress.failures import EngineLostError, LLMLostError, ReplicaLostError
from deployments.ingress.http.deadline import Deadline
from deployments.ingress.image_jobs import EngineRequest
from deployments.ingress.replica_client import Answer, Encoding, Replicas
from deployments.telemetry.metrics import Histogram, Histograms

logger = logging.getLogger("ray.serve")

MAX_ATTEMPTS = 5
"""Attempts at one request: a request that crashes every replica it reaches must not crash all of them."""

MAX_ENGINES = 2
"""Language models that one request may lose after they have accepted it, since the request may be what crashes them."""

FIRST_RETRY_DELAY_S = 0.05
"""Delay before the first retry; it doubles with each further one."""


@dataclass(frozen=True)
class Losses:
    """Numbers of replicas that were lost in earlier attempts."""

    attempts: int = 0
    encoders: int = 0
    llms: int = 0
    engines: int = 0
    """Language models, or their engines alone, that ended while they had the request."""

    def add(self, error: ReplicaLostError, *, accepted: bool) -> Losses:
        engines = self.engines + (isinstance(error, EngineLostError) or (accepted and error.llm))
        return Losses(self.attempts + 1, self.encoders + error.encoder, self.llms + error.llm, engines)


async def charge_nothing(_: Sequence[ImageJob]) -> None:
    """For requests without deferred images."""


@dataclass
class Attempt:
    """One attempt at a request.

    response = await Attempt(request, replicas, visit, deadline, histograms).response()
    """

    request: EngineRequest
    replicas: Replicas
    visit: Visit
    """Its `accept` is called once a language model has the request and all its embeddings."""
    deadline: Deadline
    histograms: Histograms
    stages: str | None = None
    """`Server-Timing` entries of the ingress, which precede the language model's."""
    lost: Losses = Losses()
    skip_directory: bool = False
    """Whether encoders are called for images that are in the embedding directory."""
    charge: Callable[[Sequence[ImageJob]], Awaitable[None]] = charge_nothing
    """Called with deferred images before they are encoded. Waits for their admission."""
    asked: frozenset[int] = frozenset()
    """Deferred images that an engine has asked for."""
    _encodings: list[Encoding] = field(default_factory=list, init=False)
    """Encodings that the answer waits for. Each is returned to `replicas`, by `record_accepted` or `cancel`."""
    _answer: Answer | None = field(default=None, init=False)
    is_accepted: bool = field(default=False, init=False)
    """Whether a language model has had the request."""

    def retry(self, lost: Losses) -> Attempt:
        """Returns the next attempt, after `lost`."""
        return dataclasses.replace(self, lost=lost, skip_directory=True)

    async def response(self) -> Response:
        """Returns the language model's response. If the client disconnects, the calls of this attempt are cancelled.

        Raises:
            ReplicaLostError: another attempt may succeed.
            ApiError: the error for the client.
        """
        try:
            self._start_encodings()
            answer = await self._start_answer(early=True)
            early = True
            while isinstance(head := await anext(answer), TooEarly | NotEncoded):
                self.replicas.drain(answer)
                if isinstance(head, NotEncoded):
                    await self._encode_asked(head.images)
                else:
                    early = False
                answer = await self._start_answer(early=early)
            head = await self._wait_until_accepted(head, answer)
            body = await self._read_body(head, answer)
        except Exception as error:
            client_error = self.replicas.to_client_error(error)
            self._cancel(failed=not isinstance(client_error, LLMLostError))
            raise client_error from error
        except BaseException:  # the client disconnected, or the deadline has passed
            self._cancel()
            raise
        if self.stages is not None:
            head.headers.append((b"server-timing", self.stages.encode()))
        if _is_stream(head):  # the replica holds the head back until the first chunk
            waited_s = asyncio.get_running_loop().time() - self.deadline.arrived
            self.histograms.observe(Histogram.TIME_TO_FIRST_TOKEN_SECONDS, waited_s)
        return http_response(head, self._stream(head, answer) if body is None else body)

    def _start_encodings(self) -> None:
        for number, job in enumerate(self.request.jobs):
            location = None if self.skip_directory else self.replicas.look_up(job)
            self._encodings.append(
                Deferred(location)
                if number in self.request.deferred and number not in self.asked
                else self.replicas.start_encode(job, self.lost.encoders, location=location)
            )

    async def _encode_asked(self, images: Sequence[int]) -> None:
        """Starts the encoding of images that an engine needs, and of which no embedding is stored. Raises the error of
        an encoder that failed."""
        for image in images:
            if isinstance(encoding := self._encodings[image], SharedCall):
                await self.replicas.raise_encoding_error(encoding)
        deferred = [image for image in images if isinstance(self._encodings[image], Deferred)]
        self.asked |= {*deferred}
        await self.charge([self.request.jobs[image] for image in deferred])
        for image in images:
            if not isinstance(encoding := self._encodings[image], SharedCall):
                self.replicas.discard_location(encoding)
                self._encodings[image] = self.replicas.start_encode(self.request.jobs[image], self.lost.encoders)

    async def _start_answer(self, *, early: bool) -> Answer:
        self._answer = await self.replicas.start_answer(
            self.request, self._encodings, attempt=self.lost.llms, early=early
        )
        return self._answer

    async def _wait_until_accepted(self, first: object, answer: Answer) -> ResponseHead:
        """Returns the head of an answer that begins with `first`, once a replica has the request and its embeddings."""
        self.is_accepted = True
        self.visit.accept()  # replicas of a version without Accepted send the head first
        accepted = first if isinstance(first, Accepted) else Accepted()
        self.replicas.record_accepted(self._encodings, accepted)
        self._encodings = []
        head = await anext(answer) if isinstance(first, Accepted) else first
        if not isinstance(head, ResponseHead):
            raise AssertionError(f"a ResponseHead is next, got {type(head).__name__}")
        return head

    async def _read_body(self, head: ResponseHead, answer: Answer) -> bytes | None:
        """Returns the whole body, or None for an event stream that did not arrive complete with its head.

        Only event streams are streamed. Other bodies get a Content-Length: without it, a client that closes after the
        last byte would look like one that disconnected early.
        """
        if head.complete:
            self.replicas.drain(answer)
            return head.body
        if _is_stream(head):
            return None
        return b"".join([head.body, *[chunk async for chunk in answer if isinstance(chunk, bytes)]])

    async def _stream(self, head: ResponseHead, answer: Answer) -> AsyncIterator[bytes]:
        complete = False
        try:
            async with asyncio.timeout_at(self.deadline.at):
                if head.body:
                    yield head.body
                async for chunk in answer:
                    assert isinstance(chunk, bytes)
                    yield chunk
            complete = True
        except Exception as error:
            logger.exception("an answer broke off")
            client_error = (
                self.deadline.error() if isinstance(error, TimeoutError) else self.replicas.to_client_error(error)
            )
            if isinstance(client_error, ApiError):
                yield error_event(client_error, self.request.http.path)
        finally:
            if not complete:
                self._cancel()

    def _cancel(self, *, failed: bool = False) -> None:
        """Cancels the calls of this attempt. `failed`: later requests must not share its encodings."""
        self.replicas.cancel(self._answer, self._encodings, failed=failed)
        self._encodings = []


async def respond(attempt: Attempt) -> Response:
    """Returns the response of the first attempt that loses no replica, beginning with `attempt`.

    After the loss of a language model, encoders serve the embeddings from their caches. Raises the last attempt's
    error.
    """
    while True:
        await attempt.visit.requeue()
        try:
            return await attempt.response()
        except ReplicaLostError as error:
            lost = attempt.lost.add(error, accepted=attempt.is_accepted)
            if lost.attempts == MAX_ATTEMPTS or lost.engines == MAX_ENGINES:
                raise
            attempt.replicas.count_retry()
            await asyncio.sleep(FIRST_RETRY_DELAY_S * 2 ** (lost.attempts - 1))
            attempt = attempt.retry(lost)


def http_response(head: ResponseHead, body: bytes | AsyncIterator[bytes]) -> Response:
    """Returns `head` with `body`, with a Content-Length unless it is a stream."""
    headers = [(name, value) for name, value in head.headers if name.lower() != b"content-length"]
    if isinstance(body, bytes):
        made = Response(body, head.status)
        made.raw_headers = [*headers, (b"content-length", str(len(body)).encode())]
    else:
        made = StreamingResponse(body, head.status)
        made.raw_headers = headers
    return made


def _is_stream(head: ResponseHead) -> bool:
    return dict(head.headers).get(b"content-type", b"").startswith(b"text/event-stream")
