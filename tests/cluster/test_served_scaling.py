"""On a real Ray Serve: replicas follow the load up and down, to zero and back.

Each deployment has its policy as a config file names it. The language model is a stand-in (`scaled.py`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.served import START_S, Cluster, ServedApp
from tests.cluster.test_served_images import chat
from tests.unit.deployments.samples import png
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]

NAME = "scaled"
TEXT = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}


def autoscaled(name: str, policy: str, **kwargs: float) -> dict[str, Any]:
    """From none to three replicas."""
    at_once = {"upscale_delay_s": 0, "downscale_delay_s": 0, "look_back_period_s": 1, "metrics_interval_s": 0.2}
    named = {"policy": {"policy_function": f"deployments.scaling:{policy}", "policy_kwargs": kwargs}}
    return {"name": name, "autoscaling_config": {"min_replicas": 0, "max_replicas": 3, **at_once, **named}}


@pytest.fixture(scope="module")
def scaled(cluster: Cluster, checkpoints: dict[str, Path]) -> Iterator[ServedApp]:
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    application = {
        "name": NAME,
        "route_prefix": f"/{NAME}",
        "import_path": "tests.cluster.scaled:build",
        "args": {
            "model": str(checkpoints["qwen3_vl"]),
            "encoder_replica": {"decode_workers": 1, "num_gpus": 0},
            "ingress": {"max_visual_tokens_in_flight": 320, "max_visual_tokens_per_request": 64},
        },
        "deployments": [
            # An encoder that has just told its speed has had little traffic yet: it must outlast that, to be held.
            autoscaled("Encoder", "VisualTokenPolicy", target_encode_delay_s=0.01, scale_down_stabilization_s=5.0),
            autoscaled("LLM", "EngineLoadPolicy", target_requests=2, scale_down_stabilization_s=1.0),
        ],
    }
    client = _get_global_client()
    assert client is not None
    client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))
    until(lambda: serve.status().applications[NAME].status == "RUNNING", "the application")
    yield ServedApp(cluster, NAME)
    serve.delete(NAME)


def running() -> tuple[int, int]:
    """Encoders and LLMs. Serve's controller, which starts replicas as well, is asked once for both."""
    from ray import serve
    from ray.serve._private.common import ReplicaState

    deployments = serve.status().applications[NAME].deployments
    encoders, llms = (int(deployments[name].replica_states.get(ReplicaState.RUNNING, 0)) for name in ("Encoder", "LLM"))
    return encoders, llms


def reached(encoders: int, llms: int) -> None:
    until(lambda: running() == (encoders, llms), f"{encoders} encoders and {llms} LLMs")


@pytest.fixture
def streams(scaled: ServedApp) -> Iterator[Callable[[int], None]]:
    """Opens answers that go on until the test ends."""
    kept: list[Iterator[str]] = []  # one that is let go closes its connection
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=START_S))

        def open_streams(number: int) -> None:
            for _ in range(number):
                url = f"{scaled.url}/v1/chat/completions"
                response = stack.enter_context(client.stream("POST", url, json=TEXT))
                assert response.status_code == 200
                kept.append(response.iter_lines())
                next(kept[-1])

        yield open_streams


def test_to_zero_and_back(scaled: ServedApp) -> None:
    reached(0, 0)
    answer = httpx.post(f"{scaled.url}/v1/chat/completions", json=chat(png(64, 64, (1, 2, 3))), timeout=START_S)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["images"]) == 1
    reached(0, 0)


def test_language_models_follow_their_requests(scaled: ServedApp, streams: Callable[[int], None]) -> None:
    """Two requests a replica. The encoders have nothing to do, and stay at none."""
    streams(1)
    reached(0, 1)
    streams(3)
    reached(0, 2)
    streams(2)
    reached(0, 3)

    def all_report() -> dict[str, Any] | None:
        shown = told(scaled)
        replicas = shown["LLM"]["replicas"]
        return shown if len(replicas) == 3 and all(replica["report"] for replica in replicas) else None

    shown = until(all_report, "reports of three language models")
    assert (shown["LLM"]["running"], shown["LLM"]["target"], shown["LLM"]["max_replicas"]) == (3, 3, 3)
    assert all(replica["report"]["replica"] == replica["name"] for replica in shown["LLM"]["replicas"])
    assert (shown["Encoder"]["running"], shown["Encoder"]["replicas"]) == (0, []), "to ask starts none"


def test_encoders_follow_their_backlog(scaled: ServedApp) -> None:
    """Eighty images wait at the one encoder, which is held: all three are started, and in the end none is left."""
    bodies = [chat(png(64, 64, (7, 7, number))) for number in range(80)]
    held = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        before = pool.submit(keep_asking, scaled, held)  # else the encoder may be gone before it is held
        try:
            until(lambda: measured(scaled), "an encoder that knows its speed")
            assert len(scaled.encoders("hold")) == 1
        finally:
            held.set()
        answers = pool.submit(asyncio.run, ask_together(scaled, bodies))
        until(lambda: running()[0] == 3, "three encoders")
        until(lambda: release(scaled), "the gate")
        assert [answer.status_code for answer in answers.result()] == [200] * len(bodies)
        assert set(before.result()) == {200}
    until(lambda: running()[0] == 0, "no encoder")


def told(scaled: ServedApp) -> dict[str, Any]:
    """The page's view of the deployments, by name."""
    answer = httpx.get(f"{scaled.url}/cluster", timeout=START_S)
    assert answer.status_code == 200, answer.text
    return {found["name"]: found for found in answer.json()["deployments"]}


def measured(scaled: ServedApp) -> bool:
    """Without it nothing says how many encoders there should be."""
    reports = [replica["report"] for replica in told(scaled)["Encoder"]["replicas"]]
    return any(report and report["tokens_per_s"] > 0 for report in reports)


def keep_asking(scaled: ServedApp, enough: threading.Event) -> list[int]:
    """One new picture after the other; the statuses.

    Of 25 tokens, for traffic that wants an encoder: a hundredth of a second's has to be more than a token.
    """
    url, statuses = f"{scaled.url}/v1/chat/completions", list[int]()
    while not enough.is_set():
        body = chat(png(160, 160, (9, len(statuses) // 256, len(statuses) % 256)))
        statuses.append(httpx.post(url, json=body, timeout=START_S).status_code)
    return statuses


async def ask_together(scaled: ServedApp, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    async with httpx.AsyncClient(timeout=START_S, limits=httpx.Limits(max_connections=None)) as client:
        url = f"{scaled.url}/v1/chat/completions"
        return await asyncio.gather(*(client.post(url, json=body) for body in bodies))


def release(scaled: ServedApp) -> bool:
    return bool(scaled.encoders("release"))
