"""`serve deploy` of a file that names another model folder, with a real vLLM, while clients ask about pictures.

`tests/cluster/test_served_fleet.py` updates more often, with stand-ins for the towers and for vLLM. Here four engines
start, which takes minutes on two cores.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.serve.application import START_TIMEOUT_S, ServedApplication, configuration
from tests.serve.asking import TIMEOUT_S, ask
from tests.serve.soak import KNOWN, known_body
from training.checkpoints import make_checkpoint

NAME = "qwen3"
KINDS = ("Ingress", "Encoder", "LLM")
REPLICAS = 2
CLIENTS = 4

Answer = tuple[int, ...]
"""Token ids."""

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(3600)]


class Updated:
    """One application with two replicas of each deployment, and the file that it is deployed from."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self._settings = configuration(dict.fromkeys(("qwen3", "qwen25", "tight"), checkpoint))
        self._application = next(found for found in self._settings["applications"] if found["name"] == NAME)
        self._application["deployments"] = [{"name": kind, "num_replicas": REPLICAS} for kind in KINDS]
        self._settings["applications"] = [self._application]
        self._file = folder / "changed_config.yaml"
        self.served = ServedApplication(self._settings, folder=folder)
        self.url = self.served.base_url(NAME)

    def deploy(self, checkpoint: Path) -> None:
        """Returns once all replicas are new ones that run."""
        before = self._processes()
        self._application["args"]["model"] = str(checkpoint)
        self._file.write_text(yaml.safe_dump(self._settings, sort_keys=False))
        self.served.serve("deploy", str(self._file))
        deadline = time.monotonic() + START_TIMEOUT_S
        while before & self._processes() or not self._is_running():
            assert time.monotonic() < deadline, f"the update did not end:\n{self.served.serve('status')}"
            time.sleep(1)

    def _is_running(self) -> bool:
        found = yaml.safe_load(self.served.serve("status", "--name", NAME))
        states = [found["deployments"][kind]["replica_states"] for kind in KINDS]
        return found["status"] == "RUNNING" and states == [{"RUNNING": REPLICAS}] * len(KINDS)

    def _processes(self) -> set[int]:
        return {process.pid for kind in KINDS for process in self.served.replicas(NAME, kind)}


def answer_of(body: dict[str, list[dict[str, list[int]]]]) -> Answer:
    return tuple(body["choices"][0]["token_ids"])


def answers(url: str) -> list[Answer]:
    """To a question about each of the pictures."""
    return [answer_of(ask(url, known_body(number))) for number in range(KNOWN)]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two model folders that differ in their weights alone."""
    old, new = (make_checkpoint("qwen3_vl", tmp_path / name, seed=seed) for seed, name in enumerate(("old", "new")))
    assert (old / "config.json").read_bytes() == (new / "config.json").read_bytes()
    return old, new


@pytest.fixture
def updated(folders: tuple[Path, Path], tmp_path: Path) -> Iterator[Updated]:
    updated = Updated(folders[0], tmp_path)
    try:
        updated.served.wait()
        yield updated
    finally:
        updated.served.stop()


def test_an_update_to_other_weights_fails_no_request_and_mixes_none(
    updated: Updated, folders: tuple[Path, Path]
) -> None:
    """Encoders are up before language models are: those of before were sent embeddings of the new tower."""
    old = answers(updated.url)
    failed: list[str] = []
    given: Counter[tuple[int, Answer]] = Counter()

    async def client(http: httpx.AsyncClient, updating: asyncio.Task[None], first: int) -> None:
        number = first
        while not updating.done():
            answer = await http.post("/v1/chat/completions", json=known_body(number))
            if answer.status_code == 200:
                given[number, answer_of(answer.json())] += 1
            else:
                failed.append(f"{answer.status_code}: {answer.text}")
            number = (number + 1) % KNOWN

    async def update() -> None:
        async with httpx.AsyncClient(base_url=updated.url, timeout=TIMEOUT_S) as http:
            updating = asyncio.create_task(asyncio.to_thread(updated.deploy, folders[1]))
            await asyncio.gather(updating, *(client(http, updating, number) for number in range(CLIENTS)))

    asyncio.run(update())
    new = answers(updated.url)
    print(
        f"{sum(given.values())} answers, {sum(given[at, answer] for at, answer in enumerate(old))} of the old weights"
    )
    assert len({*old, *new}) == 2 * KNOWN, "an answer with another picture's embedding, or other weights, would show"
    assert failed == []
    assert given.keys() <= {*enumerate(old), *enumerate(new)}
    assert given.keys() & set(enumerate(old)) != set()
