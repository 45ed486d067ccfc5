"""What every test needs: the import hook for media packages that do not match a CPU-only torch.

And how much is fuzzed: `--fuzz-cases` in all, of which each fuzzer of tests/fuzz takes a share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest
from hypothesis import HealthCheck, settings

from deployments import import_shim

FUZZ_CASES = 10_000
SOAK_S = 24
CHAOS_S = 20

import_shim.activate()
settings.register_profile("untimed", deadline=None)  # tests never time, and a busy machine is no bug
settings.load_profile("untimed")


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
        help="of killed encoders in unit/deployments/test_chaos.py",
    )


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
