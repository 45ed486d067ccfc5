"""Images through the ingress and the encoder replica on a real Ray Serve: shared, cached, refused, cancelled, lost.

The language model is a stand-in that answers with what it was given (`stand_in_llm.py`). The tests stand in an order,
and so in one file: the last of them break the encoder.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from ray.exceptions import RayActorError

from configs.schema import AppConfig
from deployments.encoder_replica.own_tower import load_own_encoder
from tests.cluster.served import RETRY_AFTER_S, START_S, ServedApp
from tests.serve.asking import reaches, settled
from tests.unit.deployments.samples import png
from tests.waiting import until

REQUEST_S = 60

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]


def chat(*files: bytes, **fields: Any) -> dict[str, Any]:
    urls = ["data:image/png;base64," + base64.b64encode(file).decode() for file in files]
    parts: list[dict[str, Any]] = [{"type": "text", "text": "What is it?"}]
    parts += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"model": "m", "messages": [{"role": "user", "content": parts}], **fields}


def ask(app: ServedApp, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=REQUEST_S)


def ask_all(app: ServedApp, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    async def all_at_once() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=REQUEST_S) as client:
            url = f"{app.url}/v1/chat/completions"
            return await asyncio.gather(*[client.post(url, json=body) for body in bodies])

    return asyncio.run(all_at_once())


def told(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer in OpenAI's shape."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def added(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in after if after[name] != before[name]}


def exported_level(app: ServedApp) -> float | None:
    return app.exported("Encoder").get("vitray_encoder_queued_tokens")


def is_replaced(app: ServedApp, pid: int) -> bool:
    """Whether another process is the encoder now."""
    try:
        return bool(app.encoder("state")["pid"] != pid)
    except RayActorError:  # the question reached the old one in its last moment
        return False


@pytest.fixture(autouse=True)
def released(app: ServedApp) -> Iterator[None]:
    """Nothing is left waiting at the encoder's gate."""
    yield
    app.encoder("release")
    app.encoder("fail_for_several", fail=False)


def test_embeddings_reach_the_language_model(app: ServedApp, checkpoints: dict[str, Path]) -> None:
    files = [png(320, 320), png(64, 96, (0, 0, 250))]
    images = ask(app, chat(*files)).json()["images"]
    path = checkpoints["qwen3_vl"]
    encoder = load_own_encoder(path, AppConfig(model=str(path)))
    for found, expected in zip(images, encoder.encode(files), strict=True):
        assert found["shape"] == list(expected.tokens.shape)
        assert found["grid"] == list(expected.grid_thw)
        assert found["uuid"] == expected.digest
        assert found["dtype"] == "torch.float32"
        assert found["norm"] == pytest.approx(float(torch.linalg.norm(expected.tokens)), rel=1e-4)


def test_embeddings_are_read_from_the_encoders_shared_memory(app: ServedApp) -> None:
    assert ask(app, chat(png(640, 320, (1, 2, 3)))).status_code == 200
    assert app.llm("state")["paths"] == ["engine_loads"]


def test_the_ingress_loads_nothing_that_computes(app: ServedApp) -> None:
    """A replica of it has a fifth of a gigabyte and is up in half the time."""
    assert ask(app, chat(png())).status_code == 200
    assert {"torch", "triton", "vllm", "transformers"} & set(app.ingress("modules")) == set()


def test_an_embedding_that_cannot_be_had_from_shared_memory_is_read_by_tcp(app: ServedApp) -> None:
    """The request is not tried again, and the client notices nothing."""
    body = chat(png(320, 640, (4, 5, 6)))
    before, first = app.ingress("counts"), ask(app, body).json()["images"]
    app.encoder("stop_lending")
    try:
        assert ask(app, body).json()["images"] == first
        assert app.llm("state")["paths"] == ["tcp"]
        assert added(before, app.ingress("counts")) == {"GRPC_CALLS": 2, "EMBEDDING_DIRECTORY_HITS": 1}
        assert ask(app, chat(png(320, 640, (4, 5, 7)))).status_code == 200
        assert app.llm("state")["paths"] == ["tcp"]
    finally:
        app.encoder("lend_again")
    assert ask(app, chat(png(320, 640, (4, 5, 8)))).status_code == 200
    assert app.llm("state")["paths"] == ["engine_loads"]


def test_nothing_is_left_behind(app: ServedApp) -> None:
    assert ask(app, chat(png())).status_code == 200
    assert app.llm("state")["keys"] == 0
    assert (app.encoder("state")["flights"], app.encoder("state")["queued_tokens"]) == (0, 0)


def test_a_replica_reports_its_work(app: ServedApp) -> None:
    """An image of 320² is 100 visual tokens; work stays its own from the call until the answer, decoding included."""
    app.encoder("hold")

    async def one() -> dict[str, float]:
        async with httpx.AsyncClient(timeout=REQUEST_S) as client:
            body = chat(png(320, 320, (9, 8, 7)))
            answer = asyncio.create_task(client.post(f"{app.url}/v1/chat/completions", json=body))
            await asyncio.to_thread(until, lambda: app.encoder("state")["queued_tokens"] == 100, "an image at the GPU")
            busy: dict[str, float] = await asyncio.to_thread(app.encoder, "record_autoscaling_stats")
            await asyncio.to_thread(app.encoder, "release")
            assert (await answer).status_code == 200
            return busy

    busy, idle = asyncio.run(one()), app.encoder("record_autoscaling_stats")
    assert (busy["backlog_tokens"], idle["backlog_tokens"]) == (100, 0)
    assert busy["arriving_tokens_per_s"] > 0
    assert idle["tokens_per_s"] > 0
    assert 0 < idle["tokens_per_image"] < 1000
    assert idle["cache_bytes"] > busy["cache_bytes"]


def test_text_alone_touches_no_encoder(app: ServedApp) -> None:
    app.encoder("hold")
    before = app.encoder("counts")["CACHE_MISSES"]
    answer = ask(app, chat())
    assert (answer.status_code, answer.json()["images"]) == (200, [])
    assert "fetch" not in answer.headers["server-timing"]
    assert app.encoder("counts")["CACHE_MISSES"] == before


def test_what_is_not_ours_reaches_the_language_model_as_it_came(app: ServedApp) -> None:
    fields = {"temperature": 0.25, "tools": [{"type": "function", "function": {"name": "f"}}], "unknown": [None, 1e-7]}
    body = ask(app, chat(png(), **fields)).json()["body"]
    assert {name: body[name] for name in fields} == fields
    assert body["messages"][0]["content"][0] == {"type": "text", "text": "What is it?"}


def test_an_image_is_encoded_once_and_then_cached(app: ServedApp) -> None:
    body = chat(png(96, 64, (9, 9, 9)))
    before = app.encoder("counts")
    first, second = ask(app, body), ask(app, body)
    once = {"CACHE_MISSES": 1, "IMAGES_ENCODED": 1, "CACHE_HITS": 1}
    until(lambda: added(before, app.encoder("counts")) == once, "the encoder to hear of the second")
    assert 'cache;desc="0/1"' in first.headers["server-timing"]
    assert 'cache;desc="1/1"' in second.headers["server-timing"]
    made, kept = (re.search(r'image-1;desc="([^"]*)"', each.headers["server-timing"]) for each in (first, second))
    assert made is not None
    assert kept is not None
    assert re.fullmatch(r"tokens=\d+ replica=\w+ eager=cpu_device batch=\d+/1", made[1])
    assert kept[1] == f"{made[1]} cached", "by whom and how it was encoded is known of what comes from the cache"
    assert "preprocess;dur=0.0" in second.headers["server-timing"]
    assert first.json()["images"] == second.json()["images"]


def test_twenty_at_once_with_one_image_are_one_encoding(app: ServedApp) -> None:
    """All twenty wait for the same call before the encoder is let go."""
    before, shared = app.encoder("counts"), app.ingress("counts")["COALESCED_ENCODES"]
    app.encoder("hold")

    async def twenty() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=REQUEST_S) as client:
            body = chat(png(128, 64, (20, 20, 20)))
            url = f"{app.url}/v1/chat/completions"
            tasks = [asyncio.create_task(client.post(url, json=body)) for _ in range(20)]
            await asyncio.to_thread(
                until, lambda: app.ingress("counts")["COALESCED_ENCODES"] == shared + 19, "twenty arrivals"
            )
            await asyncio.to_thread(app.encoder, "release")
            return await asyncio.gather(*tasks)

    answers = asyncio.run(twenty())
    assert [answer.status_code for answer in answers] == [200] * 20
    assert len({answer.json()["images"][0]["norm"] for answer in answers}) == 1
    assert added(before, app.encoder("counts")) == {"CACHE_MISSES": 1, "IMAGES_ENCODED": 1}


def test_a_repeated_image_of_a_request_is_encoded_once(app: ServedApp) -> None:
    before = app.encoder("state")["encoded"]
    one, other = png(64, 64, (77, 0, 0)), png(64, 64, (78, 0, 0))
    images = ask(app, chat(one, other, one)).json()["images"]
    assert app.encoder("state")["encoded"] == before + 2
    assert images[0] == images[2] != images[1]


def test_a_bad_image_fails_its_request_alone(app: ServedApp) -> None:
    """Its header is good, so that it comes as far as the decoder."""
    bad = png(320, 320, (5, 5, 5))[:-40]
    good = [chat(png(64, 64, (200, number, 0))) for number in range(4)]
    refused = app.encoder("counts")["IMAGES_REFUSED"]
    answers = ask_all(app, [*good[:2], chat(png(64, 64, (201, 0, 0)), bad), *good[2:]])
    assert [answer.status_code for answer in answers] == [200, 200, 400, 200, 200]
    error = told(answers[2], 400)
    assert error["message"].startswith("image 2 of 2 (messages[0].content[")
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "invalid_image"
    assert app.encoder("counts")["IMAGES_REFUSED"] == refused + 1


def test_a_full_queue_is_a_503_that_says_when_to_come_back(app: ServedApp) -> None:
    """100 visual tokens are being encoded and 100 wait: that is the bound."""
    app.encoder("hold")
    refused = app.encoder("counts")["ENCODER_REJECTIONS"]

    async def three() -> tuple[httpx.Response, list[httpx.Response]]:
        async with httpx.AsyncClient(timeout=REQUEST_S) as client:
            url = f"{app.url}/v1/chat/completions"
            admitted = [
                asyncio.create_task(client.post(url, json=chat(png(320, 320, (30, number, 0))))) for number in range(2)
            ]
            await asyncio.to_thread(until, lambda: app.encoder("state")["queued_tokens"] == 200, "a full queue")
            level = asyncio.to_thread(until, lambda: exported_level(app) == 200, "the level in the metrics")
            await level
            third = await client.post(url, json=chat(png(64, 64, (31, 0, 0))))
            await asyncio.to_thread(app.encoder, "release")
            return third, await asyncio.gather(*admitted)

    third, admitted = asyncio.run(three())
    assert told(third, 503)["code"] == "overloaded"
    assert int(third.headers["retry-after"]) >= RETRY_AFTER_S
    assert [answer.status_code for answer in admitted] == [200, 200]
    assert app.encoder("state")["queued_tokens"] == 0
    assert app.encoder("counts")["ENCODER_REJECTIONS"] == refused + 1
    until(lambda: exported_level(app) == 0, "the level in the metrics")
    assert ask(app, chat(png(64, 64, (31, 0, 0)))).status_code == 200


def test_a_client_that_leaves_a_stream_ends_its_generation(app: ServedApp) -> None:
    before = app.llm("state")["disconnects"]
    with httpx.stream(
        "POST", f"{app.url}/v1/chat/completions", json=chat(png(), stream=True), timeout=REQUEST_S
    ) as stream:
        chunks = stream.iter_bytes()
        assert next(chunks).startswith(b"data: ")
        assert app.llm("state")["disconnects"] == before
    until(lambda: app.llm("state")["disconnects"] == before + 1, "the stand-in to see the disconnect")


def test_a_client_that_leaves_before_the_answer_gives_up_its_place(app: ServedApp) -> None:
    """One image is at the gate, the one behind it is nobody's any more: it is never encoded."""
    app.encoder("hold")
    before = app.encoder("state")["encoded"]

    async def leave() -> httpx.Response:
        async with httpx.AsyncClient(timeout=REQUEST_S) as client:
            url = f"{app.url}/v1/chat/completions"
            at_the_gate = asyncio.create_task(client.post(url, json=chat(png(64, 64, (50, 0, 0)))))
            await asyncio.to_thread(until, lambda: app.encoder("state")["queued_tokens"] == 4, "an image at the gate")
            leaving = asyncio.create_task(client.post(url, json=chat(png(320, 320, (51, 0, 0)))))
            await asyncio.to_thread(until, lambda: app.encoder("state")["queued_tokens"] == 104, "an image behind it")
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await asyncio.to_thread(until, lambda: app.encoder("state")["queued_tokens"] == 4, "its place to be free")
            await asyncio.to_thread(app.encoder, "release")
            return await at_the_gate

    assert asyncio.run(leave()).status_code == 200
    state = app.encoder("state")
    assert (state["encoded"], state["flights"]) == (before + 1, 0)


def test_a_batch_that_fails_is_counted_and_its_images_are_tried_alone(app: ServedApp) -> None:
    """Two images wait together behind one at the gate; the encoder fails for any two at once."""
    app.encoder("hold")
    app.encoder("fail_for_several")
    before = app.encoder("counts")

    async def three() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=REQUEST_S) as client:
            url = f"{app.url}/v1/chat/completions"
            tasks = []
            for number in range(3):
                tasks.append(asyncio.create_task(client.post(url, json=chat(png(64, 64, (90, number, 0))))))
                waiting = 4 * (number + 1)
                await asyncio.to_thread(until, lambda n=waiting: app.encoder("state")["queued_tokens"] == n, "images")  # type: ignore[misc]
            await asyncio.to_thread(app.encoder, "release")
            return await asyncio.gather(*tasks)

    assert [answer.status_code for answer in asyncio.run(three())] == [200] * 3
    assert added(before, app.encoder("counts")) == {"CACHE_MISSES": 3, "IMAGES_ENCODED": 3, "BATCHES_RETRIED": 1}


def test_what_was_counted_is_on_rays_metrics_port(app: ServedApp) -> None:
    counted = {f"vitray_{name.lower()}_total": n for name, n in app.encoder("counts").items() if n}
    assert {"vitray_images_encoded_total", "vitray_cache_misses_total"} <= counted.keys()

    def exported() -> bool:
        found = app.exported("Encoder")
        # The encoder's own counts come from elsewhere: here, every batch ran without a graph.
        return counted.items() <= found.items() and found.get("vitray_eager_runs_total", 0) > 0

    until(exported, f"{counted} in the metrics")


def test_times_are_on_rays_metrics_port(app: ServedApp) -> None:
    """Of each stage, where it happens; the bytes that the language model was handed are those of its embeddings."""

    def received() -> float:
        return app.exported("LLM").get("vitray_embedding_bytes_received_total", 0)

    before = settled(received)
    body = chat(png(320, 320, (4, 4, 44)))
    shape = ask(app, body).json()["images"][0]["shape"]
    with httpx.stream("POST", f"{app.url}/v1/chat/completions", json=body | {"stream": True}, timeout=REQUEST_S) as one:
        assert next(one.iter_bytes()).startswith(b"data: ")
    expected = {
        "Ingress": ("fetch_seconds", "admission_seconds", "time_to_first_token_seconds"),
        "Encoder": ("preprocess_seconds", "encoder_queue_seconds", "encode_seconds"),
        "LLM": ("transfer_seconds", "llm_first_token_seconds"),
    }
    for deployment, names in expected.items():
        for name in names:
            counted = f"vitray_{name}_count"
            until(lambda d=deployment, n=counted: app.exported(d).get(n, 0) > 0, f"{counted} of {deployment}")  # type: ignore[misc]
    num_bytes = 2 * shape[0] * shape[1] * 4  # float32, and the stream had it from the cache
    reaches(received, before + num_bytes)


def test_an_encoder_killed_at_work_is_replaced_and_its_work_is_done_again(app: ServedApp) -> None:
    """The only encoder there is: the client waits for the next one."""
    app.encoder("hold")
    pid, lost = app.encoder("state")["pid"], app.ingress("counts")["REPLICAS_LOST"]

    async def killed() -> httpx.Response:
        async with httpx.AsyncClient(timeout=START_S) as client:
            request = client.post(f"{app.url}/v1/chat/completions", json=chat(png(64, 64, (60, 0, 0))))
            answer = asyncio.create_task(request)
            await asyncio.to_thread(until, lambda: app.encoder("state")["queued_tokens"] == 4, "an image at the gate")
            os.kill(pid, signal.SIGKILL)
            return await answer

    answer = asyncio.run(killed())
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["images"]) == 1
    assert app.ingress("counts")["REPLICAS_LOST"] == lost + 1
    until(lambda: app.exported("Ingress").get("vitray_replicas_lost_total") == lost + 1, "the loss in the metrics")
    assert app.encoder("state")["pid"] != pid


def test_serve_replaces_an_encoder_whose_gpu_thread_has_died(app: ServedApp) -> None:
    """Until then clients are told to come back; they would have hung to the deadline."""
    assert app.encoder("health") == "healthy"
    pid = app.encoder("state")["pid"]
    assert app.encoder("end_gpu_thread") == "the thread that owns the GPU has died"
    answer = ask(app, chat(png(64, 64, (71, 0, 0))))
    if answer.status_code != 200:  # 200: Serve was quicker
        assert told(answer, 503)["code"] == "replica_lost"
    until(lambda: is_replaced(app, pid), "a new encoder")
    assert ask(app, chat(png(64, 64, (71, 0, 0)))).status_code == 200


def test_health_ends_with_the_batching_task(app: ServedApp) -> None:
    """Images would never reach the GPU's queue."""
    assert app.encoder("health") == "healthy"
    assert app.encoder("end_batching_task") == "Serve's batching task has died"


def test_the_ingress_knows_where_serve_listens(app: ServedApp) -> None:
    """Whether it needs API keys hangs on it; another Ray may keep it elsewhere."""
    assert app.ingress("listens_on") == "127.0.0.1"
