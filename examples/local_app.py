"""Starts the application of a configuration on this machine, reports its progress, and stops all of its processes.

`serve run` becomes the leader of its own process session with its own Ray instance, which has a fresh temporary folder
and a fresh token; a running Ray is never used. `stop` ends exactly the processes of that session. This module must not
depend on the requests sent to the application.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
DASHBOARD = re.compile(r"View the dashboard at (?:http://)?([\d.]+:\d+)")
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
SECONDS_TO_STOP = 20.0  # for `serve run` itself
SECONDS_TO_FOLLOW = 4.0  # for its remaining processes, before each harsher signal
LOG_LINES = 15


class StartError(Exception):
    """The application did not start; the message gives the reason, as far as it is known."""


def free_port(wanted: int, host: str) -> int:
    """Returns `wanted` if nothing listens on it, else a port that the system chooses."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise StartError(f"{host} has no free port")


class LocalApp:
    """One application, from `start` to `stop`; as a context manager, it stops the application in any case."""

    def __init__(self, config: dict[str, Any], environment: Mapping[str, str] | None = None) -> None:
        """`config`: a parsed serve_config.yaml; its HTTP port is replaced if it is in use.

        `environment`: additional variables for the application, which override those of this process and those set
        here.
        """
        http = {"host": "127.0.0.1", "port": 8000, **(config.get("http_options") or {})}
        http["port"] = free_port(http["port"], http["host"])
        here = "127.0.0.1" if http["host"] in ("0.0.0.0", "::") else http["host"]
        self.base_url = f"http://{here}:{http['port']}/v1"
        self.log = Path()
        self._environment = dict(environment or {})
        self._config = {**config, "http_options": http}
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._token = secrets.token_hex(16)
        self._dashboard: str | None = None
        self._ready = False

    def __enter__(self) -> LocalApp:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def started(self) -> bool:
        """Whether there is anything to stop."""
        return self._folder is not None

    @property
    def ended(self) -> bool:
        """Whether `serve run` has exited."""
        return self._process is not None and self._process.poll() is not None

    def start(self) -> None:
        # Not below TMPDIR: Ray creates sockets there, whose paths must be shorter than 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="vitray-demo-", dir="/tmp"))
        self.log = self._folder / "serve.log"
        config = self._folder / "serve_config.yaml"
        config.write_text(yaml.safe_dump(self._config, sort_keys=False))
        environment = {
            name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_NAMESPACE")
        }
        environment |= {
            "RAY_TMPDIR": str(self._folder),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
            "PYTHONUNBUFFERED": "1",
            **self._environment,
        }
        serve = Path(sys.executable).with_name("serve")
        # If Ray is in a folder of PYTHONPATH, its programs are not next to Python.
        program = [str(serve)] if serve.exists() else [sys.executable, "-m", "ray.serve.scripts"]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*program, "run", "--address", "local", "--app-dir", str(ROOT), str(config)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, timeout_s: float, done: Callable[[str], None], waiting: Callable[[str], None]) -> None:
        """Returns when every deployment is up.

        Args:
            done: called once with the name of each part that has come up.
            waiting: called about twice a second with the names of the awaited parts.

        Raises:
            StartError: the start failed or took longer than `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        finished: set[str] = set()
        while True:
            ready, missing = self._progress()
            for name in ready:
                if name not in finished:
                    finished.add(name)
                    done(name)
            if not missing:
                self._ready = True
                return
            if time.monotonic() > deadline:
                raise StartError(f"not up after {timeout_s:.0f} s; not running: {', '.join(missing)}")
            waiting(", ".join(missing))
            time.sleep(0.5)

    def last_words(self) -> str:
        """Returns the end of the log from its last error, or its last lines."""
        try:
            lines = [ANSI.sub("", line) for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        except OSError:
            return ""
        errors = [n for n, line in enumerate(lines) if re.search(r"Traceback|\bERROR\b|\w+(Error|Exception):", line)]
        first = max(0, errors[-1] - LOG_LINES // 2) if errors else len(lines) - LOG_LINES
        return "\n".join(lines[max(0, first) :][:LOG_LINES])

    def stop(self, *, keep_log: bool = False) -> None:
        """Ends every process of the session, by Serve's own shutdown or else by force. Safe to call at any time."""
        process = self._process
        if process is not None:
            memory = _shared_memory(process.pid)
            # On SIGINT, `serve run` shuts Serve down in order; while Serve is still starting, ending Ray is faster.
            process.send_signal(signal.SIGINT if self._ready else signal.SIGTERM)
            _ended(lambda: process.poll() is not None, SECONDS_TO_STOP)
            for force in (signal.SIGTERM, signal.SIGKILL):
                if _ended(lambda: not any(_members(process.pid)), SECONDS_TO_FOLLOW):
                    break
                for pid in _members(process.pid):
                    _signal(pid, force)
            else:
                _ended(lambda: not any(_members(process.pid)), SECONDS_TO_STOP)
            process.wait()
            for name in memory:  # a killed process could not remove its own files
                name.unlink(missing_ok=True)
            self._process = None
        if self._folder is not None and not keep_log:
            shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """Kills every process of the session immediately."""
        if self._process is not None:
            for pid in _members(self._process.pid):
                _signal(pid, signal.SIGKILL)

    def _progress(self) -> tuple[list[str], list[str]]:
        """Returns the names of the parts that are up, and of those that are not."""
        assert self._process is not None
        if self.ended:
            raise StartError(f"`serve run` ended with exit code {self._process.returncode}")
        if self._dashboard is None:
            found = DASHBOARD.search(ANSI.sub("", self.log.read_text(errors="replace")))
            if found is None:
                return [], ["Ray"]
            self._dashboard = found[1]
        applications = self._applications()
        if not applications:
            return ["Ray"], ["Serve"]
        ready, missing = ["Ray"], []
        for application in applications.values():
            if application["status"] in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise StartError(_reason(application))
            if not application["deployments"]:
                missing.append("Serve")
            for name, deployment in application["deployments"].items():
                (ready if deployment["status"] == "HEALTHY" else missing).append(name)
            if application["status"] != "RUNNING" and not missing:
                missing.append("routes")
        return ready, missing

    def _applications(self) -> dict[str, Any]:
        """Returns Serve's status of its applications; empty while there is none."""
        request = urllib.request.Request(
            f"http://{self._dashboard}/api/serve/applications/", headers={"Authorization": f"Bearer {self._token}"}
        )
        try:
            with NO_PROXY.open(request, timeout=10) as response:
                applications: dict[str, Any] = json.load(response)["applications"]
                return applications
        except (OSError, ValueError, KeyError):  # OSError includes urllib's; the dashboard starts before it can respond
            return {}


def _reason(application: dict[str, Any]) -> str:
    """Returns Serve's description of a failure: the failed deployments and the exceptions, without stack traces."""
    failed = [name for name, entry in application["deployments"].items() if "fail" in entry["message"]]
    messages = [application["message"], *(entry["message"] for entry in application["deployments"].values())]
    lines = [ANSI.sub("", line) for message in messages for line in message.splitlines()]
    # Ray and Serve wrap a replica's exception in their own, each with a stack; the wrappers end in "Traceback".
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception): (?!Traceback|ray::)", line)]
    told = list(dict.fromkeys(errors or [line for line in lines if line.strip()]))[-LOG_LINES:]
    return "\n  ".join([f"{', '.join(failed) or 'Serve'}: {application['status']}", *told])


def _members(session: int) -> Iterator[int]:
    """Yields the processes of a session; Ray gives its workers their own process groups, but no new session."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if os.getsid(int(entry.name)) == session and state != "Z":
                    yield int(entry.name)
            except OSError:  # the process has ended
                continue


def _shared_memory(session: int) -> set[Path]:
    """Returns the files in /dev/shm that processes of the session have open: hundreds of MB for vLLM's queues."""
    found = set()
    for pid in _members(session):
        try:
            mapped = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        found |= {Path(name) for name in re.findall(r"/dev/shm/(?:psm_|sem\.mp-)\S+(?=\n)", mapped)}
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _ended(has_ended: Callable[[], bool], seconds: float) -> bool:
    """Waits until `has_ended`; returns False after `seconds`."""
    deadline = time.monotonic() + seconds
    while not has_ended():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
