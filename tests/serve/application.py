"""What is tested: the real `serve run` with a configuration of three applications, on a Ray cluster of its own.

`qwen3` and `qwen25` are the two architectures in float32 under generous limits, `qwen3` with two encoders, of which one
may be killed; vLLM's engines load their embeddings from shared memory.
They have random weights. `qwen25`'s encoder has room in shared memory for all but the largest pictures. `tight` is the
shipped model, which sees, in bfloat16, behind a key, under limits that a test can reach; it may fetch from this
machine, keeps no encoder while nobody sends images, and may be broken.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import yaml

from configs.resolve import PROJECT_ROOT
from deployments.http_proxy import limits as proxy_bounds
from deployments.http_proxy.haproxy import environment
from deployments.telemetry.metrics import Counter
from tests.programs import RAY_STARTS, RAY_TIMED_OUT, free_port
from tests.serve.asking import KEY, OTHER_KEY
from tests.serve.conversations import MODEL
from tests.serve.processes import Server, family, title
from tests.serve.vllm_alone import MAX_MODEL_LEN, MAX_NUM_SEQS, NUM_BLOCKS

SERVE = str(Path(sys.executable).parent / "serve")
START_TIMEOUT_S = 800.0
LOOKS = 5
# By the names of the applications with generous limits.
ARCHITECTURES = {"qwen3": "qwen3_vl", "qwen25": "qwen2_5_vl"}
RETRY_AFTER_S = 3
# Of the application `tight`.
MAX_BODY_BYTES = 400_000
MAX_IMAGE_BYTES = 60_000
MAX_IMAGE_PIXELS = 1_000_000
MAX_IMAGES = 4
MAX_VISUAL_TOKENS = 300
FETCH_TIMEOUT_S = 3.0
MAX_REDIRECTS = 2
MAX_ANSWERING = 3
MAX_WAITING = 4
MAX_RETRY_AFTER_S = 5
MAX_AT_THE_DOOR = 12
MAX_WAITING_AT_THE_DOOR = 6
KEYS_VARIABLE = "VITRAY_TEST_KEYS"
# Of the application `qwen25`, whose embeddings have rows of 512 bytes and at most 1024 of them.
SHARED_EMBEDDING_BYTES = 2**19
CACHE_BYTES = SHARED_EMBEDDING_BYTES // 4

Settings = dict[str, Any]


def application_settings(
    name: str, checkpoint: Path, *, dtype: str, ingress: Settings, deployments: list[Settings]
) -> Settings:
    return {
        "name": name,
        "route_prefix": f"/{name}",
        "import_path": "deployments.app:build_app",
        "args": {
            "model": str(checkpoint),
            "encoder_replica": {"num_cpus": 0.01, "decode_workers": 1},
            "llm": {
                "num_cpus": 0.01,
                "early_prefill_min_tokens": 16,  # small pictures are read one by one too
                "engine_args": {
                    "served_model_name": [MODEL],
                    "dtype": dtype,  # of itself vLLM takes bfloat16 for a checkpoint in float32
                    "max_model_len": MAX_MODEL_LEN,
                    "max_num_seqs": MAX_NUM_SEQS,
                    "enforce_eager": True,
                    # As in configs/presets/laptop.yaml.
                    "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
                    "num_gpu_blocks_override": NUM_BLOCKS,
                },
                "server_args": {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"},
            },
            "ingress": {"num_cpus": 0.01, "retry_after_s": RETRY_AFTER_S, **ingress},
        },
        "deployments": deployments,
    }


def configuration(checkpoints: dict[str, Path]) -> Settings:
    """A serve_config for the checkpoints under `qwen3`, `qwen25` and `tight`, on a free port."""
    tight = application_settings(
        "tight",
        checkpoints["tight"],
        dtype="bfloat16",
        ingress={
            "auth": {"api_keys_env": KEYS_VARIABLE, "management_routes": "open"},
            "max_body_bytes": MAX_BODY_BYTES,
            "max_image_bytes": MAX_IMAGE_BYTES,
            "max_image_pixels": MAX_IMAGE_PIXELS,
            "max_images_per_request": MAX_IMAGES,
            "max_visual_tokens_per_request": MAX_VISUAL_TOKENS,
            "max_visual_tokens_in_flight": MAX_VISUAL_TOKENS,
            "max_requests_waiting": MAX_WAITING,
            "max_retry_after_s": MAX_RETRY_AFTER_S,
            "fetch": {
                "http": True,
                "allow_private_addresses": True,
                "timeout_s": FETCH_TIMEOUT_S,
                "max_redirects": MAX_REDIRECTS,
            },
        },
        deployments=[
            {
                "name": "Ingress",
                "num_replicas": 1,
                "max_ongoing_requests": MAX_AT_THE_DOOR,
                "max_queued_requests": MAX_WAITING_AT_THE_DOOR,
            },
            {
                "name": "Encoder",
                "autoscaling_config": {"min_replicas": 0, "initial_replicas": 0, "max_replicas": 1},
            },
            {
                "name": "LLM",
                "num_replicas": 1,
                "max_ongoing_requests": MAX_ANSWERING,
                "max_queued_requests": MAX_WAITING,
                "health_check_period_s": 1,
            },
        ],
    )
    roomy = [
        application_settings(
            name,
            checkpoints[name],
            dtype="float32",
            ingress={},
            deployments=[{"name": "Encoder", "num_replicas": 2}] if name == "qwen3" else [],
        )
        for name in ARCHITECTURES
    ]
    roomy[1]["args"]["encoder_replica"] |= {
        "embedding_shm_bytes": SHARED_EMBEDDING_BYTES,
        "cache_bytes": CACHE_BYTES,
    }
    return {
        "http_options": {"host": "127.0.0.1", "port": free_port(), "request_timeout_s": 610},
        "applications": [*roomy, tight],
    }


class ServedApplication:
    """`serve run` of a configuration. Starts at once, in the background; `wait` before the first request. As a context
    manager it waits at the start, and stops at the end."""

    def __init__(self, settings: Settings, *, folder: Path, haproxy: bool = False) -> None:
        """`haproxy`: in front, as `vitray serve` has it, in place of Serve's own proxy."""
        self._settings = settings
        self._url = "http://127.0.0.1:{port}".format(**settings["http_options"])
        config_file = folder / "serve_config.yaml"
        config_file.write_text(yaml.safe_dump(settings, sort_keys=False))
        # Paths of Ray's sockets must be short, which pytest's folders are not.
        self._ray_folder = Path(tempfile.mkdtemp(prefix="vitray", dir="/tmp"))
        self._environment = _environment(self._ray_folder)
        self._start = partial(
            Server,
            [SERVE, "run", str(config_file), "--address", "local"],
            log=folder / "serve_run.log",
            environment=self._environment | (environment(self._ray_folder / "haproxy") if haproxy else {}),
            folder=PROJECT_ROOT,
        )
        self._server = self._start()

    def __enter__(self) -> Self:
        try:
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def base_url(self, name: str) -> str:
        return f"{self._url}/{name}"

    def wait(self) -> None:
        """Until every application answers. Raises RuntimeError with the end of the log when they do not."""
        waiting = [application["name"] for application in self._settings["applications"]]
        deadline, starts = time.monotonic() + START_TIMEOUT_S, 1
        while waiting and time.monotonic() < deadline:
            if not self._server.running:
                if starts == RAY_STARTS or RAY_TIMED_OUT not in self._server.log_tail():
                    break
                starts += 1
                self._server.stop()
                self._server = self._start()
            time.sleep(0.25)
            try:
                if httpx.get(self.base_url(waiting[0]) + "/health", timeout=5).status_code == 200:
                    waiting.pop(0)
            except httpx.TransportError:
                continue
        if waiting:
            raise RuntimeError(f"{waiting} did not start:\n{self._server.log_tail()}")

    def serve(self, *arguments: str) -> str:
        """What Serve's command prints about this cluster, by way of Ray's dashboard: `deploy`, `status`."""
        found = re.search(r"dashboard at \S*?(127\.0\.0\.1:\d+)", self.log())
        assert found is not None, "Ray has no dashboard"
        command = [SERVE, *arguments, "--address", f"http://{found[1]}"]
        operators = self._environment | {"RAY_AUTH_MODE": "token"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=operators)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def replicas(self, name: str, deployment: str) -> list[psutil.Process]:
        """The processes of a deployment's replicas, by the title that Ray gives them.

        Looked for several times: Ray rewrites a title at every call, and one may be read half done.
        """
        wanted = f"ray::ServeReplica:{name}:{deployment}"
        found: dict[int, psutil.Process] = {}
        for _ in range(LOOKS):
            for process in family(self._server.pid):
                if title(process).startswith(wanted):
                    found[process.pid] = process
            time.sleep(0.02)
        return [process for process in found.values() if process.is_running()]

    def engine_cores(self, name: str) -> list[psutil.Process]:
        """The processes of vLLM's engines behind an application, at least one.

        They are what an LLM replica spawns; vLLM's title for them does not always take.
        """
        found = []
        for replica in self.replicas(name, "LLM"):
            processes = family(replica.pid)
            spawned = [process for process in processes if "multiprocessing.spawn" in title(process)]
            titled = [process for process in processes if title(process).startswith("VLLM::EngineCore")]
            found += titled or sorted(spawned, key=lambda process: process.memory_info().rss)[-1:]
        assert found, f"no engine behind {name}: {[title(process) for process in family(self._server.pid)]}"
        return found

    @property
    def pid(self) -> int:
        """Of `serve run`, whose descendants are all of it."""
        return self._server.pid

    def log(self) -> str:
        """What `serve run` printed so far, the replicas' logs included."""
        return self._server.log.read_text(errors="replace")

    def logs(self) -> bytes:
        """Everything that the application's processes have written so far, printed or into Ray's folder of logs."""
        written = [self._server.log, *sorted(self._ray_folder.glob("**/logs/**/*"))]
        return b"\n".join(file.read_bytes() for file in written if file.is_file() and not file.is_symlink())

    def log_file(self, name: str, deployment: str) -> str:
        """What the replicas of a deployment have written into the log files that Serve gives them."""
        files = self._ray_folder.glob(f"**/logs/serve/replica_{name}_{deployment}_*.log")
        return "\n".join(file.read_text(errors="replace") for file in files if not file.is_symlink())

    def exported(self, name: str, deployment: str, count: Counter) -> float:
        """A counter of an application's deployment, as Ray's metrics ports tell it now."""
        listed = [
            json.loads(file.read_text()) for file in self._ray_folder.glob("**/prom_metrics_service_discovery.json")
        ]
        found = 0.0
        for target in {target for groups in listed for group in groups for target in group["targets"]}:
            for line in httpx.get(f"http://{target}/metrics", timeout=30).text.splitlines():
                of_it = f'application="{name}"' in line and f'deployment="{deployment}"' in line
                if of_it and line.startswith(f"ray_{count.metric}_total{{"):
                    found += float(line.rpartition(" ")[2])
        return found

    def stop(self) -> None:
        self._server.stop()
        shutil.rmtree(self._ray_folder, ignore_errors=True)


def _environment(ray_folder: Path) -> dict[str, str]:
    """An operator's shell: nothing of the test run's, and no other Ray cluster in sight."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHONPATH"))}
    return environment | {
        "RAY_TMPDIR": str(ray_folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        KEYS_VARIABLE: f"tests {KEY}\nother {OTHER_KEY}",
        proxy_bounds.VARIABLE: proxy_bounds.IMPORT_PATH,
        "RAY_metrics_report_interval_ms": "4000",  # Ray drops a report that takes half of it
        "RAY_worker_niceness": "0",  # else every other process of the machine goes first
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else the engines sit on the same core
        "OMP_NUM_THREADS": "1",
    }
