"""The reference: vLLM's own server with vLLM's own vision tower, given the images themselves. Nothing of ours is in it
but the import hook for broken media packages.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx

from configs.resolve import PROJECT_ROOT
from tests.programs import free_port
from tests.serve.asking import Answers, Json
from tests.serve.conversations import MODEL
from tests.serve.processes import Server

START_TIMEOUT_S = 300.0
MAX_MODEL_LEN = 8192
MAX_NUM_SEQS = 16
NUM_BLOCKS = 256  # of 128 tokens: without a bound vLLM fills a gigabyte, and there are several of it


class VllmAlone:
    """Starts at once, in the background; `wait` before the first request."""

    def __init__(self, checkpoint: Path, *, dtype: str, log: Path) -> None:
        port = free_port()
        self.base_url = f"http://127.0.0.1:{port}"
        # The module and not the `vllm` command: that of the CPU's package looks for metadata of one called `vllm`.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        options = {
            "model": checkpoint,
            "served-model-name": MODEL,
            "host": "127.0.0.1",
            "port": port,
            "dtype": dtype,
            "max-model-len": MAX_MODEL_LEN,
            "max-num-seqs": MAX_NUM_SEQS,
            "num-gpu-blocks-override": NUM_BLOCKS,
            "tool-call-parser": "hermes",
            # As in configs/presets/laptop.yaml, and a process less to start.
            "distributed-executor-backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
        }
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        command += ["--enforce-eager", "--skip-mm-profiling", "--enable-auto-tool-choice", "--trust-request-mm-kwargs"]
        environment = {
            # Without what an engine in this process has set.
            **{name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
            "PYTHONPATH": str(PROJECT_ROOT / "deployments" / "vllm" / "import_shim"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every engine of the machine sits on the same core
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._server = Server(command, log=log, environment=environment, folder=log.parent)

    def wait(self) -> None:
        """Until it answers. Raises RuntimeError with the end of its log when it does not."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._server.running:
            try:
                if httpx.get(self.base_url + "/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.25)
        raise RuntimeError(f"vLLM alone did not start:\n{self._server.log_tail()}")

    def __enter__(self) -> VllmAlone:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop()


@dataclass(frozen=True)
class Reference:
    """What vLLM alone answered."""

    answers: dict[str, Answers]
    """In float32, by architecture."""
    bfloat16: dict[str, Json]
    """Of the small trained model, by the names of SMALL_CONVERSATIONS."""
    agent: dict[str, dict[str, Json]]
    """To `conversations.AGENT` in float32, by architecture."""
    scenes: list[str]
    """Its answers to `conversations.held_out_questions`."""
    paths: dict[str, list[str]]
    """Its routes and their methods, by its own description."""
