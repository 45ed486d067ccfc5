"""Attempts at a request: starts the encoding of its images and its answer, and streams the answer to the client.

If a replica is lost, a request is retried as long as no byte of its answer has been sent.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from starlette.responses import Response, StreamingResponse

from configs.schema import IngressConfig
from deployments.common.api_error import ApiError, conversation_field, error_event
from deployments.common.messages import (
    Accepted,
    ChunkOfVideo,
    Deferred,
    ImageJob,
    ImageRefused,
    NotEncoded,
    PlannedVideo,
    ResponseHead,
    StoredFile,
    TooEarly,
)
from deployments.ingress.admission import Visit
from deployments.ingress.coalescing import SharedCall
from deployments.ingress.failures import (
    FIRST_RETRY_DELAY_S,
    MAX_ATTEMPTS,
    EngineLostError,
    LLMLostError,
    ReplicaLostError,
)
from deployments.ingress.http.deadline import Deadline
from deployments.ingress.http.routes import COUNTING
from deployments.ingress.image_jobs import EngineRequest
from deployments.ingress.replica_client import Answer, Encoding, Replicas
from deployments.routing.affinity import Call
from deployments.routing.prefill_load import EARLIER_IMAGE_COST
from deployments.telemetry.metrics import Counter, Histogram, Histograms
from encoder.item_header import ChunkHeader, ItemHeader

logger = logging.getLogger("ray.serve")

MAX_ENGINES = 2
"""Language models that one request may lose after they have accepted it, since the request may be what crashes them."""


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
    charge: Callable[[Sequence[ImageJob]], Awaitable[None]] = charge_nothing
    """Called with deferred images before they are encoded. Waits for their admission."""
    asked: set[int] = field(default_factory=set)
    """Deferred images that are encoded and were charged: an engine has asked for them, or their headers are unknown.
    All attempts at a request share it."""
    encoder_host: str = ""
    """Host of the first language model that was chosen: its encoders have the embeddings."""
    encodings: list[Encoding] = field(default_factory=list)
    """Encodings that the answer waits for: those of the attempt before if it lost only its language model. Each is
    returned to `replicas`, by `record_accepted` or `cancel`."""
    _call: Call = field(init=False)
    _answer: Answer | None = field(default=None, init=False)
    is_accepted: bool = field(default=False, init=False)
    """Whether a language model has had the request."""

    async def response(self) -> Response:
        """Returns the language model's response. If the client disconnects, the calls of this attempt are cancelled.

        Raises:
            ReplicaLostError: another attempt may succeed.
            ApiError: the error for the client.
        """
        request, lost = self.request, self.lost
        try:
            if lost.attempts:
                await asyncio.sleep(FIRST_RETRY_DELAY_S * 2 ** (lost.attempts - 1))
            await self.visit.requeue()
            earlier = () if request.http.path in COUNTING else request.deferred  # which defers new images too
            earlier_tokens = sum(request.jobs[number].num_tokens for number in earlier)
            self._call = Call(
                request.conversation,
                1,
                lost.llms,
                request.prompt_tokens,
                identity=request.tower,
                leaving_cost=EARLIER_IMAGE_COST * earlier_tokens,
            )
            if request.jobs and not request.files:
                self._call = await self.replicas.choose(self._call)
            self.encoder_host = self.encoder_host or self._call.host
            await self._start_encodings()
            answer = await self._start_answer(early=True)
            early = True
            while isinstance(head := await anext(answer), TooEarly | NotEncoded):
                self.replicas.drain(answer)
                if isinstance(head, NotEncoded):
                    await self._encode_asked(head.images)
                else:
                    self.replicas.counts.add(Counter.EARLY_PREFILLS_DEFERRED)
                    early = False
                answer = await self._start_answer(early=early)
            head = await self._wait_until_accepted(head, answer)
            body = await self._read_body(head, answer)
        except Exception as error:
            client_error = self.replicas.to_client_error(error)
            if isinstance(client_error, LLMLostError):  # the next attempt gets its encodings
                self.replicas.cancel(self._answer, ())
            else:
                self.cancel(failed=True)
            self._answer = None
            try:
                raise client_error from None if client_error is error else error
            finally:
                del client_error  # or this frame, which the error refers to, would keep it and the request
        except BaseException:  # the client disconnected, or the deadline has passed
            self.cancel()
            raise
        if self.stages is not None:
            head.headers.append((b"server-timing", self.stages.encode()))
        if _is_stream(head):  # the replica holds the head back until the first chunk
            waited_s = asyncio.get_running_loop().time() - self.deadline.arrived
            self.histograms.observe(Histogram.TIME_TO_FIRST_TOKEN_SECONDS, waited_s)
            self.request = EngineRequest(dataclasses.replace(request.http, body=b""))  # nothing is sent again
        return http_response(head, self._stream(head, answer) if body is None else body)

    async def _start_encodings(self) -> None:
        """Deferred images whose headers only an encoder can compute are encoded at once if no location is known, which
        comes with the header: without headers, vLLM cannot get the request."""
        if self.encodings or self.request.files:
            return
        jobs, headers, deferred = self.request.jobs, self.request.headers, self.request.deferred
        locations = {n: self.replicas.look_up(jobs[n], self.encoder_host) for n in deferred - self.asked}
        await self._encode_deferred([n for n, location in locations.items() if headers[n] is None and location is None])
        for n, job in enumerate(jobs):
            is_deferred = n in deferred - self.asked
            self.encodings.append(Deferred(locations[n]) if is_deferred else await self._start_encode(job))

    async def _start_encode(self, job: ImageJob) -> Encoding:
        if None in self.request.headers:  # vLLM begins once all are encoded: an early embedding helps nobody
            job = dataclasses.replace(job, tokens_before=self.visit.tokens - job.num_tokens)
        return await self.replicas.start_encode(job, self.encoder_host, self.lost.encoders)

    async def _encode_asked(self, images: Sequence[int]) -> None:
        """Starts the encoding of images that an engine needs, and of which no embedding is stored. Raises the error of
        an encoder that failed."""
        for image in images:
            if isinstance(encoding := self.encodings[image], SharedCall):
                await self.replicas.raise_encoding_error(encoding)
        await self._encode_deferred([image for image in images if isinstance(self.encodings[image], Deferred)])
        for image in images:
            if not isinstance(encoding := self.encodings[image], SharedCall):
                self.replicas.discard_location(encoding)
                self.encodings[image] = await self._start_encode(self.request.jobs[image])

    async def _encode_deferred(self, images: Sequence[int]) -> None:
        """Waits for the admission of deferred images, which from now on are encoded."""
        if images:  # without more to admit, the request keeps its place
            self.asked.update(images)
            await self.charge([self.request.jobs[image] for image in images])

    async def _start_answer(self, *, early: bool) -> Answer:
        self._answer = await self.replicas.start_answer(self.request, self.encodings, self._call, early=early)
        return self._answer

    async def _wait_until_accepted(self, first: object, answer: Answer) -> ResponseHead:
        """Returns the head of an answer that begins with `first`, once a replica has the request and its embeddings."""
        self.is_accepted = True
        self.visit.accept()
        if not isinstance(first, Accepted):
            raise AssertionError(f"Accepted is first, got {type(first).__name__}")
        self.replicas.record_accepted(self.encodings, first)
        self.encodings = []
        head = await anext(answer)
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
            chunk: object = head.body
            while chunk is not None:
                assert isinstance(chunk, bytes)
                if chunk:
                    yield chunk
                async with asyncio.timeout_at(self.deadline.at):  # of this task: another one may have read before
                    chunk = await anext(answer, None)
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
                self.cancel()

    def cancel(self, *, failed: bool = False) -> None:
        """Cancels the calls of this attempt. `failed`: later requests must not share its encodings."""
        self.replicas.cancel(self._answer, self.encodings, failed=failed)
        self.encodings = []


def split_videos(
    request: EngineRequest, plans: Mapping[str, tuple[PlannedVideo | ImageRefused, StoredFile]], limits: IngressConfig
) -> EngineRequest:
    """Returns `request` with a job for each chunk in place of each video of `plans`, by digest, each with its file.

    Raises ApiError 400 for a video that was refused, or if the new items have more visual tokens than a request may.
    """
    jobs: list[ImageJob] = []
    headers: list[ItemHeader | ChunkHeader | None] = []
    first: list[int] = []
    deferred: set[int] = set()
    num_planned = 0  # visual tokens of the videos so far, which were unknown until now
    param = conversation_field(request.http.path)
    for number, (given, header) in enumerate(zip(request.jobs, request.headers, strict=True)):
        first.append(len(jobs))
        job = dataclasses.replace(given, tokens_before=given.tokens_before + num_planned)
        plan, file = plans.get(job.digest, (None, StoredFile(b"")))
        if isinstance(plan, ImageRefused):
            label = next(reference.label for reference in request.references if reference.item == number)
            raise ApiError(400, f"{label}: {plan.message}", param=param, code="invalid_video")
        jobs += [job] if plan is None else _chunk_jobs(job, plan, file)
        headers += [header] if plan is None else [plan.header, *plan.header.embeddings[1:]]
        num_planned += 0 if plan is None or number in request.deferred else plan.header.num_embeds
        deferred |= set(range(first[-1], len(jobs)) if number in request.deferred else ())
    references = [dataclasses.replace(reference, item=first[reference.item]) for reference in request.references]
    split = dataclasses.replace(
        request, references=references, jobs=jobs, headers=headers, deferred=frozenset(deferred)
    )
    tokens, limit = split.visual_tokens, limits.max_visual_tokens_per_request
    if tokens > limit:
        message = f"the images and videos come to {tokens} visual tokens, the limit is {limit}"
        raise ApiError(400, message, param=param)
    return split


def _chunk_jobs(job: ImageJob, plan: PlannedVideo, file: StoredFile) -> list[ImageJob]:
    """Returns the jobs by which the video of `job` is encoded, in order."""
    jobs, before = [], job.tokens_before
    job = dataclasses.replace(job, data=b"", in_chunks=False)
    for header, part in zip(plan.header.embeddings, plan.chunks, strict=True):
        chunk, rows = ChunkOfVideo(job.digest, plan.indices, part, file), header.num_embeds
        jobs.append(dataclasses.replace(job, digest=header.digest, num_tokens=rows, tokens_before=before, chunk=chunk))
        before += rows
    return jobs


async def respond(attempt: Attempt) -> Response:
    """Returns the response of the first attempt that loses no replica, beginning with `attempt`.

    After the loss of a language model, the next one gets the encodings in flight, and encoders serve the others from
    their caches. Raises the last attempt's error.
    """
    while True:
        try:
            return await attempt.response()
        except ReplicaLostError as error:
            lost = attempt.lost.add(error, accepted=attempt.is_accepted)
            if lost.attempts == MAX_ATTEMPTS or lost.engines == MAX_ENGINES:
                attempt.cancel()
                raise
            attempt.replicas.counts.add(Counter.REQUEST_RETRIES)
            attempt = dataclasses.replace(attempt, lost=lost)


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
