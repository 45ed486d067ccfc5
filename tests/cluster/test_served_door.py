"""The door and hostile files over Serve's own HTTP proxy, with a real encoder replica and a stand-in for vLLM."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from configs.schema import AppConfig
from tests.cluster.served import Cluster
from tests.hostile import files
from tests.serve import browser as browsers
from tests.serve.soak import sampled
from tests.waiting import until

pytestmark = pytest.mark.slow

ALICE, BOB, NEW = "alice-has-a-key-of-her-own", "bob-has-another-key-of-his", "a-new-key-of-somebody-new"
CHAT = "/v1/chat/completions"
TOKENS_A_MINUTE = 2000
KEPT_BYTES = 10_000_000
"""Of an attack, at most; its files are several times as large."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"alice {ALICE}\nbob {BOB}\n")
    return file


@pytest.fixture(scope="module")
def url(cluster: Cluster, checkpoints: dict[str, Path], keys: Path) -> Iterator[str]:
    from ray import serve

    from encoder.checkpoint.vision_config import VisionConfig
    from tests.cluster.controlled import ControlledEncoder
    from tests.cluster.stand_in_llm import StandInLLM
    from tests.cluster.watched import WatchedIngress

    config = AppConfig.model_validate(
        {
            "model": str(checkpoints["qwen3_vl"]),
            "encoder_replica": {"decode_workers": 1, "num_gpus": 0},
            "ingress": {
                "max_image_pixels": 1_000_000,
                "auth": {"api_keys_file": str(keys), "management_routes": "closed"},
                "rate_limit": {"visual_tokens_per_minute": TOKENS_A_MINUTE},
            },
        }
    )
    vision = VisionConfig.from_checkpoint(checkpoints["qwen3_vl"])
    light: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0.1}, "max_ongoing_requests": 64}
    encoder = serve.deployment(name="Encoder", **light)(ControlledEncoder).bind(config)
    llm = serve.deployment(name="LLM", **light)(StandInLLM).bind(config, vision.width)
    ingress = serve.deployment(name="Ingress", **light)(WatchedIngress).bind(config, llm=llm, encoder=encoder)
    serve.run(ingress, name="door", route_prefix="/door")
    yield f"http://127.0.0.1:{cluster.http_port}/door"
    serve.delete("door")


def ask(url: str, key: str | None, data: bytes, **headers: str) -> httpx.Response:
    image = {"type": "image_url", "image_url": {"url": "data:;base64," + base64.b64encode(data).decode()}}
    body = {"messages": [{"role": "user", "content": [image]}]}
    sent = headers if key is None else {"authorization": f"Bearer {key}", **headers}
    return httpx.post(url + CHAT, json=body, headers=sent, timeout=60)


def test_keys(url: str, keys: Path) -> None:
    assert [ask(url, key, files.PNG).status_code for key in (ALICE, BOB, NEW, None)] == [200, 200, 401, 401]
    keys.write_text(f"alice {ALICE}\nbob {BOB}\nnew {NEW}\n")
    assert until(lambda: ask(url, NEW, files.PNG).status_code == 200, "the new key is let in")


def test_tenants_have_embeddings_of_their_own(url: str) -> None:
    alice, again, bob = (ask(url, key, files.JPEG).json()["images"][0]["uuid"] for key in (ALICE, ALICE, BOB))
    assert alice == again != bob


def test_what_is_for_the_operator_is_closed(url: str) -> None:
    headers = {"authorization": f"Bearer {ALICE}"}
    for path in ("/metrics", "/docs", "/openapi.json", "/load", "/version", "/cluster"):
        assert httpx.get(url + path, headers=headers, timeout=60).status_code == 404
        assert httpx.get(url + path, timeout=60).status_code == 401


def test_the_page_tells_that_the_cluster_is_closed(url: str) -> None:
    """In a real browser: to nobody without a key, and what is closed to whom has one."""
    with browsers.started() as browser:
        page = browsers.Watched(browser.new_context(viewport=browsers.VIEWPORT)).page
        page.goto(f"{url}/")
        state = page.locator("#cluster-state")
        expect(page.get_by_role("alert")).to_contain_text("no valid API key", timeout=browsers.TIMEOUT_MS)
        expect(state).not_to_contain_text("management_routes")
        page.get_by_label("API key of this server").fill(ALICE)
        page.get_by_role("button", name="Use it").click()
        expect(state).to_contain_text("management_routes", timeout=browsers.TIMEOUT_MS)


def test_headers_are_bounded(url: str) -> None:
    assert ask(url, ALICE, files.PNG, **{"x-long": "x" * 33_000}).status_code == 431
    assert ask(url, ALICE, files.PNG).status_code == 200


@pytest.mark.parametrize("name", files.header_bombs(100))
def test_a_header_bomb_of_megabytes(name: str, url: str) -> None:
    data = files.header_bombs(10_000_000)[name]
    answer = ask(url, ALICE, data)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("image 1 of 1 (messages[0].content[")
    assert ask(url, ALICE, files.PNG).status_code == 200


def test_damaged_files(url: str) -> None:
    for data in (files.PNG, files.JPEG, files.WEBP, files.GIF, files.BMP):
        answer = ask(url, BOB, data[: len(data) // 2])
        assert answer.status_code == 400
        assert "truncated or corrupt" in answer.json()["error"]["message"] or "not an image" in answer.text
    assert ask(url, BOB, files.PNG).status_code == 200


def test_memory_is_where_it_was(url: str) -> None:
    """After every attack of this file, once more: in the proxy, the ingress, the encoder and its decoder."""

    def held() -> dict[tuple[int, str], int]:
        return {
            (pid, role): sample.own_bytes
            for (pid, role), sample in sampled(os.getpid()).items()
            if role.startswith(("ray::ProxyActor", "ray::ServeReplica:door"))
        }

    def attack_all() -> None:
        for data in files.header_bombs(2_000_000).values():
            assert ask(url, ALICE, data).status_code == 400
        for data in (files.PNG, files.JPEG, files.WEBP, files.GIF):
            assert ask(url, BOB, data[: len(data) // 2]).status_code == 400
            assert ask(url, None, data, **{"x-long": "x" * 33_000}).status_code == 431

    attack_all()
    levels = [held()]
    for _ in range(2):
        attack_all()
        levels.append(held())
    assert levels[0].keys() == levels[1].keys() == levels[2].keys(), "no process died of it"
    assert len(levels[0]) >= 4
    # What is kept of an attack is kept of each; allocators give back or take 20 MB now and then.
    kept = {one: min(levels[1][one] - first, levels[2][one] - levels[1][one]) for one, first in levels[0].items()}
    assert {one: number for one, number in kept.items() if number > KEPT_BYTES} == {}


def test_visual_tokens_have_a_quota(url: str) -> None:
    """The last test: it uses up what one key has."""
    large = files.encoded(files.picture(900, 900), "JPEG")
    answers = [ask(url, NEW, large).status_code for _ in range(6)]
    assert answers[0] == 200
    assert answers[-1] == 429
    assert ask(url, ALICE, files.PNG).status_code == 200
