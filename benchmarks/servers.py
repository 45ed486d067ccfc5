"""Starts what is compared, side by side, waits until each answers, and ends all of it. It must not know requests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

from benchmarks import serving_plan
from benchmarks.record import ROOT
from benchmarks.serving_plan import Served
from examples.local_app import LocalApp, free_port

SECONDS_TO_STOP = 15.0
LOOK_EVERY_S = 0.5
FIRST_PORT = 8100


class Servers:
    """Our applications behind one `serve run`, each vLLM alone by itself; on exit all of it ends."""

    def __init__(self, served: Sequence[Served], checkpoint: Path, *, gpu: bool, logs: Path) -> None:
        """Starts them. `logs`: a folder, to which `serve.log` and `vllm.log` come in the end."""
        self._logs = logs
        self._scratch = Path(tempfile.mkdtemp(prefix="vitray-bench-", dir="/tmp"))
        self._peers: dict[str, subprocess.Popen[bytes]] = {}
        self._app: LocalApp | None = None
        self.urls: dict[str, str] = {}
        self.began = time.monotonic()
        environment = shared_environment(gpu=gpu)
        try:
            if any(one.rung is not None for one in served):
                config = serve_config_of(served, checkpoint, gpu=gpu, state_folder=self._scratch / "state")
                port = config["http_options"]["port"]
                self._app = LocalApp(config, environment)
                self._app.start()
                self.urls = {one.name: f"http://127.0.0.1:{port}/{one.name}" for one in served if one.rung is not None}
            for number, one in enumerate(one for one in served if one.rung is None):
                port = free_port(FIRST_PORT + 1 + number, "127.0.0.1")
                command = serving_plan.vllm_command(one, checkpoint, gpu=gpu, port=port)
                own = os.environ | environment | serving_plan.vllm_environment(one)
                with (self._scratch / f"{one.name}.log").open("wb") as log:
                    self._peers[one.name] = subprocess.Popen(
                        command, cwd=ROOT, env=own, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )  # fmt: skip
                self.urls[one.name] = f"http://127.0.0.1:{port}"
        except BaseException:
            self.stop()
            raise

    def wait(self, seconds: float) -> dict[str, float]:
        """Until all answer, or for so many seconds: of each that does, the seconds from the start of all."""
        ready: dict[str, float] = {}

        async def look(client: httpx.AsyncClient, name: str) -> None:
            while name not in ready and not self.has_ended(name):
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get(f"{self.urls[name]}/health")).status_code == 200:
                        ready[name] = time.monotonic() - self.began
                        print(f"{name} answers after {ready[name]:.0f} s", flush=True)
                await asyncio.sleep(LOOK_EVERY_S)

        async def look_at_all() -> None:
            async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.gather(*(look(client, name) for name in self.urls)), seconds)

        asyncio.run(look_at_all())
        return ready

    def has_ended(self, name: str) -> bool:
        peer = self._peers.get(name)
        return peer is not None and peer.poll() is not None

    def last_words(self, name: str) -> str:
        """The last line of a log that tells of an error, for what did not answer."""
        log = self._app.log if self._app is not None and name not in self._peers else self._scratch / f"{name}.log"
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        told = [line for line in lines if re.search(r"\w(Error|Exception)\b", line)]
        return (told or lines or ["no log"])[-1].strip()[:500]

    def stop(self) -> None:
        """Ends every process, and keeps the logs. Safe to call at any time."""
        families = [_family(peer) for peer in self._peers.values()]
        for peer in self._peers.values():
            if peer.poll() is None:
                peer.send_signal(signal.SIGINT)
        if self._app is not None and self._app.started:
            self._app.stop(keep_log=True)
            self._keep(self._app.log, "serve.log")
            shutil.rmtree(self._app.log.parent, ignore_errors=True)
        for peer in self._peers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                peer.wait(SECONDS_TO_STOP)
        for process in [process for family in families for process in family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for peer in self._peers.values():
            peer.wait()
        for name in self._peers:
            self._keep(self._scratch / f"{name}.log", "vllm.log")
        self._peers = {}
        self._app = None
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _keep(self, log: Path, name: str) -> None:
        self._logs.mkdir(parents=True, exist_ok=True)
        if log.is_file():
            with (self._logs / name).open("ab") as kept:
                kept.write(log.read_bytes())

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def serve_config_of(served: Sequence[Served], checkpoint: Path, *, gpu: bool, state_folder: Path) -> dict[str, Any]:
    port = free_port(FIRST_PORT, "127.0.0.1")
    return serving_plan.serve_config(served, checkpoint, gpu=gpu, port=port, state_folder=state_folder)


def shared_environment(*, gpu: bool) -> Mapping[str, str]:
    """Of everything that is started: no network is asked, and the sources are found by every process."""
    paths = [str(ROOT), *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)]
    if not gpu:  # where torch's CPU build lies beside media packages built for CUDA
        paths.insert(0, str(ROOT / "deployments" / "import_shim"))
    environment = {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "FLASHINFER_DISABLE_VERSION_CHECK": "1",
    }
    if mode := os.environ.get("RAY_AUTH_MODE"):
        environment["RAY_AUTH_MODE"] = mode
    if not gpu:
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return environment


def _family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """A process and its descendants; none when it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        leader = psutil.Process(process.pid)
        return [*leader.children(recursive=True), leader]
    return []
