"""The ingress's client of encoder and LLM replicas, over Serve's handles."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NoReturn, TypeVar, cast

from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator

from deployments.common.messages import (
    Accepted,
    Deferred,
    EncodedImage,
    ImageJob,
    ImageRefused,
    Piece,
    SharedEmbedding,
)
from deployments.common.ray_private import exclude, object_ref, start_detached, wait_until_ready
from deployments.common.replica_errors import EngineDeadError, TransferFailedError
from deployments.ingress.coalescing import SharedCall, SharedCalls
from deployments.ingress.embedding_directory import EmbeddingDirectory
from deployments.ingress.failures import EncoderLostError, Failures, LLMLostError
from deployments.ingress.image_jobs import EngineRequest
from deployments.routing.affinity import Call
from deployments.routing.calls import GrpcAnswer
from deployments.routing.replica_identity import FleetIdentity
from deployments.telemetry.metrics import Counter, Counters
from deployments.telemetry.tracing import Stage, record_span

T = TypeVar("T")
EncoderAnswer = EncodedImage | SharedEmbedding | ImageRefused
EncoderCall = SharedCall[DeploymentResponse[EncoderAnswer]]
Encoding = EncoderCall | SharedEmbedding | Deferred
"""A call to an encoder, the last known location of the embedding, or an embedding that the engine may not need."""
Answer = DeploymentResponseGenerator[Piece] | GrpcAnswer[Piece]

NO_HOST = "nowhere"
"""Replaces the host of a language model that does not read from shared memory."""

NUM_REMEMBERED_READS = 8
"""Number of recent answers considered: encoders offer embeddings to other hosts if all of these answers say that their
language model reads from encoders on other hosts."""

DRAIN_TIMEOUT_S = 30.0
"""Time for a replica to end a call after its complete answer; then the call is cancelled."""


class Replicas:
    """The encoders and the language models of the application.

    encodings = [replicas.start_encode(job) for job in request.jobs]
    answer = await replicas.start_answer(request, encodings)
    """

    def __init__(
        self,
        encoder: DeploymentHandle[Any],
        llm: DeploymentHandle[Any],
        *,
        retry_after_s: int,
        overloaded_retry_s: Callable[[], int],
        embedding_directory_entries: int = 0,
        by_grpc: bool = True,
    ) -> None:
        """`overloaded_retry_s` estimates `Retry-After` under overload; `retry_after_s` is for unavailable replicas.

        `by_grpc`: requests without object references are sent by gRPC.
        """
        # `_by_reference`: values pass between replicas through the object store, whatever Serve's default is.
        self._encoder = encoder.options(method_name="encode", _by_reference=True)
        self._llm_handle = llm
        self._llm = llm.options(method_name="handle", stream=True, _by_reference=True)
        self._llm_by_grpc = llm.options(method_name="handle", stream=True, _by_reference=False) if by_grpc else None
        self._encodings: SharedCalls[DeploymentResponse[EncoderAnswer]] = SharedCalls()
        self._shm_hosts: set[str] = set()
        self._remote_reads: deque[bool] = deque(maxlen=NUM_REMEMBERED_READS)
        self._directory = EmbeddingDirectory(embedding_directory_entries)
        self._draining: set[asyncio.Task[None]] = set()
        self._counts = Counters()
        self.failures = Failures(self._counts, retry_after_s=retry_after_s, overloaded_retry_s=overloaded_retry_s)
        self.identity = FleetIdentity(encoder, llm, self.failures.to_client_error)

    def look_up(self, job: ImageJob) -> SharedEmbedding | None:
        """Returns the last known location of the image's embedding, None if it is unknown."""
        return self._directory.get(job.digest)

    def start_encode(self, job: ImageJob, attempt: int = 0, *, location: SharedEmbedding | None = None) -> Encoding:
        """Starts a call to an encoder or joins one for the same image. Returns `location` instead if it is given.

        The result is passed to `start_answer`, and later to `record_accepted` or `cancel`. `attempt`: how often an
        encoder or an embedding in shared memory was lost; after the first loss, embeddings go through the object store.
        """
        if location is not None:
            self._counts.add(Counter.EMBEDDING_DIRECTORY_HITS)
            record_span(Stage.CACHED, 0)
            return location
        remote_read = not attempt and len(self._remote_reads) > 0 and all(self._remote_reads)
        job = dataclasses.replace(
            job, reader_hosts=() if attempt else tuple(sorted(self._shm_hosts)), remote_read=remote_read
        )
        key = f"{job.digest} {job.reader_hosts} {job.remote_read}"
        encoding, shared = self._encodings.acquire(key, lambda: self._call_encoder(job, attempt))
        if shared:
            self._counts.add(Counter.COALESCED_ENCODES)
        return encoding

    def _call_encoder(self, job: ImageJob, attempt: int) -> DeploymentResponse[EncoderAnswer]:
        call = Call(job.digest, job.num_tokens, attempt, identity=job.identity)
        to = self._encoder.options(session_id=call.to_session_id())
        started = start_detached(lambda: to.remote(job))
        return cast(DeploymentResponse[EncoderAnswer], started)

    async def start_answer(
        self,
        request: EngineRequest,
        encodings: Sequence[Encoding],
        *,
        attempt: int = 0,
        early: bool = True,
    ) -> Answer:
        """Starts the answer: Accepted, a head and body chunks, or only NotEncoded or TooEarly.

        The language model is called once every encoder has accepted its job, or, if `early` is false, once all
        encodings are complete; it fetches each encoding when it is ready. `attempt`: how often a language model was
        lost.
        """
        accepted = asyncio.gather(*(object_ref(call.response) for call in _encoder_calls(encodings)))
        refs = await self._translate_errors(accepted)
        if refs and not early:
            self._counts.add(Counter.EARLY_PREFILLS_DEFERRED)
            ready = asyncio.gather(*map(wait_until_ready, refs))  # waits without fetching
            await self._translate_errors(ready)
        next_ref = iter(refs)
        sources = [next(next_ref) if isinstance(one, SharedCall) else one for one in encodings]
        call = Call(request.conversation, 1, attempt, request.prompt_tokens, identity=request.tower)
        http = dataclasses.replace(request.http, early_prefill=bool(refs) and early)
        if refs or self._llm_by_grpc is None:  # only Ray calls carry references
            started = self._llm.options(session_id=call.to_session_id()).remote(
                http, request.references, request.headers, sources, call
            )
            return cast(Answer, started)
        self._counts.add(Counter.GRPC_CALLS)
        return GrpcAnswer(
            self._llm_by_grpc.options(session_id=call.to_session_id()).remote(
                http, request.references, request.headers, sources, call
            )
        )

    def discard_location(self, encoding: SharedEmbedding | Deferred) -> None:
        """Forgets the location of an embedding that the language model did not find there."""
        location = encoding.location if isinstance(encoding, Deferred) else encoding
        if location is not None:
            self._directory.discard(location.digest)
            self._counts.add(Counter.EMBEDDING_DIRECTORY_STALE)

    async def raise_encoding_error(self, encoding: EncoderCall) -> NoReturn:
        """Raises the error of a call to an encoder that the language model reported as failed."""
        await self._translate_errors(await self._translate_errors(object_ref(encoding.response)))
        raise TransferFailedError("an encoding was given up")

    def record_accepted(self, encodings: Sequence[Encoding], accepted: Accepted) -> None:
        """Records that a language model has the encodings, and the locations that it read them from."""
        self._shm_hosts.add(accepted.shm_host or NO_HOST)
        self._remote_reads.append(accepted.remote_read)
        for call in _encoder_calls(encodings):
            self._encodings.complete(call)
        for location in accepted.locations:
            # With language models on several hosts, one could be sent a location that it cannot read.
            if location is not None and len(self._shm_hosts) == 1:
                self._directory.put(location.digest, location)
        if len(self._shm_hosts) > 1:
            self._directory.clear()

    def cancel(self, answer: Answer | None, encodings: Sequence[Encoding], *, failed: bool = False) -> None:
        """Cancels the calls in flight that no other request shares.

        `failed`: one of them has failed, and later requests must not share them.
        """
        release = self._encodings.fail if failed else self._encodings.release
        started: list[Answer | DeploymentResponse[EncoderAnswer]] = [] if answer is None else [answer]
        for call in _encoder_calls(encodings):
            if release(call):
                started.append(call.response)
        for response in started:
            with contextlib.suppress(Exception):  # Serve raises the call's error here, which was reported already
                response.cancel()

    def drain(self, answer: Answer) -> None:
        """Waits in a task for the end of a complete answer, until which Serve counts the call."""
        task = asyncio.create_task(_drain(answer))
        self._draining.add(task)
        task.add_done_callback(self._draining.discard)

    def to_client_error(self, error: Exception) -> Exception:
        """Returns the client's error for a failed answer, as `Failures` does. Excludes a dead engine from routing."""
        if isinstance(error, EngineDeadError):
            exclude(self._llm_handle, error.replica)
        return self.failures.to_client_error(error, LLMLostError)

    async def _translate_errors(self, result: Awaitable[T]) -> T:
        """Returns the result of encoder calls. Raises their failures as `Failures.to_client_error` returns them."""
        try:
            return await result
        except Exception as error:
            raise self.failures.to_client_error(error, EncoderLostError) from error

    def count_retry(self) -> None:
        self._counts.add(Counter.REQUEST_RETRIES)


async def _drain(answer: Answer) -> None:
    with contextlib.suppress(Exception):  # the answer was complete
        try:
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                async for _ in answer:
                    pass
        except TimeoutError:
            answer.cancel()


def _encoder_calls(encodings: Sequence[Encoding]) -> list[EncoderCall]:
    """Returns the encodings for which an encoder was called."""
    return [encoding for encoding in encodings if isinstance(encoding, SharedCall)]
