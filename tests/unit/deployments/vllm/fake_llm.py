"""`compat.start_engine` with an AsyncLLM of the test's own in place of vLLM's."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import AsyncGenerator, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import JsonValue

from deployments.vllm import compat
from deployments.vllm.stats import EngineStats


def start_fake_engine(
    monkeypatch: pytest.MonkeyPatch,
    generate: Callable[..., AsyncGenerator[Any, None]],
    server_args: Mapping[str, JsonValue],
) -> Any:
    """Returns the engine. `generate`: called with the arguments of AsyncLLM's method."""

    class FakeLLM:
        @classmethod
        def from_engine_args(cls, *_: object, **__: object) -> FakeLLM:
            return cls()

        def generate(self, *arguments: object, **options: object) -> AsyncGenerator[Any, None]:
            return generate(*arguments, **options)

    fakes = {
        "AsyncLLM": FakeLLM,
        "AsyncEngineArgs": SimpleNamespace,
        "ECTransferConfig": SimpleNamespace,
        "UsageContext": SimpleNamespace(OPENAI_API_SERVER="server"),
    }
    monkeypatch.setattr(compat, "lookup", fakes.__getitem__)
    monkeypatch.setattr(compat, "check_args", lambda *_, own_tower: None)
    monkeypatch.setattr(compat, "default_server_args", Namespace)
    return compat.start_engine("m", {}, server_args, cpu_kv_cache_gib=None, stats=EngineStats(), link="x")[0]
