"""One request is one trace: the client's, through Serve's proxy, ingress, encoder and language model replica.

Spans are collected over OTLP from the processes of a real Ray Serve; the language model is a stand-in.
"""

from __future__ import annotations

import asyncio
import secrets

import httpx
import pytest

from tests.cluster.served import Cluster, ServedApp
from tests.cluster.span_receiver import Span
from tests.cluster.test_served_images import REQUEST_S, chat
from tests.unit.deployments.samples import png
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]

ENCODED = ["vitray.decode_image", "vitray.encode_queue", "vitray.encode"]
ANSWERED = ["vitray.transfer", "vitray.first_token", "vitray.generate"]


class Client:
    """A client's own span, sampled."""

    def __init__(self, flags: str = "01") -> None:
        self.trace_id, self.span_id = secrets.token_hex(16), secrets.token_hex(8)
        self.headers = {"traceparent": f"00-{self.trace_id}-{self.span_id}-{flags}"}


def ask(app: ServedApp, color: int, client: Client | None = None) -> httpx.Response:
    body = chat(png(96, 64, (color, 1, 1)), png(64, 64, (color, 2, 2)))
    headers = client.headers if client else None
    answer = httpx.post(f"{app.url}/v1/chat/completions", json=body, headers=headers, timeout=REQUEST_S)
    assert answer.status_code == 200, answer.text
    return answer


def stages(spans: list[Span]) -> list[str]:
    return [span.name for span in spans if span.name.startswith("vitray.")]


def finished(cluster: Cluster, client: Client, *expected: str) -> list[Span]:
    """The client's trace, when every span that is expected is there."""
    wanted = sorted(expected)
    until(lambda: sorted(stages(cluster.spans.of(client.trace_id))) == wanted, f"spans {wanted}")
    return cluster.spans.of(client.trace_id)


def test_a_request_is_one_trace_with_every_stage(app: ServedApp, cluster: Cluster) -> None:
    client = Client()
    ask(app, 1, client)
    finished(cluster, client, "vitray.fetch", "vitray.admission", *(2 * ENCODED), *ANSWERED)

    def ends_in_root(span: Span, spans: list[Span]) -> bool:
        by_id = {one.span_id: one for one in spans}
        while span.span_id != span.parent_id:
            if span.parent_id == client.span_id:
                return True
            if span.parent_id not in by_id:
                return False
            span = by_id[span.parent_id]
        return False

    def whole() -> list[Span]:
        """The trace, where it is one; Serve's own spans may come a moment later."""
        spans = cluster.spans.of(client.trace_id)
        return spans if all(ends_in_root(span, spans) for span in spans if span.name.startswith("vitray.")) else []

    spans = until(whole, "Serve's own")
    (root,) = [span for span in spans if span.parent_id == client.span_id]
    assert root.name.startswith("proxy_http_request Ingress POST")
    assert all(span.start_s <= span.end_s for span in spans)
    first = {span.name: span for span in reversed(spans)}
    # Those of one process follow on each other.
    for before, after in [("vitray.fetch", "vitray.admission"), ("vitray.transfer", "vitray.first_token"),
                          ("vitray.first_token", "vitray.generate")]:  # fmt: skip
        assert first[before].end_s <= first[after].start_s + 0.001
    assert first["vitray.fetch"].attributes == {"vitray.images": 2}
    assert sorted(one.attributes["vitray.visual_tokens"] for one in spans if one.name == "vitray.encode") == [4, 6]
    assert first["vitray.transfer"].attributes["vitray.bytes"] > 0


def test_vllm_continues_the_trace(app: ServedApp) -> None:
    """It gets the replica's span as its parent, in the client's trace."""
    client = Client()
    _, trace_id, parent, flags = ask(app, 2, client).json()["traceparent"].split("-")
    assert (trace_id, flags) == (client.trace_id, "01")
    assert parent != client.span_id


def test_what_is_cached_says_so(app: ServedApp, cluster: Cluster) -> None:
    ask(app, 3)
    client = Client()
    ask(app, 3, client)
    finished(cluster, client, "vitray.fetch", "vitray.admission", *(2 * ["vitray.encode_cached"]), *ANSWERED)


def test_without_images(app: ServedApp, cluster: Cluster) -> None:
    client = Client()
    answer = httpx.post(f"{app.url}/v1/chat/completions", json=chat(), headers=client.headers, timeout=REQUEST_S)
    assert answer.status_code == 200
    finished(cluster, client, "vitray.first_token", "vitray.generate")


def test_who_does_not_ask_is_not_traced(app: ServedApp, cluster: Cluster) -> None:
    """None of those that are not sampled: with no header, or where it says no."""
    before, unsampled, sampled = cluster.spans.traces(), Client("00"), Client()
    ask(app, 4)
    ask(app, 5, unsampled)
    ask(app, 6, sampled)  # when this one's are there, the others' would be
    finished(cluster, sampled, "vitray.fetch", "vitray.admission", *(2 * ENCODED), *ANSWERED)
    assert cluster.spans.traces() - before == {sampled.trace_id}


def test_a_client_that_shares_an_encoding(app: ServedApp, cluster: Cluster) -> None:
    """Two requests with one image at once: each trace has what happened for it."""
    shared = app.ingress("counts")["COALESCED_ENCODES"]
    app.encoder("hold")
    clients = [Client(), Client()]

    async def both() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=REQUEST_S) as http:
            url, body = f"{app.url}/v1/chat/completions", chat(png(64, 64, (7, 7, 7)))
            tasks = [asyncio.create_task(http.post(url, json=body, headers=one.headers)) for one in clients]
            await asyncio.to_thread(
                until, lambda: app.ingress("counts")["COALESCED_ENCODES"] == shared + 1, "both to have come"
            )
            await asyncio.to_thread(app.encoder, "release")
            return await asyncio.gather(*tasks)

    try:
        assert [answer.status_code for answer in asyncio.run(both())] == [200, 200]
    finally:
        app.encoder("release")
    until(lambda: all("vitray.generate" in stages(cluster.spans.of(one.trace_id)) for one in clients), "both ends")
    until(
        lambda: sorted("vitray.encode" in stages(cluster.spans.of(one.trace_id)) for one in clients) == [False, True],
        "one encoding",
    )
