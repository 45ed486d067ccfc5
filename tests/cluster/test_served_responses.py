"""Stored responses over several replicas of the ingress and of language models, on a real Ray Serve."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.served import Cluster, ServedApp, deploy
from tests.unit.deployments.samples import png

pytestmark = pytest.mark.slow

CONVERSATIONS, TURNS = 16, 3
"""Each conversation is at one language model: that all are at the same one has a probability of 1 in 32,768."""
ROOM = 400_000
"""Bytes of the store; a text of TEXT characters fits once."""
TEXT = 300_000


@pytest.fixture(scope="module")
def app(cluster: Cluster, checkpoints: dict[str, Path]) -> Iterator[ServedApp]:
    from ray import serve

    ingress: dict[str, object] = {
        "auth": {"mode": "none", "tenant_header": "x-tenant"},
        "stored_responses_bytes": ROOM,
    }
    yield deploy(cluster, checkpoints["qwen3_vl"], "stored", replicas=2, ingress=ingress, stores=True)
    serve.delete("stored")


def created(app: ServedApp, given: object, tenant: str = "alice", **fields: Any) -> httpx.Response:
    body = {"input": [{"role": "user", "content": given}] if isinstance(given, str) else given, **fields}
    return httpx.post(app.url + "/v1/responses", json=body, headers={"x-tenant": tenant}, timeout=60)


def told(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    seen: dict[str, Any] = json.loads(response.json()["output"][0]["content"][0]["text"])
    return seen


def image(number: int) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(png(56, 56, (number, 7, 9))).decode()
    return {"role": "user", "content": [{"type": "input_image", "image_url": url}]}


def test_turns_go_on_at_any_replica(app: ServedApp) -> None:
    """Each turn has a connection of its own; both ingresses and both language models take part."""
    served = set()
    for number in range(CONVERSATIONS):
        answer = created(app, [image(number)])
        (digest,) = told(answer)["digests"]
        for turn in range(1, TURNS):
            answer = created(app, f"turn {turn}", previous_response_id=answer.json()["id"])
            seen = told(answer)
            assert (seen["digests"], seen["items"]) == ([digest], 2 * turn + 1)
            served.add(seen["replica"])
        found = httpx.get(f"{app.url}/v1/responses/{answer.json()['id']}", headers={"x-tenant": "alice"}, timeout=60)
        assert found.json() == answer.json()
    assert len(served) == 2
    assert all(counts["GRPC_CALLS"] > 0 for counts in app.ingresses("counts")), "each ingress has had some"


def test_tenants_are_apart(app: ServedApp) -> None:
    mine = created(app, "x").json()["id"]
    for method, suffix in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
        for name in (mine, "resp_" + "0" * 32):
            url = f"{app.url}/v1/responses/{name}{suffix}"
            assert httpx.request(method, url, headers={"x-tenant": "bob"}, timeout=60).status_code == 404
    assert created(app, "y", "bob", previous_response_id=mine).status_code == 404
    assert created(app, "y", previous_response_id=mine).status_code == 200


def test_the_store_is_bounded_for_all_replicas(app: ServedApp) -> None:
    first = created(app, "a" * TEXT).json()["id"]
    assert created(app, "y", previous_response_id=first).status_code == 200
    created(app, "b" * TEXT)
    assert created(app, "y", previous_response_id=first).status_code == 404
