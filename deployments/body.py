"""A request's body, bounded in bytes and in how slowly it may come. It must not know what is in it."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from deployments.errors import ApiError

GRACE_S = 30.0
"""For which a body may come as slowly as it likes."""
LEAST_BYTES_PER_S = 16_384
"""Then, on average: a request that is being sent keeps a place at the ingress."""


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413 over `max_bytes`, 408 where it comes too slowly, 400 where the client leaves before its end.
    """
    started = asyncio.get_running_loop().time()
    chunks: list[bytes] = []
    total = 0
    stream = request.stream()
    try:
        while True:
            async with asyncio.timeout_at(started + GRACE_S + total / LEAST_BYTES_PER_S):
                chunk = await anext(stream, None)
            if chunk is None:
                return b"".join(chunks)
            total += len(chunk)
            if total > max_bytes:
                raise ApiError(413, f"the request body is over the limit of {max_bytes} bytes", code="body_too_large")
            chunks.append(chunk)
    except TimeoutError as error:
        pace = f"after {GRACE_S:g} s, {LEAST_BYTES_PER_S} bytes a second are the least"
        raise ApiError(408, f"the request body comes too slowly: {pace}", code="body_too_slow") from error
    except ClientDisconnect as error:
        raise ApiError(400, "the client closed the connection while it was sending") from error
