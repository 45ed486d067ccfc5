"""Clients that measure work against the application: vLLM's own `bench serve`, and ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from configs.resolve import PROJECT_ROOT
from tests.serve.conversations import MODEL

pytestmark = pytest.mark.slow

VLLM_BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
if __name__ == "__main__":
    main(parser.parse_args())
"""
"""`vllm bench serve`; the `vllm` command of the package for the CPU does not find its own version."""
REQUESTS = 6


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": str(PROJECT_ROOT / "deployments" / "vllm" / "import_shim"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, *command], check=False, cwd=PROJECT_ROOT, env=environment, capture_output=True, text=True
    )


def test_vllms_own(qwen3: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Chat requests with random pictures, streamed; the client makes the pictures and counts the tokens itself."""
    program = tmp_path / "vllm_bench.py"
    program.write_text(VLLM_BENCH)
    out = tmp_path / "result.json"
    done = run(
        str(program), "--backend", "openai-chat", "--base-url", qwen3, "--endpoint", "/v1/chat/completions",
        "--model", str(checkpoints["qwen3"]), "--served-model-name", MODEL,
        "--dataset-name", "random-mm", "--random-mm-base-items-per-request", "2",
        "--random-mm-limit-mm-per-prompt", '{"image": 2, "video": 0}',
        "--random-mm-bucket-config", "{(64, 96, 1): 0.5, (128, 128, 1): 0.5}",
        "--num-prompts", str(REQUESTS), "--random-input-len", "20", "--random-output-len", "8", "--ignore-eos",
        "--goodput", "ttft:600000", "--save-result", "--save-detailed", "--result-filename", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    assert (found["completed"], found["failed"]) == (REQUESTS, 0), found["errors"]
    assert found["total_output_tokens"] == 8 * REQUESTS
    assert found["mean_ttft_ms"] > 0
    assert "Request goodput (req/s)" in done.stdout


def test_ours(qwen3: str, tmp_path: Path) -> None:
    done = run(
        str(PROJECT_ROOT / "benchmarks" / "bench_serve.py"), qwen3, "--requests", str(REQUESTS), "--speed", "inf",
        "--max-lag-ms", "600000", "--max-output-tokens", "8", "--images", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(done.stdout.splitlines()[-1])["servers"].values()
    assert (found["sent"], found["successful"], found["errors_by_status"]) == (REQUESTS, REQUESTS, {})
    assert found["output_tokens"] == 8 * REQUESTS
