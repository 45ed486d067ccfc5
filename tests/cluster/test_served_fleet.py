"""Replicas with different numerics or weights side by side on a real Ray Serve, deployed from configuration files.

Encoders and language models are fakes (`fake_fleet.py`). `--fleet-requests 5000 --fleet-encoders 8` sends that many
requests a test to that many encoders.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deployments.common.messages import PROTOCOL_VERSION
from tests.cluster import fake_fleet
from tests.cluster.served import START_S, Cluster
from tests.cluster.test_served_images import chat
from tests.unit.deployments.samples import png
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]

ROOT = Path(__file__).parents[2]
NUM_IMAGES = (1, 4, 16)
CLIENTS = 4
UPDATE_S = 400
OLD, NEW = PROTOCOL_VERSION, PROTOCOL_VERSION + 1
"""Versions of the messages before and after an update."""


@dataclass
class Load:
    """New images from CLIENTS clients; requests with one, four and sixteen of them in turn."""

    url: str
    failed: list[str] = field(default_factory=list)
    answers: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """By the weights and versions of the language model and of the embeddings, each once."""
    protocols: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By the versions of the ingress and of the language model."""
    sent: int = 0
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def run(self, enough: Callable[[], bool]) -> None:
        """Until `enough`, which is asked before every request."""

        async def client() -> None:
            while not enough():
                count = NUM_IMAGES[self.sent % len(NUM_IMAGES)]
                self.sent += 1
                numbers = itertools.islice(self._numbers, count)
                files = [png(56, 56, (number >> 16, number >> 8 & 255, number & 255)) for number in numbers]
                answer = await http.post(f"{self.url}/v1/chat/completions", json=chat(*files))
                if answer.status_code != 200:
                    self.failed.append(f"{answer.headers.get(fake_fleet.PROTOCOL)}: {answer.text}")
                    await asyncio.sleep(float(answer.headers.get("retry-after", 0)))
                    continue
                body = answer.json()
                assert len(body["images"]) == count
                self.answers[body["llm"], *sorted(set(body["images"]))] += 1
                self.protocols[answer.headers[fake_fleet.PROTOCOL], body["llm"] >> 16] += 1

        async with httpx.AsyncClient(timeout=START_S) as http:
            await asyncio.gather(*[client() for _ in range(CLIENTS)])

    async def run_during(self, work: Callable[[], object]) -> None:
        working = asyncio.create_task(asyncio.to_thread(work))
        await self.run(working.done)
        await working


@dataclass
class Fleet:
    """One application, and the configuration file it is deployed from."""

    cluster: Cluster
    model: Path
    replicas: dict[str, int]
    fusion: bool = False
    surge_percent: int = 0
    name: str = "fleet"

    def deploy(self) -> None:
        """As `serve deploy` does with a file; returns before anything has started."""
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        config: dict[str, Any] = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
        (application,) = config["applications"]
        application |= {"name": self.name, "route_prefix": f"/{self.name}", "import_path": fake_fleet.NAME}
        application["args"] |= {"model": str(self.model), "encoder": {"fused_kernels": self.fusion}}
        few = {"ray_actor_options": {"num_cpus": 0.05}, "graceful_shutdown_wait_loop_s": 0.2}
        few["max_surge_percent"] = self.surge_percent
        application["deployments"] = [
            {"name": name, "num_replicas": number} | few for name, number in self.replicas.items()
        ]
        client = _get_global_client()
        assert client is not None
        client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))

    def has_failed(self) -> bool:
        """Whether Serve has given up the update."""
        from ray import serve

        return bool(serve.status().applications[self.name].status == "DEPLOY_FAILED")

    def is_running(self) -> bool:
        """Whether all replicas that the file asks for run."""
        from ray import serve
        from ray.serve._private.common import ReplicaState

        status = serve.status().applications[self.name]
        running = {
            name: status.deployments[name].replica_states.get(ReplicaState.RUNNING, 0)
            for name in self.replicas
            if name in status.deployments
        }
        return status.status == "RUNNING" and running == self.replicas

    def started(self) -> int:
        """Encoders of this fusion, those that are held included."""
        return len(list(self.model.glob(f"started-{self.fusion}-*")))

    @property
    def mark(self) -> int:
        folder = str(self.model)
        return fake_fleet.mark_of(fake_fleet.weights_of(folder), fake_fleet.protocol_of(folder))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.cluster.http_port}/{self.name}"


@pytest.fixture(scope="module")
def fleet(
    request: pytest.FixtureRequest, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    from ray import serve

    model = tmp_path_factory.mktemp("model")
    (model / fake_fleet.WEIGHTS).write_bytes(b"old")
    yield Fleet(cluster, model, {"Encoder": request.config.getoption("--fleet-encoders"), "LLM": 1, "Ingress": 1})
    serve.delete("fleet")


@pytest.fixture
def requests(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--fleet-requests"))


def test_no_request_fails_beside_one_encoder_with_other_numerics(fleet: Fleet, requests: int) -> None:
    """It refused every job that it drew: 27 % of requests with one new image were a 503, 76 % of those with four."""
    (fleet.model / "odd-False-1").touch()
    fleet.deploy()
    until(fleet.is_running, "the application", UPDATE_S)
    load = Load(fleet.url)
    asyncio.run(load.run(lambda: load.sent >= requests))
    assert load.failed == []
    assert load.answers == {(fleet.mark, fleet.mark): requests}


def test_no_request_fails_while_half_of_the_encoders_are_updated(fleet: Fleet, requests: int) -> None:
    """The next one, the third of four, is kept from starting. With eight, 36 % of requests with one new image were a
    503, 92 % with four."""
    fleet.deploy()
    until(fleet.is_running, "all encoders", UPDATE_S)
    half = fleet.replicas["Encoder"] // 2
    (fleet.model / f"hold-True-{half}").touch()
    fleet.fusion = True
    load, half_updated_at = Load(fleet.url), 0

    def enough() -> bool:
        nonlocal half_updated_at
        if fleet.started() <= half:
            half_updated_at = load.sent
        return load.sent >= half_updated_at + requests

    fleet.deploy()
    asyncio.run(load.run(enough))
    assert load.failed == []
    assert load.answers == {(fleet.mark, fleet.mark): load.sent}


@pytest.mark.chaos
def test_an_update_of_everything_fails_no_request_and_mixes_no_weights(fleet: Fleet, tmp_path: Path) -> None:
    """Encoders are updated before language models: those of before were sent embeddings of the new tower."""
    old = fleet.mark
    fleet.replicas = {"Encoder": 2, "LLM": 2, "Ingress": 2}
    for held in fleet.model.glob("hold-*"):
        held.unlink()
    fleet.deploy()
    until(fleet.is_running, "two replicas of each deployment", UPDATE_S)

    def update() -> None:
        before = fleet.started()
        fleet.deploy()
        until(lambda: fleet.started() == before + 2 and fleet.is_running(), "the update", UPDATE_S)

    load = Load(fleet.url)
    fleet.fusion = not fleet.fusion
    asyncio.run(load.run_during(update))
    assert load.failed == []
    assert set(load.answers) == {(old, old)}
    fleet.model = tmp_path
    (tmp_path / fake_fleet.WEIGHTS).write_bytes(b"new")
    asyncio.run(load.run_during(update))
    assert load.failed == []
    assert set(load.answers) == {(old, old), (fleet.mark, fleet.mark)}


@pytest.mark.chaos
def test_with_surge_no_request_of_single_replicas_fails_even_if_an_update_cannot_start(
    fleet: Fleet, tmp_path: Path
) -> None:
    """Without it, Serve stops the only replica before its successor has started."""
    fleet = dataclasses.replace(fleet, replicas={"Encoder": 1, "LLM": 1, "Ingress": 1}, surge_percent=100)
    fleet.deploy()
    until(fleet.is_running, "one replica of each deployment", UPDATE_S)
    old, load = fleet.mark, Load(fleet.url)

    def fail() -> None:
        fleet.deploy()
        until(fleet.has_failed, "the failure of the update", UPDATE_S)

    fleet.model = tmp_path / "missing"
    asyncio.run(load.run_during(fail))
    assert load.failed == []
    assert set(load.answers) == {(old, old)}

    def update() -> None:
        fleet.deploy()
        until(lambda: fleet.started() == 1 and fleet.is_running(), "the update", UPDATE_S)

    fleet.model = tmp_path
    (tmp_path / fake_fleet.WEIGHTS).write_bytes(b"after the failure")
    asyncio.run(load.run_during(update))
    assert load.failed == []
    assert set(load.answers) == {(old, old), (fleet.mark, fleet.mark)}


@pytest.mark.chaos
def test_an_update_to_another_version_of_the_messages_mixes_none(fleet: Fleet, tmp_path: Path) -> None:
    """Ingresses start first: new ones would have no language model to call for as long as one starts. Old ones tell
    clients to try again once the last language model of their version is gone, for which calls waited for ever."""
    fleet.replicas = {"Encoder": 2, "LLM": 2, "Ingress": 2}
    fleet.deploy()
    until(fleet.is_running, "two replicas of each deployment", UPDATE_S)
    old = fleet.mark
    fleet.model = tmp_path
    (tmp_path / fake_fleet.WEIGHTS).write_bytes(b"newer")
    (tmp_path / fake_fleet.PROTOCOL).write_text(str(NEW))
    assert (old >> 16, fleet.mark >> 16) == (OLD, NEW)

    def update() -> None:
        fleet.deploy()
        until(lambda: fleet.started() == 2 and fleet.is_running(), "the update", UPDATE_S)

    load = Load(fleet.url)
    asyncio.run(load.run_during(update))
    print(f"{len(load.failed)} of {load.sent} were to be tried again")
    assert all(
        text.startswith(f"{OLD}: ") and "being updated to another version; try again" in text for text in load.failed
    )
    assert len(load.failed) < 0.05 * load.sent
    assert set(load.answers) == {(old, old), (fleet.mark, fleet.mark)}
    assert set(load.protocols) == {(str(version), version) for version in (OLD, NEW)}
