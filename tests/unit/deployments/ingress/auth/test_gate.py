"""When a client over its quota is told to come back."""

from __future__ import annotations

import asyncio
import time
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import IngressConfig, RateLimitConfig
from deployments.common.api_error import ApiError
from deployments.ingress.auth.gate import AccessControl, Client

QUOTA = 3000


async def refusal(gate: AccessControl, tokens: int) -> int | None:
    """The `Retry-After` of a request of that many visual tokens; None if it is admitted, and then it counts."""
    try:
        await gate.charge_visual_tokens(Client("client", None), tokens)
    except ApiError as error:
        return error.retry_after_s or 0
    return None


def gate() -> AccessControl:
    return AccessControl(IngressConfig(rate_limit=RateLimitConfig(visual_tokens_per_minute=QUOTA)), host="127.0.0.1")


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.floats(0, 90), st.integers(1, QUOTA)), max_size=6), st.integers(1, QUOTA))
def test_who_waits_as_told_is_admitted_and_not_much_earlier(history: list[tuple[float, int]], tokens: int) -> None:
    async def run() -> None:
        access = gate()
        for pause_s, number in history:
            now[0] += pause_s
            await refusal(access, number)
        wait_s = await refusal(access, tokens)
        if wait_s is None:
            return
        assert 1 <= wait_s <= 121
        now[0] += wait_s - 1.001
        if wait_s > 1:
            assert await refusal(access, tokens) is not None
        now[0] += 1.001
        assert await refusal(access, tokens) is None

    now = [1_790_000_000.0]
    with mock.patch.object(time, "time", side_effect=lambda: now[0]):
        asyncio.run(run())


def test_more_than_a_minutes_quota_has_no_delay() -> None:
    async def run() -> None:
        with pytest.raises(ApiError, match=f"has {QUOTA + 1} visual tokens, the quota is {QUOTA} a minute") as refused:
            await gate().charge_visual_tokens(Client("client", None), QUOTA + 1)
        assert refused.value.retry_after_s is None

    asyncio.run(run())
