"""What every test needs: the import hook for media packages that do not match a CPU-only torch.

And how much is fuzzed: `--fuzz-cases` in all, of which each fuzzer of tests/fuzz takes a share.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, settings

from deployments.vllm import import_shim
from training.checkpoints import make_checkpoint

FUZZ_CASES = 2_000
SOAK_S = 24
CHAOS_S = 15
FLEET_REQUESTS = 120
FLEET_ENCODERS = 4

import_shim.activate()
settings.register_profile("untimed", deadline=None)  # tests never time, and a busy machine is no bug
settings.load_profile("untimed")


@pytest.fixture(scope="module", autouse=True)
def imported_objects_are_not_collected() -> None:
    """Many tests collect garbage until memory is free. Each collection takes a second with vLLM's objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def certificates_read_once() -> Iterator[None]:
    """Every fetcher reads the list of certificates when it is made, which takes longer than a case."""
    context = httpx.create_ssl_context(trust_env=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx, "create_ssl_context", lambda **_: context)
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-cases", type=int, default=FUZZ_CASES, help="random cases, all fuzzers of tests/fuzz together"
    )
    parser.addoption("--soak-seconds", type=float, default=SOAK_S, help="of mixed traffic in tests/serve/test_soak.py")
    parser.addoption(
        "--chaos-seconds",
        type=float,
        default=CHAOS_S,
        help="of killed replicas in cluster/test_chaos.py",
    )
    parser.addoption(
        "--fleet-requests",
        type=int,
        default=FLEET_REQUESTS,
        help="of each test in cluster/test_served_fleet.py",
    )
    parser.addoption("--fleet-encoders", type=int, default=FLEET_ENCODERS, help="in cluster/test_served_fleet.py")


@pytest.fixture(scope="session")
def fuzzing(request: pytest.FixtureRequest) -> Callable[[float], settings]:
    """Hypothesis settings for a share of all cases."""
    cases: int = request.config.getoption("--fuzz-cases")

    def share(part: float) -> settings:
        return settings(
            max_examples=max(1, round(cases * part)),
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        )

    return share


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One in float32 of each architecture."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {arch: make_checkpoint(arch, folder / arch) for arch in ("qwen3_vl", "qwen2_5_vl")}
