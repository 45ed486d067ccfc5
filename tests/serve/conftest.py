"""Starts what the tests of this folder talk to, once: checkpoints, vLLM alone, and the application.

The two are never up together: vLLM alone answers everything that will be compared and is ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.serve.application import ARCHITECTURES, MAX_ANSWERING, ServedApplication, configuration
from tests.serve.asking import Answers, ask, collect
from tests.serve.conversations import AGENT, CONVERSATIONS, SMALL_CONVERSATIONS, held_out_questions
from tests.serve.vllm_alone import Reference, VllmAlone
from training import evaluate_served
from training.card import MODEL as SCENES
from training.checkpoints import make_checkpoint

# What starts vLLM alone goes first, then the application without an encoder; what breaks replicas comes last.
FILE_ORDER = (
    *("test_generic_models.py", "test_no_split.py", "test_parity.py", "test_without_encoder.py", "*"),
    "test_lost_replicas.py",
)

_measured: dict[str, float] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Within this folder, in FILE_ORDER; other folders' tests stay before, since they fail faster."""

    def place(item: pytest.Item) -> int:
        if item.path.parent != Path(__file__).parent:
            return -1
        return FILE_ORDER.index(item.path.name if item.path.name in FILE_ORDER else "*")

    items.sort(key=place)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _measured:
        terminalreporter.section("log-probabilities, compared with vLLM alone")
        for what, value in _measured.items():
            terminalreporter.write_line(f"{what}: {value:.2e}")


@pytest.fixture
def measured() -> dict[str, float]:
    """What the summary at the end shows."""
    return _measured


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    made = {name: make_checkpoint(arch, folder / name) for name, arch in ARCHITECTURES.items()}
    return made | {"tight": SCENES}


@pytest.fixture(scope="session")
def reference(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Starts vLLM three times side by side and asks it everything."""
    logs = tmp_path_factory.mktemp("vllm_alone")
    dtypes = {name: "bfloat16" if name == "tight" else "float32" for name in checkpoints}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(VllmAlone(checkpoint, dtype=dtypes[name], log=logs / f"{name}.log"))
            for name, checkpoint in checkpoints.items()
        }
        for server in servers.values():
            server.wait()
        described = httpx.get(servers["qwen3"].base_url + "/openapi.json", timeout=30).json()["paths"]
        return Reference(
            {name: collect(servers[name].base_url, CONVERSATIONS) for name in ARCHITECTURES},
            {c.name: ask(servers["tight"].base_url, c.body) for c in SMALL_CONVERSATIONS},
            {arch: {name: ask(servers[arch].base_url, body) for name, body in AGENT.items()} for arch in ARCHITECTURES},
            evaluate_served.answers(servers["tight"].base_url, held_out_questions(), at_once=MAX_ANSWERING),
            {path: [method.upper() for method in operations] for path, operations in described.items()},
        )


@pytest.fixture(scope="session")
def application(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedApplication]:
    with ServedApplication(configuration(checkpoints), folder=tmp_path_factory.mktemp("serve_run")) as served:
        yield served


@pytest.fixture(params=ARCHITECTURES)
def arch(request: pytest.FixtureRequest) -> str:
    """Each architecture by turns."""
    return str(request.param)


@pytest.fixture
def base_url(application: ServedApplication, arch: str) -> str:
    """Of the application in float32 with generous limits, for each architecture."""
    return application.base_url(arch)


@pytest.fixture
def qwen3(application: ServedApplication) -> str:
    """The same, for what does not depend on the architecture."""
    return application.base_url("qwen3")


@pytest.fixture
def tight(application: ServedApplication) -> str:
    """Of the application with the shipped model, behind a key, whose limits are within reach."""
    return application.base_url("tight")


@pytest.fixture(scope="session")
def answers(application: ServedApplication) -> dict[str, Answers]:
    """The application's answers to everything that vLLM alone was asked, several requests at a time."""
    return {name: collect(application.base_url(name), CONVERSATIONS) for name in ARCHITECTURES}
