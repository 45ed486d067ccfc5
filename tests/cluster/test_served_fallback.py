"""An encoder that falls back from fused to eager, from its start to where an operator sees it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from configs.schema import AppConfig
from deployments.cli.chat_client import ChatClient
from deployments.cli.readiness import fallbacks
from encoder import forwards
from encoder.packing.run_counts import Fallback
from encoder.start_check import FusionError
from tests.cluster.controlled import ControlledEncoder
from tests.cluster.served import Cluster, ServedApp
from tests.cluster.stand_in_llm import StandInLLM
from tests.cluster.watched import WatchedIngress
from tests.serve import browser as browsers
from tests.waiting import until

pytestmark = pytest.mark.slow


class UnfusedEncoder(ControlledEncoder):
    """Its fused kernels do not give what the eager tower gives."""

    def __init__(self, config: AppConfig) -> None:
        def differs(*_: object, **__: object) -> forwards.TowerForward:
            raise FusionError("the fused tower differs")

        forwards._on_gpu = lambda tower: True
        forwards._fused_unsupported_reason = lambda tower: None
        forwards._fused = differs
        super().__init__(config)


@pytest.fixture(scope="module")
def unfused(cluster: Cluster, checkpoints: dict[str, Path]) -> Iterator[ServedApp]:
    from ray import serve

    from encoder.checkpoint.vision_config import VisionConfig

    checkpoint = checkpoints["qwen3_vl"]
    settings: dict[str, Any] = {"decode_workers": 1, "num_gpus": 0}
    config = AppConfig.model_validate({"model": str(checkpoint), "encoder_replica": settings})
    vision = VisionConfig.from_checkpoint(checkpoint)
    light: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0.1}}
    encoder = serve.deployment(name="Encoder", **light)(UnfusedEncoder).bind(config)
    llm = serve.deployment(name="LLM", **light)(StandInLLM).bind(config, vision.width)
    ingress = serve.deployment(name="Ingress", max_ongoing_requests=64, **light)(WatchedIngress)
    serve.run(ingress.bind(config, llm=llm, encoder=encoder), name="unfused", route_prefix="/unfused")
    yield ServedApp(cluster, "unfused")
    serve.delete("unfused")


def test_a_fallback_from_fused_kernels_is_counted_and_shown(unfused: ServedApp) -> None:
    """Nothing but a line in a log told that an encoder ran without them, and 2 to 9 times as slow: the metric, the
    page, and the first line of `vitray check --url`."""
    metric = "vitray_fused_kernel_fallbacks_total"
    until(lambda: unfused.exported("Encoder").get(metric) == 1, f"{metric} of 1")
    with ChatClient(unfused.url, None) as client:
        until(lambda: next(fallbacks(client.cluster())).status == "problem", "the encoder's report")
        first = next(fallbacks(client.cluster()))
    assert (first.name, first.status) == ("fused kernels", "problem")
    assert first.found.endswith(f"runs without them: {Fallback.DIFFERS.value}")
    with browsers.started() as browser:
        page = browsers.Watched(browser.new_context(viewport=browsers.VIEWPORT)).page
        page.goto(f"{unfused.url}/")
        replica = page.locator("[data-deployment=Encoder] li")
        expect(replica).to_contain_text("Slow, no fused kernels: ", timeout=browsers.TIMEOUT_MS)
        expect(replica).to_contain_text(Fallback.DIFFERS.value.replace("_", " "))
