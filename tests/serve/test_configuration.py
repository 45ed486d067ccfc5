"""A setting that is misspelt is refused before anything starts, with the name that was meant."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import JsonValue

from configs.resolve import PROJECT_ROOT, ClusterFacts
from deployments import app


@pytest.mark.parametrize(
    ("args", "wrong", "meant"),
    [
        ({"modle": "x"}, "modle", "model"),
        ({"encoder": {"encoder_cudagraph_token_budget": [1]}}, "token_budget'", "encoder_cudagraph_token_budgets"),
        ({"encoder_replica": {"decode_worker": 2}}, "decode_worker'", "decode_workers"),
        ({"llm": {"engine_arguments": {}}}, "engine_arguments", "engine_args"),
        ({"ingress": {"fetch": {"https": True}}}, "https", "http"),
        ({"llm": {"engine_args": {"max_model_length": 1}}}, "max_model_length", "max_model_len"),
        ({"llm": {"server_args": {"tool_call_parsers": "x"}}}, "tool_call_parsers", "tool_call_parser"),
        ({"llm": {"server_args": {"max_model_len": 1}}}, "max_model_len", "llm.engine_args"),
    ],
)
def test_build_app_names_the_nearest_key(
    monkeypatch: pytest.MonkeyPatch, args: dict[str, JsonValue], wrong: str, meant: str
) -> None:
    monkeypatch.setattr(app, "cluster_facts", lambda: ClusterFacts(has_gpu=False))
    with pytest.raises(ValueError, match=wrong) as refused:
        app.build_app(args)
    assert meant in str(refused.value)


@pytest.mark.slow
def test_serve_run_refuses_before_it_starts_anything() -> None:
    serve = Path(sys.executable).parent / "serve"
    refused = subprocess.run(
        [serve, "run", "deployments.app:build_app", "modle=x", "--address", "local"],
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert refused.returncode != 0
    assert "unknown key 'modle': did you mean 'model'?" in refused.stderr
    assert "Started a local Ray instance" not in refused.stdout + refused.stderr
