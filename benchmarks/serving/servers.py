"""Starts servers side by side, waits until each answers, and stops them all."""

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
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

from benchmarks.record import ROOT
from deployments.http_proxy.haproxy import environment
from examples.local_app import LocalApp, free_port

SECONDS_TO_STOP = 15.0
LOOK_EVERY_S = 0.5
FIRST_PORT = 8100


@dataclass(frozen=True)
class Peer:
    """Another server, run as a separate process."""

    name: str
    command: Sequence[str]
    port: int
    environment: Mapping[str, str] = field(default_factory=dict)


class Servers:
    """Our applications behind one `serve run`, and each peer as a process; all are stopped on exit."""

    def __init__(
        self,
        config: Mapping[str, Any] | None,
        peers: Sequence[Peer],
        *,
        gpu: bool,
        logs: Path,
        haproxy: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the servers.

        Args:
            config: a serve_config, whose applications are at the routes of their names; None without ours.
            logs: folder to which `serve.log` and `vllm.log` are written at the end.
            haproxy: use Serve's HAProxy for ours instead of its own proxy.
            variables: environment variables for all servers.
        """
        self._logs = logs
        self._scratch = Path(tempfile.mkdtemp(prefix="vitray-bench-", dir="/tmp"))
        self._peers: dict[str, subprocess.Popen[bytes]] = {}
        self._app: LocalApp | None = None
        self.urls: dict[str, str] = {}
        self.began = time.monotonic()
        shared = {**shared_environment(gpu=gpu), **(variables or {})}
        try:
            if config is not None:
                proxy = environment(self._scratch) if haproxy else {}
                self._app = LocalApp(dict(config), {**shared, **proxy})
                self._app.start()
                port = config["http_options"]["port"]
                names = [one["name"] for one in config["applications"]]
                self.urls = {name: f"http://127.0.0.1:{port}/{name}" for name in names}
            for peer in peers:
                own = {**os.environ, **shared, **peer.environment}
                with (self._scratch / f"{peer.name}.log").open("wb") as log:
                    self._peers[peer.name] = subprocess.Popen(
                        peer.command, cwd=ROOT, env=own, stdin=subprocess.DEVNULL, stdout=log,
                        stderr=subprocess.STDOUT, start_new_session=True,
                    )  # fmt: skip
                self.urls[peer.name] = f"http://127.0.0.1:{peer.port}"
        except BaseException:
            self.stop()
            raise

    def wait(self, seconds: float) -> dict[str, float]:
        """Waits until all answer, one has exited, or `seconds` have passed. Returns for each that answers the seconds
        from the start of all.
        """
        ready: dict[str, float] = {}

        async def look(client: httpx.AsyncClient, name: str) -> None:
            while name not in ready and not any(map(self.has_ended, self.urls)):
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
        if name in self._peers:
            return self._peers[name].poll() is not None
        return self._app is not None and self._app.ended

    def last_words(self, name: str) -> str:
        """Returns the last line with an error in the log of a server that did not answer."""
        log = self._app.log if self._app is not None and name not in self._peers else self._scratch / f"{name}.log"
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        told = [line for line in lines if re.search(r"\w(Error|Exception)\b", line)]
        return (told or lines or ["no log"])[-1].strip()[:500]

    def stop(self) -> None:
        """Stops every process, and keeps the logs. Safe to call at any time."""
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


def peer_port(number: int) -> int:
    """Returns a free port for the peer of this number, counted from 0."""
    return free_port(FIRST_PORT + 1 + number, "127.0.0.1")


def own_port() -> int:
    """Returns a free port for our applications."""
    return free_port(FIRST_PORT, "127.0.0.1")


def shared_environment(*, gpu: bool) -> Mapping[str, str]:
    """Returns variables for all servers: no network access, and sources that every process finds."""
    paths = [str(ROOT), *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)]
    if not gpu:  # for an environment with torch's CPU build and media packages built for CUDA
        paths.insert(0, str(ROOT / "deployments" / "vllm" / "import_shim"))
    variables = {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "FLASHINFER_DISABLE_VERSION_CHECK": "1",
    }
    if mode := os.environ.get("RAY_AUTH_MODE"):
        variables["RAY_AUTH_MODE"] = mode
    if not gpu:
        variables |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return variables


def _family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Returns a process and its descendants; none if it has exited."""
    with contextlib.suppress(psutil.NoSuchProcess):
        leader = psutil.Process(process.pid)
        return [*leader.children(recursive=True), leader]
    return []
