"""A Ray and a Serve of one's own, for as long as something is measured on them. It must not know what is served."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

START_S = 400.0


@contextmanager
def own_serve(
    *,
    request_timeout_s: float | None = None,
    **of_ray: Any,  # noqa: ANN401 - whatever Ray takes
) -> Iterator[tuple[str, Callable[..., None]]]:
    """Its address, and what deploys an application to it. `of_ray`: for `ray.init`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve
    from ray.serve.context import _get_global_client

    folder = tempfile.mkdtemp(prefix="vt", dir="/tmp")  # paths of Ray's sockets must be short
    try:
        ray.init(address="local", include_dashboard=False, log_to_driver=False, _temp_dir=folder, **of_ray)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        serve.start(http_options={"host": "127.0.0.1", "port": port, "request_timeout_s": request_timeout_s})
        client = _get_global_client()
        assert client is not None

        def deploy(application: dict[str, Any]) -> None:
            """As a config file gives it. Returns when it runs; raises RuntimeError."""
            from ray.serve.schema import ServeDeploySchema

            client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))
            deadline = time.monotonic() + START_S
            while (status := serve.status().applications[application["name"]]).status != "RUNNING":
                if status.status == "DEPLOY_FAILED" or time.monotonic() > deadline:
                    raise RuntimeError(f"the application did not start within {START_S:g} s: {status}")
                time.sleep(0.5)

        yield f"http://127.0.0.1:{port}", deploy
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
