"""The ingress's client of encoder and LLM replicas, over Serve's handles."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pickle
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast
from weakref import WeakValueDictionary

from cachetools import LRUCache
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator

from configs.schema import IngressConfig
from deployments.common import ray_private
from deployments.common.messages import (
    Accepted,
    Deferred,
    ImageJob,
    ImageRefused,
    Piece,
    PlannedVideo,
    SharedEmbedding,
    StoredFile,
)
from deployments.common.replica_errors import EngineDeadError, TransferFailedError
from deployments.ingress.coalescing import SharedCall, SharedCalls
from deployments.ingress.embedding_directory import EmbeddingDirectory
from deployments.ingress.failures import FIRST_RETRY_DELAY_S, MAX_ATTEMPTS, EncoderLostError, Failures, LLMLostError
from deployments.ingress.image_jobs import EngineRequest
from deployments.routing.affinity import Call
from deployments.routing.calls import GrpcAnswer
from deployments.routing.replica_identity import HOST, FleetIdentity, published
from deployments.routing.replica_router import ACCEPT_S
from deployments.telemetry.metrics import Counter, Counters
from deployments.telemetry.tracing import Stage, record_span

if TYPE_CHECKING:
    from ray import ObjectRef

T = TypeVar("T")
EncoderAnswer = SharedEmbedding | ImageRefused
EncoderCall = SharedCall[DeploymentResponse[EncoderAnswer]]
Encoding = EncoderCall | SharedEmbedding | Deferred
"""A call to an encoder, the last known location of the embedding, or an embedding that the engine may not need."""
Answer = DeploymentResponseGenerator[Piece] | GrpcAnswer[Piece]

MAX_PLANNED = 1024
"""Videos whose headers are remembered."""
MAX_PLANNING = 16
"""Videos of one client whose headers are read at once: it is not admitted yet."""
MAX_GRPC_BYTES = 2 * 1024**2
"""Bytes of a request that is sent by gRPC; Serve's replicas refuse messages over 4 MiB."""

DRAIN_TIMEOUT_S = 30.0
"""Time for a replica to end a call after its complete answer; then the call is cancelled."""


class Replicas:
    """The encoders and the language models of the application.

    call = await replicas.choose(Call(request.conversation))
    encodings = [await replicas.start_encode(job, call.host) for job in request.jobs]
    answer = await replicas.start_answer(request, encodings, call)
    """

    def __init__(
        self,
        encoder: DeploymentHandle[Any],
        llm: DeploymentHandle[Any],
        limits: IngressConfig,
        overloaded_retry_s: Callable[[], int],
    ) -> None:
        """`encoder`: the deployment that encodes images, which may be `llm`. `overloaded_retry_s` estimates
        `Retry-After` under overload."""
        by_grpc = limits.llm_transport == "grpc"  # for small requests
        # `_by_reference`: values pass between replicas through the object store, whatever Serve's default is.
        self._encoder = encoder.options(method_name="encode", _by_reference=True)
        self._planner = encoder.options(method_name="plan", _by_reference=True)
        self._llm_handle = llm
        self._llm = llm.options(method_name="handle", stream=True, _by_reference=True)
        self._llm_by_grpc = llm.options(method_name="handle", stream=True, _by_reference=False) if by_grpc else None
        self._encodings: SharedCalls[DeploymentResponse[EncoderAnswer]] = SharedCalls()
        self._directory = EmbeddingDirectory(limits.embedding_directory_entries)
        self._planned: LRUCache[str, PlannedVideo] = LRUCache(MAX_PLANNED)
        self._planning: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by client
        self._draining: set[asyncio.Task[None]] = set()
        self.counts = Counters()
        self.failures = Failures(self.counts, retry_after_s=limits.retry_after_s, overloaded_retry_s=overloaded_retry_s)
        self.identity = FleetIdentity(encoder, llm, self.failures.to_client_error)

    async def choose(self, call: Call) -> Call:
        """Returns the call of a language model with a replica, as whose load it counts from now on, and its host.

        If all run on one host, none is chosen before the call. If none is running or can be chosen in time, the host is
        empty: Serve starts replicas for calls, not for choices. Raises IdentityGoneError.
        """
        hosts = {published(replica, HOST) for replica in ray_private.running_replicas(self._llm_handle)}
        with contextlib.suppress(TimeoutError):
            if len(hosts) > 1:
                label = dataclasses.replace(call, only_choose=True).to_session_id()
                # The last replica may have ended. `asyncio.wait_for` may lose a cancellation before Python 3.12.
                async with asyncio.timeout(ACCEPT_S):
                    replica, metadata = await ray_private.choose_replica(self._llm, label)
                return dataclasses.replace(call, replica=replica, host=metadata.get(HOST, ""))
        return dataclasses.replace(call, host=hosts.pop() if len(hosts) == 1 else "")

    def look_up(self, job: ImageJob, host: str) -> SharedEmbedding | None:
        """Returns the last known location of the image's embedding on the host, None if it is unknown."""
        return self._directory.get(host, job.digest)

    async def plan_videos(
        self, jobs: Sequence[ImageJob], client: str = ""
    ) -> dict[str, tuple[PlannedVideo | ImageRefused, StoredFile]]:
        """Returns how the videos of a client that are encoded in chunks are encoded, and their files, by digest.
        Encoders read their headers; plans of the last videos are remembered.

        Raises:
            ApiError: 503, the object store is full.
            EncoderLostError: encoders were lost in all attempts.
            IdentityGoneError: encoders with other weights or numerics have taken over.
        """
        videos = [job for job in jobs if job.in_chunks]
        files = {job.digest: StoredFile(job.data) for job in videos}
        slots = self._planning.setdefault(client, asyncio.Semaphore(MAX_PLANNING))
        plans = [asyncio.ensure_future(self._plan_video(job, files[job.digest], slots)) for job in videos]
        try:
            planned = await asyncio.gather(*plans)
        finally:
            while plans:  # which a failed one would keep alive
                plans.pop().cancel()
        return dict(zip(files, zip(planned, files.values(), strict=True), strict=True))

    async def _plan_video(
        self, job: ImageJob, file: StoredFile, slots: asyncio.Semaphore, attempt: int = 0
    ) -> PlannedVideo | ImageRefused:
        if (known := self._planned.get(job.digest)) is not None:
            return known
        call = Call(job.digest, 1, attempt, identity=job.identity)
        to = self._planner.options(session_id=call.to_session_id())
        try:
            async with slots:
                ref = await self._store_file(file)
                # In a list: Ray fetches an argument itself before the replica can accept the call.
                answer = to.remote(dataclasses.replace(job, data=b""), [ref])
                try:
                    plan: PlannedVideo | ImageRefused = await self._translate_errors(answer)
                except BaseException:  # the client has left, or another video failed: the slot is free again
                    _cancel(answer)
                    raise
        except EncoderLostError:
            if attempt + 1 == MAX_ATTEMPTS:
                raise
            self.counts.add(Counter.REQUEST_RETRIES)
            await asyncio.sleep(FIRST_RETRY_DELAY_S * 2**attempt)
            return await self._plan_video(job, file, slots, attempt + 1)
        if isinstance(plan, PlannedVideo):
            self._planned[job.digest] = plan
        return plan

    async def _store_file(self, file: StoredFile) -> ObjectRef[bytes]:
        """Puts the file into the object store, off the event loop. Raises ApiError 503 if that is full."""
        return await self._translate_errors(asyncio.to_thread(lambda: file.ref))

    async def start_encode(self, job: ImageJob, host: str, attempt: int = 0) -> Encoding:
        """Returns the embedding's last known location on `host`, that of the language model. Without one, starts a call
        to an encoder, on that host if possible, or joins one for the same image and host.

        The result is passed to `start_answer`, and later to `record_accepted` or `cancel`. `attempt`: how often an
        encoder or an embedding was lost; after a loss, an encoder is called.

        Waits until a call for a chunk of a video is accepted: calls overtake each other on their way, and a decoder
        starts anew for frames that it has passed.

        Raises ApiError 503 if the object store has no room for the file of a video.
        """
        if not attempt and (location := self.look_up(job, host)) is not None:
            self.counts.add(Counter.EMBEDDING_DIRECTORY_HITS)
            record_span(Stage.CACHED, 0)
            return location
        if job.chunk is not None and isinstance(job.chunk.file, StoredFile):
            ref = await self._store_file(job.chunk.file)
            job = dataclasses.replace(job, chunk=dataclasses.replace(job.chunk, file=ref))
        encoding, shared = self._encodings.acquire(
            f"{job.digest} {host} {attempt}", lambda: self._call_encoder(job, host, attempt)
        )
        self.counts.add(Counter.COALESCED_ENCODES, shared)
        if job.chunk is not None:
            try:
                await self._accepted([encoding])
            except BaseException as error:
                self.cancel(None, [encoding], failed=isinstance(error, Exception))
                raise
        return encoding

    def _call_encoder(self, job: ImageJob, host: str, attempt: int) -> DeploymentResponse[EncoderAnswer]:
        key, cost, sticky = job.digest, job.tokens_before + job.num_tokens, False
        if job.chunk is not None:  # cost 0: none may be refused, since another decoder would begin the file anew
            key, cost, sticky = job.chunk.video, 0, True
        call = Call(key, job.num_tokens, attempt, cost, identity=job.identity, host=host, sticky=sticky)
        to = self._encoder.options(session_id=call.to_session_id())
        return cast(DeploymentResponse[EncoderAnswer], ray_private.start_detached(lambda: to.remote(job)))

    async def start_answer(
        self,
        request: EngineRequest,
        encodings: Sequence[Encoding],
        call: Call,
        *,
        early: bool = True,
    ) -> Answer:
        """Starts the answer: Accepted, a head and body chunks, or only NotEncoded or TooEarly.

        The language model, another than the chosen one if that is lost or full, is called once every encoder has
        accepted its job, or, if `early` is false, once all encodings are complete; it fetches each encoding when it is
        ready.
        """
        refs = await self._accepted(encodings)
        if refs and not early:
            # Waits without fetching.
            await self._translate_errors(asyncio.gather(*map(ray_private.wait_until_ready, refs)))
        next_ref = map(ray_private.ResultReference, refs)
        sources = [next(next_ref) if isinstance(one, SharedCall) else one for one in encodings] or request.files
        http = dataclasses.replace(request.http, early_prefill=bool(refs) and early)
        by_grpc = self._llm_by_grpc
        if by_grpc is not None and _message_bytes(request, encodings) > MAX_GRPC_BYTES:
            by_grpc = None
        llm = (by_grpc or self._llm).options(session_id=call.to_session_id())
        answer = llm.remote(http, request.references, request.headers, sources, call)
        self.counts.add(Counter.GRPC_CALLS, by_grpc is not None)
        return GrpcAnswer(answer) if by_grpc else cast(Answer, answer)

    async def _accepted(self, encodings: Sequence[Encoding]) -> list[ObjectRef[EncoderAnswer]]:
        """Waits until encoders have accepted their calls. Returns references to the results of these."""
        return await self._translate_errors(
            asyncio.gather(*(ray_private.object_ref(call.response) for call in _encoder_calls(encodings)))
        )

    def discard_location(self, encoding: SharedEmbedding | Deferred) -> None:
        """Forgets the location of an embedding that the language model did not find there."""
        location = encoding.location if isinstance(encoding, Deferred) else encoding
        if location is not None:
            self._directory.discard(location)
            self.counts.add(Counter.EMBEDDING_DIRECTORY_STALE)

    async def raise_encoding_error(self, encoding: EncoderCall) -> NoReturn:
        """Raises the error of a call to an encoder that the language model reported as failed."""
        await self._translate_errors(await self._translate_errors(ray_private.object_ref(encoding.response)))
        raise TransferFailedError("an encoding was given up")

    def record_accepted(self, encodings: Sequence[Encoding], accepted: Accepted) -> None:
        """Records that a language model has the encodings, and the locations that it read them from."""
        for call in _encoder_calls(encodings):
            self._encodings.release(call, share=False)
        for location in filter(None, accepted.locations):
            self._directory.put(location)

    def cancel(self, answer: Answer | None, encodings: Sequence[Encoding], *, failed: bool = False) -> None:
        """Cancels the calls in flight that no other request shares.

        `failed`: one of them has failed, and later requests must not share them.
        """
        started: list[Answer | DeploymentResponse[EncoderAnswer]] = [] if answer is None else [answer]
        unshared = [call for call in _encoder_calls(encodings) if self._encodings.release(call, share=not failed)]
        started += [call.response for call in unshared]
        for response in started:
            _cancel(response)

    def drain(self, answer: Answer) -> None:
        """Waits in a task for the end of a complete answer, until which Serve counts the call."""
        task = asyncio.create_task(_drain(answer))
        self._draining.add(task)
        task.add_done_callback(self._draining.discard)

    def to_client_error(self, error: Exception) -> Exception:
        """Returns the client's error for a failed answer, as `Failures` does. Excludes a dead engine from routing."""
        if isinstance(error, EngineDeadError):
            ray_private.exclude(self._llm_handle, error.replica)
        return self.failures.to_client_error(error, LLMLostError)

    async def _translate_errors(self, result: Awaitable[T]) -> T:
        """Returns the result of encoder calls. Raises their failures as `Failures.to_client_error` returns them."""
        try:
            return await result
        except Exception as error:
            client_error = self.failures.to_client_error(error, EncoderLostError)
            try:
                raise client_error from None if client_error is error else error
            finally:
                del client_error
        finally:
            del result  # or its error, whose traceback has this frame, would refer to itself


def _cancel(call: Answer | DeploymentResponse[Any]) -> None:
    try:
        call.cancel()
    except Exception as error:  # the call's own, which was reported already; its traceback would refer to the call
        error.with_traceback(None)


async def _drain(answer: Answer) -> None:
    with contextlib.suppress(Exception):  # the answer was complete
        try:
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                async for _ in answer:
                    pass
        except TimeoutError:
            answer.cancel()


def _message_bytes(request: EngineRequest, encodings: Sequence[Encoding]) -> int:
    """Returns the bytes of a request to a language model, without the results of encoders, which are small."""
    locations = [encoding for encoding in encodings if not isinstance(encoding, SharedCall)]
    return (
        len(request.http.body)
        + sum(len(file.data) for file in request.files)
        + len(pickle.dumps((request.headers, locations)))
    )


def _encoder_calls(encodings: Sequence[Encoding]) -> list[EncoderCall]:
    """Returns the encodings for which an encoder was called."""
    return [encoding for encoding in encodings if isinstance(encoding, SharedCall)]
