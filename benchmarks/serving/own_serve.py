"""A separate Ray and Serve for the duration of a measurement."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deployments.http_proxy.haproxy import environment
from examples.local_app import free_port

START_S = 400.0
LINES = 30
"""Lines shown of a log that contains errors."""


def errors_logged(folder: Path) -> str:
    """Returns the end of each replica's log that contains errors. `folder`: of a Ray."""
    logs = sorted(folder.glob("session_latest/logs/serve/replica_*.log"))
    texts = {log.name: log.read_text(errors="replace") for log in logs}
    ends = ["\n".join([f"{name}:", *text.splitlines()[-LINES:]]) for name, text in texts.items() if "ERROR " in text]
    return "\n\n".join(ends) or f"no errors in the logs of {len(logs)} replicas"


@contextmanager
def own_serve(
    *,
    request_timeout_s: float | None = None,
    haproxy: bool = False,
    start_s: float = START_S,
    **of_ray: Any,  # noqa: ANN401 - arguments of `ray.init`
) -> Iterator[tuple[str, Callable[..., None]]]:
    """Yields Serve's URL and a function that deploys an application. `haproxy`: use Serve's HAProxy instead of its own
    proxy, which requires that nothing has imported `ray.serve`. `start_s`: an application's time to start. `of_ray`:
    for `ray.init`.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    folder = tempfile.mkdtemp(prefix="vt", dir="/tmp")  # limits on socket paths of Ray and HAProxy
    if haproxy:
        os.environ.update(environment(Path(folder)))
    import ray
    from ray import serve
    from ray.serve.context import _get_global_client

    try:
        ray.init(address="local", include_dashboard=False, log_to_driver=False, _temp_dir=folder, **of_ray)
        port = free_port(0, "127.0.0.1")
        serve.start(http_options={"host": "127.0.0.1", "port": port, "request_timeout_s": request_timeout_s})
        client = _get_global_client()
        assert client is not None

        def deploy(application: dict[str, Any]) -> None:
            """Deploys an application given as in a config file, and waits until it runs. Raises RuntimeError."""
            from ray.serve.schema import ServeDeploySchema

            client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))
            deadline = time.monotonic() + start_s
            while (status := serve.status().applications[application["name"]]).status != "RUNNING":
                if status.status == "DEPLOY_FAILED" or time.monotonic() > deadline:
                    raise RuntimeError(f"the application did not start within {start_s:g} s: {status}")
                time.sleep(0.5)

        yield f"http://127.0.0.1:{port}", deploy
    except Exception as error:
        error.add_note(errors_logged(Path(folder)))  # the logs are deleted with the folder
        raise
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
