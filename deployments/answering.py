"""What a language model replica answers, passed on as an HTTP response: whole, or piece by piece where it streams.

It must not know what was asked, nor how replicas are reached.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from starlette.responses import Response, StreamingResponse

from deployments.deadline import Deadline
from deployments.errors import ApiError, error_head_and_body
from deployments.metrics import Distribution, Distributions
from deployments.replicas import Answer, Begin, Encoding, Replicas
from deployments.wire import Accepted, NotEncoded, ResponseHead

logger = logging.getLogger("ray.serve")


async def respond(
    replicas: Replicas,
    begin: Begin,
    encodings: Sequence[Encoding],
    *,
    accepted: Callable[[], None],
    deadline: Deadline,
    times: Distributions,
    conversation: str | None = None,
    stages: str | None = None,
) -> Response:
    """The response as the language model replica gives it. A client that leaves cancels what was started.

    Only event streams are passed on piece by piece, and not those that came whole with their head. Of anything else the
    length is known at its end, and a client that closes as soon as it has the last byte would seem to have left early.

    Args:
        begin: starts the answer.
        encodings: what it waits for, which is given back to `replicas` whatever becomes of it.
        accepted: called when a replica has the request and all its embeddings.
        conversation: what its turns have in common, as for `Replicas.answer`.
        stages: of `Server-Timing`, to go before the language model's own.
    """
    answer: Answer | None = None
    waited_for = list(encodings)

    def cancel(failed: bool = False) -> None:
        replicas.cancel(answer, waited_for, failed=failed)
        waited_for.clear()

    try:
        answer = await begin()
        head = await anext(answer)
        if isinstance(head, NotEncoded):
            await replicas.not_encoded(encodings[head.image], conversation=conversation)
        accepted()  # a replica of a version before Accepted tells it by the head
        replicas.encoded(waited_for, head if isinstance(head, Accepted) else Accepted(), conversation=conversation)
        waited_for.clear()
        if isinstance(head, Accepted):
            head = await anext(answer)
        if not isinstance(head, ResponseHead):
            raise AssertionError(f"a ResponseHead is next, got {type(head).__name__}")
        streamed = dict(head.headers).get(b"content-type", b"").startswith(b"text/event-stream")
        whole = head.body
        if head.complete:
            replicas.ends(answer)
        elif not streamed:
            whole = b"".join([whole, *[chunk async for chunk in answer if isinstance(chunk, bytes)]])
    except Exception as error:
        cancel(failed=True)
        raise replicas.failures.explained(error) from error
    except BaseException:  # the client has gone, or the deadline has passed
        cancel()
        raise
    if stages is not None:
        head.headers.append((b"server-timing", stages.encode()))
    if streamed:  # the head is held back until there is something to send after it
        times.add(Distribution.TTFT_MS, (asyncio.get_running_loop().time() - deadline.arrived) * 1e3)
    if head.complete or not streamed:
        return response(head, whole)

    async def body() -> AsyncIterator[bytes]:
        complete = False
        try:
            async with asyncio.timeout_at(deadline.at):
                if whole:
                    yield whole
                async for chunk in answer:
                    assert isinstance(chunk, bytes)
                    yield chunk
            complete = True
        except Exception as error:
            logger.exception("an answer broke off")
            told = deadline.error() if isinstance(error, TimeoutError) else replicas.failures.explained(error)
            if isinstance(told, ApiError):
                yield b"data: " + error_head_and_body(told)[1] + b"\n\n"
        finally:
            if not complete:
                cancel()

    return response(head, body())


def response(head: ResponseHead, body: bytes | AsyncIterator[bytes]) -> Response:
    """`head` with `body`, whose length is told where it is known."""
    headers = [(name, value) for name, value in head.headers if name.lower() != b"content-length"]
    if isinstance(body, bytes):
        made = Response(body, head.status)
        made.raw_headers = [*headers, (b"content-length", str(len(body)).encode())]
    else:
        made = StreamingResponse(body, head.status)
        made.raw_headers = headers
    return made
