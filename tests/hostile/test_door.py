"""Who is let in, over a real HTTP server with stand-ins for the replicas: keys, quotas, bounds, tenants, web pages."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue
from starlette.requests import Request

from configs.schema import AuthConfig, IngressConfig
from deployments.http_proxy import limits as proxy_bounds
from deployments.ingress.admission import Admission
from deployments.ingress.auth import gate as gate_module
from deployments.ingress.auth.bind_address import is_loopback
from deployments.ingress.auth.gate import AccessControl, UnprotectedServerError
from deployments.ingress.dashboard.cluster_view import ClusterView
from tests.hostile.ingress_server import CHAT, KEY, TEXT, asked, bearer, started, statuses
from tests.unit.deployments.stand_ins import StandIns

MANAGEMENT = ("/metrics", "/load", "/version", "/docs", "/openapi.json")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.4", "example.org", None])
def test_without_keys_it_does_not_start_where_strangers_reach_it(host: str | None) -> None:
    with pytest.raises(UnprotectedServerError, match=r"has no API keys: set ingress\.auth\.api_keys_file"):
        AccessControl(IngressConfig(), host=host)
    AccessControl(IngressConfig(auth=AuthConfig(mode="none")), host=host)


@pytest.mark.parametrize(("host", "bounded", "warned"), [("0.0.0.0", 0, 1), ("0.0.0.0", 1, 0), ("::1", 0, 0)])
def test_a_proxy_without_bounds_is_told_of(
    host: str, bounded: int, warned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(gate_module.logger, "warning", lambda text, *values: told.append(text % values))
    monkeypatch.delenv(proxy_bounds.VARIABLE, raising=False)
    if bounded:
        monkeypatch.setenv(proxy_bounds.VARIABLE, proxy_bounds.IMPORT_PATH)
    AccessControl(IngressConfig(auth=AuthConfig(mode="none")), host=host)
    assert len([text for text in told if proxy_bounds.VARIABLE in text]) == warned


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("[::1]", True), ("localhost", True), ("LOCALHOST", True)]
    + [(host, False) for host in ("", "0.0.0.0", "::", "10.0.0.1", "localhost.example.org", "127.0.0.1.example.org")],
)
def test_what_loopback_is(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": f"Bearer {KEY[:-1]}"},
        {"authorization": f"Bearer {KEY} {KEY}"},
        {"authorization": "Bearer " + "x" * 10_000},
        {"x-api-key": f"{KEY}x"},
        {"x-api-key": f"Bearer {KEY}"},
        {"authorization": "Bearer other", "x-api-key": KEY},
        [("x-api-key", KEY), ("x-api-key", "other")],
        {"cookie": f"authorization=Bearer {KEY}"},
        [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer other")],
        {"authorization": b"Bearer \xff\xfe"},
    ],
)
def test_no_valid_key_is_a_401_everywhere(headers: Any, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins = StandIns()
    ingress = started(monkeypatch, stand_ins, api_keys_file=str(keys))
    answers = asked(
        ingress,
        {"headers": headers, "json": TEXT},
        {"headers": headers, "method": "GET", "url": "/v1/models"},
        {"headers": headers, "method": "GET", "url": "/nothing/here"},
        {"headers": headers, "method": "GET", "url": "/metrics"},
    )
    assert statuses(answers) == [401] * 4, "what is served here is nobody's business either"
    assert all(answer.headers["www-authenticate"] == "Bearer" for answer in answers)
    assert answers[0].json()["error"]["code"] == "invalid_api_key"
    assert stand_ins.requests == []
    good = {"headers": bearer(KEY), "json": TEXT}
    other = {"headers": {"Authorization": f"bearer  {KEY}"}, "json": TEXT}
    of_anthropics_clients = {"headers": {"x-api-key": KEY}, "json": TEXT}
    assert statuses(asked(ingress, good, other, of_anthropics_clients)) == [200] * 3


def test_without_a_door_everybody_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the requests above do where nothing is checked."""
    ingress = started(monkeypatch, StandIns(), mode="none", management_routes="open")
    assert statuses(asked(ingress, {"json": TEXT}, {"method": "GET", "url": "/metrics"})) == [200, 200]


def test_load_balancers_need_no_key(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ingress = started(monkeypatch, StandIns(), api_keys_file=str(keys))
    gets = [
        {"method": "GET", "url": url} for url in ("/health", "/ping", "/health/", "/health//", "/health/../metrics")
    ]
    assert statuses(asked(ingress, *gets))[:2] == [200, 200]
    assert set(statuses(asked(ingress, *gets))[2:]) == {401}


PROBES = [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")]


@pytest.mark.parametrize(("method", "path"), PROBES)
def test_a_probe_needs_no_body_and_no_replica(
    method: str, path: str, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its body was read without a key, up to 64 MiB in ten minutes, parsed, and sent to a language model. A connection
    that announced one and sent nothing kept one of the ingress' 1024 places for 30 s."""
    stand_ins = StandIns()

    async def never() -> Any:
        raise AssertionError("the body is read")

    async def probe() -> int:
        ingress = started(monkeypatch, stand_ins, api_keys_file=str(keys))
        headers = [(b"content-length", b"60000000")]
        scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers}
        return (await ingress(Request(scope, never))).status_code

    assert asyncio.run(probe()) == 200
    assert stand_ins.requests == []
    stand_ins.run()
    assert asyncio.run(probe()) == 503


@pytest.mark.usefixtures("early_in_a_minute")
def test_probes_are_outside_quotas_and_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by its address, a balancer that probes each second got 429 from a quota of 60 a minute; and 503 where the
    line was full, so that it took busy nodes out of service."""
    probes = [{"method": method, "url": path} for method, path in PROBES]

    async def nobody(_: Admission, late: object) -> Any:
        raise AssertionError("a probe stands in line")

    with monkeypatch.context() as patch:
        patch.setattr(Admission, "visit", nobody)
        ingress = started(monkeypatch, StandIns(), mode="none", ingress={"rate_limit": {"requests_per_minute": 1}})
        assert statuses(asked(ingress, *probes)) == [200] * 3
    assert statuses(asked(ingress, *probes, {"json": TEXT}, {"json": TEXT}, *probes)) == [200] * 4 + [429] + [200] * 3


def test_the_page_needs_no_key_and_what_it_asks_does(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ingress = started(monkeypatch, StandIns(), api_keys_file=str(keys), management_routes="open")
    paths = ("/", "/page/main.js", "/cluster", "/page/none.js", "/page/../metrics", "/v1/models")
    gets = [{"method": "GET", "url": path} for path in paths]
    assert statuses(asked(ingress, *gets)) == [200, 200, 401, 401, 401, 401]


@pytest.mark.usefixtures("early_in_a_minute")
def test_an_open_page_takes_nothing_of_a_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(_: ClusterView) -> dict[str, JsonValue]:
        return {}

    monkeypatch.setattr(ClusterView, "get", nothing)
    ingress = started(
        monkeypatch,
        StandIns(),
        mode="none",
        management_routes="open",
        ingress={"rate_limit": {"requests_per_minute": 1}},
    )
    page = [{"method": "GET", "url": path} for path in ("/", "/page/main.js", "/cluster", "/cluster")]
    assert statuses(asked(ingress, *page, {"json": TEXT}, {"json": TEXT})) == [200] * 5 + [429]


def test_keys_are_exchanged_while_the_server_runs(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ingress = started(monkeypatch, StandIns(), api_keys_file=str(keys))
    old, new = {"headers": bearer(KEY), "json": TEXT}, {"headers": bearer("a-new-key-for-alice-alone"), "json": TEXT}
    assert statuses(asked(ingress, old, new)) == [200, 401]
    keys.write_text("alice a-new-key-for-alice-alone\n")
    assert statuses(asked(ingress, old, new)) == [401, 200]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:8000"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "app.localhost"}, 200),
        ({"origin": "http://localhost:3000"}, 200),
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"host": "localhost.evil.example:8000"}, 403),
        ({"host": "user@evil.example"}, 403),
        ({"host": "[::1"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1.evil.example"}, 403),
        ({"origin": "http://localhost@evil.example"}, 403),
    ],
)
def test_a_web_page_cannot_use_a_server_without_keys(
    headers: dict[str, str], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page from anywhere may send requests to loopback from its reader's browser; the name in `Host` gives it away
    where it has changed its own address to read the answers."""
    ingress = started(monkeypatch, StandIns(), host="127.0.0.1")
    assert statuses(asked(ingress, {"headers": headers, "json": TEXT})) == [status]


def test_other_origins_get_no_leave(monkeypatch: pytest.MonkeyPatch, keys: Path) -> None:
    ingress = started(monkeypatch, StandIns(), api_keys_file=str(keys))
    ask = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    preflight, answer = asked(
        ingress,
        {"method": "OPTIONS", "headers": bearer(KEY, **ask)},
        {"headers": bearer(KEY, origin="https://evil.example"), "json": TEXT},
    )
    assert statuses([preflight, answer]) == [405, 200]
    assert not any(name.startswith("access-control") for found in (preflight, answer) for name in found.headers)


@pytest.mark.parametrize(
    ("host", "setting", "is_open"),
    [
        ("127.0.0.1", "auto", True),
        ("0.0.0.0", "auto", False),
        ("127.0.0.1", "closed", False),
        ("0.0.0.0", "open", True),
    ],
)
def test_routes_for_the_operator_are_closed_to_the_outside(
    host: str, setting: str, is_open: bool, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingress = started(monkeypatch, StandIns(), host=host, management_routes=setting, api_keys_file=str(keys))
    gets = [{"method": "GET", "url": url, "headers": bearer(KEY)} for url in MANAGEMENT if url != "/openapi.json"]
    assert set(statuses(asked(ingress, *gets))) == {200 if is_open else 404}


@pytest.mark.parametrize(
    "request_",
    [
        {"headers": {"x-long": "x" * 33_000}},
        {"headers": [(f"x-{number}", "y") for number in range(101)]},
        {"url": CHAT + "?q=" + "x" * 33_000},
        {"url": "/" + "x" * 33_000},
    ],
)
def test_headers_are_bounded(request_: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ingress = started(monkeypatch, StandIns(), mode="none")
    refused, good = asked(ingress, {"json": TEXT, **request_}, {"json": TEXT})
    assert statuses([refused, good]) == [431, 200]
    assert refused.json()["error"]["code"] == "headers_too_large"


@pytest.mark.parametrize("field", ["kv_transfer_params", "ec_transfer_params", "prompt_embeds", "media_io_kwargs"])
def test_fields_that_would_send_the_engine_somewhere_are_refused(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins = StandIns()
    ingress = started(monkeypatch, stand_ins, mode="none")
    value = {"do_remote_prefill": True, "remote_host": "169.254.169.254", "remote_port": 80}
    (refused,) = asked(ingress, {"json": {**TEXT, field: value}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert stand_ins.requests == []
