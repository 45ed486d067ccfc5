"""schemathesis on the description that the application gives of itself: requests that fit it and requests that do not,
each answered in time, and never as if the fault were the server's."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode

from deployments.common.api_error import ANTHROPIC_PATHS
from deployments.ingress.http.routes import ROUTES, Service
from tests.conftest import FUZZ_CASES
from tests.serve.asking import TIMEOUT_S, ask
from tests.serve.conversations import MODEL, chat
from tests.serve.errors import error_of

pytestmark = pytest.mark.slow

MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
CASES_A_KIND = 4000
"""Of `--fuzz-cases`, how many are one request of each kind to each operation; to make one up takes a second. By default
they are the same each time; `make fuzz` makes up others."""
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")
WAITING = 503
"""Asks to come again: a server at its limits, not at its end."""


@pytest.fixture(scope="module")
def operations(qwen3_description: dict[str, Any]) -> list[Any]:
    schema = schemathesis.openapi.from_dict(qwen3_description)
    return [found.ok() for found in schema.get_all_operations()]  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def qwen3_description(application: Any) -> dict[str, Any]:
    answer = httpx.get(application.base_url("qwen3") + "/openapi.json", timeout=TIMEOUT_S)
    assert answer.status_code == 200
    return dict(answer.json())


def shortened(case: Case[Any]) -> None:
    """Makes a request that fits one for our model and a few tokens, so that it gets as far as the engine."""
    if isinstance(case.body, dict):
        case.body["model"] = MODEL
        for name in LENGTHS:
            if type(case.body.get(name)) is int:
                case.body[name] = 2
        case.body.setdefault("max_tokens", 2)


def test_every_operation_is_described(operations: list[Any]) -> None:
    described = {(operation.method.upper(), operation.path) for operation in operations}
    expected = {
        (method, route.path)
        for route in ROUTES
        for method in route.methods
        if route.service in (Service.IMAGES, Service.TEXT) and "{" not in route.path
    }
    assert expected <= described


@pytest.mark.parametrize("mode", MODES, ids=("that fit", "that do not"))
def test_requests(mode: GenerationMode, operations: list[Any], qwen3: str, request: pytest.FixtureRequest) -> None:
    cases = max(3, request.config.getoption("--fuzz-cases") // CASES_A_KIND)
    found: dict[int, int] = {}

    def one(case: Case[Any]) -> None:
        if mode is GenerationMode.POSITIVE:
            shortened(case)
        answer = case.call(base_url=qwen3, timeout=TIMEOUT_S)
        found[answer.status_code] = found.get(answer.status_code, 0) + 1
        status = answer.status_code
        if status == WAITING:
            assert "retry-after" in answer.headers
        elif status != 501:
            assert status < 500, f"{case.method} {case.formatted_path} {case.body!r}: {status} {answer.text[:1000]}"
        if status >= 400 and case.method != "HEAD":
            if case.path in ANTHROPIC_PATHS:
                assert answer.json()["type"] == "error"
                return
            headers = {name: values[0] for name, values in answer.headers.items()}
            error_of(httpx.Response(status, headers=headers, content=answer.content), status)

    # What fails is told as it was found: to look for a smaller one takes minutes here.
    checked = settings(
        max_examples=cases,
        derandomize=request.config.getoption("--fuzz-cases") == FUZZ_CASES,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    for operation in operations:
        try:
            strategy = operation.as_strategy(generation_mode=mode)
            checked(given(strategy)(one))()
        except Unsatisfiable:  # nothing can be wrong with a request that has no parameters
            assert mode is GenerationMode.NEGATIVE
    print(f"statuses of requests {mode.value}: {found}")
    assert found.get(200, 0) > 0 or mode is GenerationMode.NEGATIVE
    assert sum(number for status, number in found.items() if 400 <= status < 500) > 0
    assert ask(qwen3, chat({"role": "user", "content": "Hello!"}))["choices"]
