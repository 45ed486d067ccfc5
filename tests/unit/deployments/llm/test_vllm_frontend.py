"""Answers of vLLM's application on their way to the ingress."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deployments.llm import vllm_frontend
from tests.unit.deployments.llm.stand_in_replica import replica, request


def test_large_answers_are_sent_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = replica()

    async def answer() -> list[Any]:
        return [piece async for piece in llm.handle(request())][1:]

    whole, *chunks = asyncio.run(answer())
    body = whole.body + b"".join(chunks)
    assert whole.complete
    for num_bytes in (len(body), len(body) - 1, len(body) // 2, 10):
        monkeypatch.setattr(vllm_frontend, "PIECE_BYTES", num_bytes)
        head, *chunks = asyncio.run(answer())
        assert head.body + b"".join(chunks) == body
        assert all(0 < len(piece) <= num_bytes for piece in [head.body, *chunks])
        assert head.complete is (not chunks)
