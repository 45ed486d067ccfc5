"""Tenants of one server: their quotas, and their separation in every cache."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from deployments.ingress.auth.gate import EXPIRE_EVERY_S
from deployments.ingress.http.routes import ROUTES, Service
from tests.hostile.ingress_server import KEY, OTHER_KEY, PICTURE, TEXT, asked, bearer, started, statuses
from tests.unit.deployments.stand_ins import IMAGE, StandIns


@pytest.mark.usefixtures("early_in_a_minute")
def test_requests_are_counted_by_the_keys_name(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys.write_text(f"alice {KEY}\nalice {KEY}-two\nbob {OTHER_KEY}\n")
    ingress = started(
        monkeypatch, StandIns(), api_keys_file=str(keys), ingress={"rate_limit": {"requests_per_minute": 3}}
    )
    alice, too, bob = ({"headers": bearer(key), "json": TEXT} for key in (KEY, KEY + "-two", OTHER_KEY))
    answers = asked(ingress, alice, too, alice, too, alice, bob)
    assert statuses(answers) == [200, 200, 200, 429, 429, 200]
    assert 1 <= int(answers[3].headers["retry-after"]) <= 60
    assert answers[3].json()["error"]["message"] == "over the quota of 3 requests a minute; try again"


class Looked(dict[str, float]):
    """Counts who looks through all of it."""

    times = 0

    def keys(self) -> Any:
        self.times += 1
        return super().keys()


@pytest.mark.usefixtures("early_in_a_minute")
def test_a_request_does_not_look_at_every_clients_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each looked through all that there were for some that had expired: 2 ms on the event loop with 10,000 clients in
    two minutes, 64 with 60,000, and a network of IPv6 has as many addresses."""
    ingress = started(
        *(monkeypatch, StandIns()),
        mode="none",
        tenant_header="X-Tenant",
        ingress={"rate_limit": {"requests_per_minute": 2}},
    )
    ingress._access._counters.expirations = looked = Looked()
    clients = [{"headers": {"x-tenant": f"tenant {number}"}, "json": TEXT} for number in range(40)]
    begun = time.monotonic()
    assert statuses(asked(ingress, *clients)) == [200] * 40
    assert 1 <= looked.times <= 2 + (time.monotonic() - begun) / EXPIRE_EVERY_S
    assert len(looked) == 40


def test_visual_tokens_are_counted(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each picture of the samples is 4 tokens."""
    stand_ins = StandIns()
    ingress = started(
        monkeypatch, stand_ins, api_keys_file=str(keys), ingress={"rate_limit": {"visual_tokens_per_minute": 9}}
    )
    alice, bob = ({"headers": bearer(key), "json": PICTURE} for key in (KEY, OTHER_KEY))
    large = {"headers": bearer(OTHER_KEY), "json": {"messages": [{"role": "user", "content": [IMAGE] * 3}]}}
    answers = asked(ingress, alice, alice, alice, {**alice, "json": TEXT}, bob, large)
    assert statuses(answers) == [200, 200, 429, 200, 200, 429]
    assert answers[2].json()["error"]["message"] == "over the quota of 9 visual tokens a minute; try again"
    assert "the request has 12 visual tokens, the quota is 9 a minute" in answers[5].json()["error"]["message"]
    assert len(stand_ins.encodings) == 3, "nothing is encoded for a request over its quota"


def sent(stand_ins: StandIns) -> list[tuple[str | None, str | None]]:
    """What vLLM is sent of every request: its salt and the first image's digest."""
    bodies = [json.loads(request.body) for request in stand_ins.requests]
    return [
        (body.get("cache_salt"), headers[0].digest if headers else None)
        for body, headers in zip(bodies, stand_ins.headers, strict=True)
    ]


def test_tenants_are_apart_in_every_cache(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same request of two keys: other digests, other salts for vLLM's prefixes; of one name's keys the same."""
    keys.write_text(f"alice {KEY}\nalice {KEY}-two\nbob {OTHER_KEY}\n")
    stand_ins = StandIns()
    ingress = started(monkeypatch, stand_ins, api_keys_file=str(keys))
    requests = [{"headers": bearer(key), "json": PICTURE} for key in (KEY, KEY + "-two", OTHER_KEY)]
    assert statuses(asked(ingress, *requests)) == [200] * 3
    alice, too, bob = sent(stand_ins)
    assert alice == too
    assert None not in (*alice, *bob)
    assert set(alice).isdisjoint(bob)
    assert not any(KEY.encode() in request.body for request in stand_ins.requests)


def test_a_client_cannot_choose_another_tenants_salt(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins = StandIns()
    ingress = started(monkeypatch, stand_ins, api_keys_file=str(keys))
    asked(ingress, {"headers": bearer(KEY), "json": PICTURE})
    ((salt, _),) = sent(stand_ins)
    asked(
        ingress,
        {"headers": bearer(OTHER_KEY), "json": {**PICTURE, "cache_salt": salt}},
        {"headers": bearer(KEY), "json": {**PICTURE, "cache_salt": "own"}},
        {"headers": bearer(KEY), "json": {**PICTURE, "cache_salt": "other"}},
    )
    salts = [salt for salt, _ in sent(stand_ins)]
    assert len(set(salts)) == 4
    refused = asked(ingress, {"headers": bearer(KEY), "json": {**TEXT, "cache_salt": 7}})
    assert statuses(refused) == [400]


BODY_ROUTES = [
    route.path.replace("{id}", "resp_1")
    for route in ROUTES
    if "POST" in route.methods and route.service in (Service.IMAGES, Service.TEXT)
]
"""Routes of the table that pass a body to vLLM; a new row is tested too."""


@pytest.mark.parametrize("path", BODY_ROUTES)
def test_tenants_are_apart_on_every_route_that_takes_a_body(
    path: str, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second list named the routes that get a salt: one that was missing there would have shared its prefix cache."""
    stand_ins = StandIns()
    ingress = started(monkeypatch, stand_ins, api_keys_file=str(keys))
    body = {"prompt": "x", "input": "x", "messages": [], "seed": 7, "store": False}
    asked(ingress, *({"url": path, "headers": bearer(key), "json": body} for key in (KEY, OTHER_KEY)))
    one, other = (json.loads(request.body) for request in stand_ins.requests)
    assert one["cache_salt"] != other["cache_salt"]
    assert {**one, "cache_salt": 0} == {**other, "cache_salt": 0} == {**body, "cache_salt": 0}


@pytest.mark.usefixtures("early_in_a_minute")
def test_a_header_of_the_operators_names_the_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins = StandIns()
    ingress = started(
        monkeypatch,
        stand_ins,
        mode="none",
        tenant_header="X-Tenant",
        ingress={"rate_limit": {"requests_per_minute": 2}},
    )
    one, other = ({"headers": {"x-tenant": name}, "json": PICTURE} for name in ("one", "other"))
    answers = asked(ingress, one, other, one, one, other, {"headers": {"x-tenant": "x" * 300}, "json": TEXT})
    assert statuses(answers) == [200, 200, 200, 429, 200, 400]
    first, second, third, fourth = sent(stand_ins)
    assert (first, second) == (third, fourth)
    assert set(first).isdisjoint(second)
    nobody = StandIns()
    unnamed = started(monkeypatch, nobody, mode="none")
    asked(unnamed, {"headers": {"x-tenant": "one"}, "json": PICTURE})
    assert sent(nobody)[0][0] is None, "without the setting the header says nothing"
