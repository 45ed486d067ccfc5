"""On a real Ray Serve: work whose deadline has passed never reaches the encoder, and the metrics tell of it.

The language model is a stand-in (`stand_in_llm.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from tests.cluster.served import ServedApp
from tests.cluster.test_served_images import REQUEST_S, chat, told
from tests.serve.asking import settled
from tests.unit.deployments.samples import png
from tests.waiting import until

LIMIT_S = 8

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]


@pytest.fixture(autouse=True)
def released(app: ServedApp) -> Iterator[None]:
    yield
    app.encoder("release")


def test_a_deadline_that_passes_behind_the_gate_gives_up_its_place(app: ServedApp) -> None:
    """One image is at the gate; the one behind it is of no use any more before the gate opens: it is never encoded."""
    app.encoder("hold")
    before = app.encoder("state")["encoded"]
    settled(lambda: sum(value for name, value in app.exported("Ingress").items() if name.endswith("_total")))
    shed = app.exported("Ingress")

    async def late() -> tuple[httpx.Response, httpx.Response]:
        async with httpx.AsyncClient(timeout=REQUEST_S) as client:
            url = f"{app.url}/v1/chat/completions"
            at_the_gate = asyncio.create_task(client.post(url, json=chat(png(64, 64, (150, 0, 0)))))
            await asyncio.to_thread(until, lambda: app.encoder("state")["queued_tokens"] == 4, "an image at the gate")
            headers = {"x-request-timeout-s": str(LIMIT_S)}
            behind = asyncio.create_task(client.post(url, json=chat(png(320, 320, (151, 0, 0))), headers=headers))
            await asyncio.to_thread(until, lambda: app.ingress("in_flight") == (2, 104, 0), "both to be in flight")
            late = await behind
            await asyncio.to_thread(until, lambda: app.encoder("state")["queued_tokens"] == 4, "its place to be free")
            await asyncio.to_thread(app.encoder, "release")
            return await at_the_gate, late

    answered, dropped = asyncio.run(late())
    assert answered.status_code == 200
    assert told(dropped, 504)["message"] == f"the request took longer than {LIMIT_S} s, the limit"
    state = app.encoder("state")
    assert (state["encoded"], state["flights"]) == (before + 1, 0)

    def counted() -> bool:
        now = app.exported("Ingress")
        added = {name: now.get(name, 0) - shed.get(name, 0) for name in now if name.endswith("_total")}
        return (
            in_flight(now) == (0, 0, 0)
            and {
                "vitray_shed_requests_total": 1,
                "vitray_shed_tokens_total": 100,
                "vitray_admitted_tokens_total": 104,
            }.items()
            <= added.items()
        )

    until(counted, "what was shed in the metrics")


def in_flight(metrics: dict[str, float]) -> tuple[float | None, ...]:
    """Requests, and visual tokens in flight and queued; None before the first was told."""
    names = ("waiting_requests", "in_flight_tokens", "queued_tokens")
    return tuple(metrics.get(f"vitray_ingress_{name}") for name in names)
