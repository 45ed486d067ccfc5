"""What load balancers ask, over Serve's own HTTP proxy: answered whatever else the ingress has to do."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from configs.schema import AppConfig
from tests.cluster.served import Cluster, ServedApp
from tests.cluster.stand_in_llm import StandInLLM
from tests.cluster.test_served_images import chat
from tests.hostile.sockets import Address, head, statuses
from tests.unit.deployments.samples import png
from tests.waiting import until

pytestmark = pytest.mark.slow

KEY, OTHER_KEY = "a-key-with-a-quota-to-exhaust", "another-key-that-is-not-counted"
CHAT = "/v1/chat/completions"
REQUESTS_A_MINUTE = 8
REQUESTS_WAITING = 2
PROBES = (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping"))
ANSWER_S = 10.0
"""Under the 30 s for which the ingress waits for a slow body."""


class HeldLLM(StandInLLM):
    """Its replica starts once the file is gone."""

    def __init__(self, config: AppConfig, width: int, held_by: str) -> None:
        until(lambda: not Path(held_by).exists(), "the start of the language model")
        super().__init__(config, width)


@dataclass(frozen=True)
class Probed:
    app: ServedApp
    hold: Path
    """While the file is there, no language model starts."""

    def probe(self) -> list[int]:
        """The statuses of all probes, sent without a key."""
        return [httpx.request(*probe, timeout=ANSWER_S).status_code for probe in self._probes()]

    def probe_without_body(self) -> list[int]:
        """The same where a body of 60 MB is announced and not sent."""
        found = []
        for method, url in self._probes():
            target = httpx.URL(url)
            address = Address(target.host, target.port or 80, target.path)
            with closing(socket.create_connection((address.host, address.port), timeout=ANSWER_S)) as client:
                client.sendall(head(address, "Content-Length: 60000000", method=method))
                found += statuses(client.recv(65_536))
        return found

    def ask(self, key: str, number: int = 0) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        body = chat(png(56, 56, (number, 0, 0)))
        return httpx.post(self.app.url + CHAT, json=body, headers=headers, timeout=60)

    def _probes(self) -> list[tuple[str, str]]:
        return [(method, self.app.url + path) for method, path in PROBES]


@pytest.fixture(scope="module")
def starting(
    cluster: Cluster, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Probed]:
    """The application without a language model, which is held."""
    from ray import serve
    from ray.serve._private.common import ReplicaState

    from encoder.checkpoint.vision_config import VisionConfig
    from tests.cluster.controlled import ControlledEncoder
    from tests.cluster.watched import WatchedIngress

    folder, checkpoint = tmp_path_factory.mktemp("probes"), checkpoints["qwen3_vl"]
    keys, hold = folder / "keys", folder / "hold"
    keys.write_text(f"one {KEY}\nother {OTHER_KEY}\n")
    hold.touch()
    config = AppConfig.model_validate(
        {
            "model": str(checkpoint),
            "encoder_replica": {"decode_workers": 1, "num_gpus": 0},
            "ingress": {
                "max_requests_waiting": REQUESTS_WAITING,
                "auth": {"api_keys_file": str(keys)},
                "rate_limit": {"requests_per_minute": REQUESTS_A_MINUTE},
            },
        }
    )
    vision = VisionConfig.from_checkpoint(checkpoint)
    light: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0.1}, "health_check_period_s": 0.5}
    encoder = serve.deployment(name="Encoder", **light)(ControlledEncoder).bind(config)
    llm = serve.deployment(name="LLM", **light)(HeldLLM).bind(config, vision.width, str(hold))
    ingress = serve.deployment(name="Ingress", max_ongoing_requests=64, **light)(WatchedIngress)
    target = serve.RunTarget(ingress.bind(config, llm=llm, encoder=encoder), name="probes", route_prefix="/probes")
    serve.run_many([target], wait_for_applications_running=False)

    def is_running() -> bool:
        deployed = serve.status().applications["probes"].deployments
        return "Ingress" in deployed and deployed["Ingress"].replica_states.get(ReplicaState.RUNNING) == 1

    until(is_running, "the ingress")
    yield Probed(ServedApp(cluster, "probes"), hold)
    serve.delete("probes")


@pytest.fixture
def probed(starting: Probed) -> Probed:
    """The application, ready."""
    starting.hold.unlink(missing_ok=True)
    until(lambda: starting.probe() == [200] * len(PROBES), "the language model")
    return starting


def test_not_ready_while_no_language_model_has_started(starting: Probed) -> None:
    """The first test: it meets the application while it starts."""
    assert starting.probe() == [503] * len(PROBES)
    assert httpx.get(starting.app.url + "/health", timeout=60).json()["error"]["code"] == "unavailable"
    assert starting.probe_without_body() == [503] * len(PROBES)
    starting.hold.unlink()
    until(lambda: starting.probe() == [200] * len(PROBES), "the language model")


def test_a_withheld_body_delays_no_probe(probed: Probed) -> None:
    """A probe that announced a body and sent none kept a place at the ingress for 30 s; bodies of other requests that
    are being waited for are of no matter either."""
    target = httpx.URL(probed.app.url + CHAT)
    address = Address(target.host, target.port or 80, target.path)
    with ExitStack() as clients:
        for _ in range(4):
            client = clients.enter_context(closing(socket.create_connection((address.host, address.port))))
            client.sendall(head(address, "Content-Length: 60000000", f"Authorization: Bearer {OTHER_KEY}") + b'{"a":')
        for _ in range(3):
            assert probed.probe_without_body() == [200] * len(PROBES)
        assert probed.probe() == [200] * len(PROBES)


def test_a_full_line_delays_no_probe(probed: Probed) -> None:
    probed.app.encoder("hold")
    with ThreadPoolExecutor() as clients:
        try:
            waiting = [clients.submit(probed.ask, OTHER_KEY, number) for number in range(REQUESTS_WAITING)]
            until(lambda: probed.app.encoder("state")["flights"] == REQUESTS_WAITING, "requests that wait")
            assert probed.ask(OTHER_KEY, REQUESTS_WAITING).json()["error"]["code"] == "overloaded"
            assert probed.probe() == [200] * len(PROBES)
            assert probed.probe_without_body() == [200] * len(PROBES)
        finally:
            probed.app.encoder("release")
        assert [one.result().status_code for one in waiting] == [200] * REQUESTS_WAITING


def test_an_exhausted_quota_refuses_no_probe(probed: Probed) -> None:
    answers = [probed.ask(KEY).status_code for _ in range(2 * REQUESTS_A_MINUTE)]
    assert answers[0] == 200
    assert answers.count(429) >= REQUESTS_A_MINUTE - 1, "a minute may end meanwhile, which admits one more"
    assert [probed.probe() for _ in range(REQUESTS_A_MINUTE)] == [[200] * len(PROBES)] * REQUESTS_A_MINUTE
    for method, path in PROBES:
        sent = {"authorization": f"Bearer {KEY}"}
        assert httpx.request(method, probed.app.url + path, headers=sent, timeout=60).status_code == 200


def test_not_ready_once_the_last_language_model_has_died(probed: Probed) -> None:
    """The last test: the successor of the language model is held."""
    probed.hold.touch()
    probed.app.llm("end_engine")
    until(lambda: probed.probe() == [503] * len(PROBES), "the end of the language model")
    assert probed.probe_without_body() == [503] * len(PROBES)
    probed.hold.unlink()
    until(lambda: probed.probe() == [200] * len(PROBES), "its successor")
