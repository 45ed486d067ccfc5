"""One attempt at a request, with a stand-in for the replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.responses import StreamingResponse

from deployments.common.messages import Accepted, HttpRequest, ImageJob, Piece, ResponseHead
from deployments.ingress.attempt import Attempt
from deployments.ingress.failures import EncoderLostError
from deployments.ingress.image_jobs import EngineRequest
from deployments.ingress.replica_client import Replicas

FILE = ImageJob(b"a file", None, "0" * 64, "identity", (8, 8), 4)


async def stream() -> AsyncIterator[Piece]:
    yield Accepted()
    yield ResponseHead(200, [(b"content-type", b"text/event-stream")])
    yield b"data: 1\n\n"
    yield b"data: [DONE]\n\n"


def test_a_stream_holds_no_image() -> None:
    """Bodies and files were held until the last token, while the ingress counted them as given up."""

    async def start_answer(*_: object, **__: object) -> AsyncIterator[Piece]:
        return stream()

    async def requeue() -> None:
        """Admitted before."""

    async def scenario() -> None:
        ignore: Any = lambda *_, **__: None  # noqa: E731
        replicas: Any = SimpleNamespace(start_answer=start_answer, record_accepted=ignore)
        visit: Any = SimpleNamespace(requeue=requeue, accept=ignore)
        deadline: Any = SimpleNamespace(arrived=0.0, at=asyncio.get_running_loop().time() + 60)
        http = HttpRequest("POST", "/v1/chat/completions", b"", [], b"a body")
        attempt = Attempt(
            EngineRequest(http, jobs=[FILE], files=[FILE]),
            replicas,
            visit,
            deadline,
            SimpleNamespace(observe=ignore),  # type: ignore[arg-type]
        )
        response = await attempt.response()
        assert isinstance(response, StreamingResponse)
        assert (attempt.request.jobs, attempt.request.files, attempt.request.http.body) == ((), (), b"")
        assert [chunk async for chunk in response.body_iterator] == [b"data: 1\n\n", b"data: [DONE]\n\n"]

    asyncio.run(scenario())


@pytest.mark.parametrize("translated", [False, True])
def test_an_error_keeps_nothing_in_a_cycle(translated: bool) -> None:
    """`raise error from error` refers to itself: each request that was shed was kept until Python collected cycles."""
    error = EncoderLostError(503, "lost")

    async def fail() -> None:
        raise ValueError if translated else error

    async def scenario() -> None:
        failures = SimpleNamespace(to_client_error=lambda *_: error)
        with pytest.raises(EncoderLostError) as raised:
            await Replicas._translate_errors(cast(Replicas, SimpleNamespace(failures=failures)), fail())
        assert isinstance(raised.value.__cause__, ValueError) is translated
        assert raised.value.__cause__ is not error

        async def requeue() -> None:
            raise ValueError if translated else error

        replicas: Any = SimpleNamespace(to_client_error=lambda _: error, cancel=lambda *_, **__: None)
        visit: Any = SimpleNamespace(requeue=requeue)
        http = HttpRequest("POST", "/v1/chat/completions", b"", [], b"a body")
        attempt = Attempt(EngineRequest(http), replicas, visit, cast(Any, None), cast(Any, None))
        with pytest.raises(EncoderLostError) as raised:
            await attempt.response()
        assert raised.value.__cause__ is not error

    asyncio.run(scenario())
