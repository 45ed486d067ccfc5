"""The application as a config file gives it to Serve, with stand-ins: for tests of how it scales."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray import serve
from ray.serve import Application

from configs.schema import AppConfig
from deployments.app import routing
from encoder.checkpoint.vision_config import VisionConfig
from tests.cluster.controlled import ControlledEncoder
from tests.cluster.stand_in_llm import StandInLLM
from tests.cluster.watched import WatchedIngress


class BusyLLM(StandInLLM):
    """Its engine runs every request at once; a tenth of its KV cache each."""

    def record_autoscaling_stats(self) -> dict[str, float]:
        running = self._requests.num_in_flight
        told = SimpleNamespace(
            num_running_reqs=running, num_waiting_reqs=0, num_skipped_waiting_reqs=0, kv_cache_usage=running / 10
        )
        self._stats.record(told)
        return super().record_autoscaling_stats()


def build(args: dict[str, Any]) -> Application:
    """As deployments/app.py does; `args` are those of AppConfig."""
    config = AppConfig.model_validate(args)
    vision = VisionConfig.from_checkpoint(Path(config.model))
    light: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0.1}, "max_ongoing_requests": 256}
    encoder = serve.deployment(name="Encoder", request_router_config=routing(config.encoder_replica), **light)(
        ControlledEncoder
    )
    llm = serve.deployment(name="LLM", request_router_config=routing(config.llm), **light)(BusyLLM)
    ingress = serve.deployment(name="Ingress", **light)(WatchedIngress)
    return ingress.bind(config, llm=llm.bind(config, vision.width), encoder=encoder.bind(config))
