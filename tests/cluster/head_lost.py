"""The head node is lost, and started again with Ray's state from a Redis, while a client asks through HAProxy of the
other node, which has all replicas. Then an encoder is killed, which Serve's controller has to replace.

A program: `test_two_nodes.py` runs it with HAProxy and `RAY_REDIS_ADDRESS` in its environment; the last line that it
prints is JSON. It starts nodes and connects to none: a process that is connected ends with its node.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from ray.cluster_utils import Cluster as Nodes

from deployments.http_proxy.haproxy import free_port
from tests.cluster.served import START_S
from tests.cluster.test_served_images import chat
from tests.unit.deployments.samples import png

WITHOUT_HEAD_S = 30.0
ENDS_S = 300.0
"""What goes on without a head ends within."""
ASKED_EVERY_S = 0.25
DEPLOY = """
import sys
from pathlib import Path
import ray
from ray import serve
from tests.cluster.served import Cluster, deploy
from tests.cluster.span_receiver import SpanReceiver

address, checkpoint, port = sys.argv[1:]
ray.init(address=address, log_to_driver=False)
serve.start(proxy_location="EveryNode", http_options={"host": "127.0.0.1", "port": int(port)})
deploy(Cluster(int(port), 0, SpanReceiver()), Path(checkpoint), "lost", encoders=2, patient=False, cache_bytes=0)
"""
REPLACE = """
import os, signal, sys
import ray
from ray.serve.context import _get_global_client
from tests.waiting import until

def encoders():
    found = _get_global_client().get_serve_details()["applications"]["lost"]["deployments"]["Encoder"]["replicas"]
    pids = {replica["pid"] for replica in found if replica["state"] == "RUNNING"}
    return pids if len(pids) == 2 else None

ray.init(address=sys.argv[1], log_to_driver=False)
before = until(encoders, "both encoders, as they were")
os.kill(min(before), signal.SIGKILL)
until(lambda: (now := encoders()) and min(before) not in now, "another encoder")
"""


class Client:
    """Asks one question after the other, in a thread, and notes when an answer was another than 200."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask_on)
        self.answered = 0
        self.failed_at: list[float] = []

    def __enter__(self) -> Client:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def answers(self, count: int) -> None:
        """Returns after so many more."""
        target = self.answered + count
        eventually(lambda: self.answered >= target, START_S)

    def _ask_on(self) -> None:
        while not self._ended.wait(ASKED_EVERY_S):
            try:
                status = httpx.post(self._url, json=chat(png()), timeout=60).status_code
            except httpx.HTTPError:
                status = 0
            if status == 200:
                self.answered += 1
            else:
                self.failed_at.append(time.monotonic())


def eventually(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s")
        time.sleep(0.1)


def python(source: str, *arguments: object) -> None:
    subprocess.run([sys.executable, "-c", source, *map(str, arguments)], check=True)


def main(checkpoint: Path) -> dict[str, Any]:
    head = {"num_cpus": 0, "include_dashboard": False, "gcs_server_port": free_port()}
    nodes = Nodes(initialize_head=True, head_node_args=head)
    try:
        nodes.add_node(num_cpus=4)
        python(DEPLOY, nodes.address, checkpoint, free_port())
        port = os.environ["RAY_SERVE_WORKER_PROXY_HTTP_PORT"]
        with Client(f"http://127.0.0.1:{port}/lost") as client:
            client.answers(5)
            lost_at = time.monotonic()
            head_node: Any = nodes.head_node
            head_node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
            nodes.head_node = None
            if "RAY_REDIS_ADDRESS" in os.environ:
                time.sleep(WITHOUT_HEAD_S)
                client.answers(1)
                nodes.add_node(wait=False, **head)
                python(REPLACE, nodes.address)
                client.answers(5)
            else:
                eventually(lambda: len(client.failed_at) > 2, ENDS_S)
        return {"answered": client.answered, "failed_after_s": [at - lost_at for at in client.failed_at]}
    finally:
        nodes.shutdown()


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
