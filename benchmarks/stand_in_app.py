"""The application with a stand-in for vLLM, for what is measured before the language model.

It must not know what is measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from ray import serve
from ray.serve import Application
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from configs.resolve import resolve
from configs.schema import AppConfig
from deployments.app import cluster_facts, resources, routing
from deployments.encoder import EncoderReplica
from deployments.ingress import Ingress
from deployments.vllm_compat import AsgiApp
from encoder.vision_config import VisionConfig
from tests.unit.deployments.controlled import StandInLLM


class TakesEmbeddings(StandInLLM):  # type: ignore[misc]  # unchecked where tests are not
    """Takes each request's embeddings as the application's replica does, checks them, and answers at once."""

    def __init__(self, config: AppConfig, width: int, merge_size: int) -> None:
        super().__init__(config, width, merge_size)

        async def chat(_: Request) -> Response:
            return JSONResponse({})

        self._answers.app = cast(AsgiApp, Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])]))


def bound(config: AppConfig, encoder: type[EncoderReplica], *of_encoder: object, llm: type[StandInLLM]) -> Application:
    """As `deployments.app.build_app` does. `of_encoder`: what the encoder's class takes beside the configuration."""
    vision = VisionConfig.from_checkpoint(Path(config.model))
    light: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0.1}, "max_ongoing_requests": 1024}
    encoders = serve.deployment(
        name="Encoder",
        ray_actor_options=resources(config.encoder_replica),
        max_ongoing_requests=512,
        request_router_config=routing(config.encoder_replica),
    )(encoder)
    llms = serve.deployment(name="LLM", request_router_config=routing(config.llm), **light)(llm)
    ingress = serve.deployment(name="Ingress", **light)(Ingress)
    return ingress.bind(
        config,
        encoders.bind(config, *of_encoder),
        llms.bind(config, vision.width, vision.spatial_merge_size),
    )


def build(args: dict[str, Any]) -> Application:
    """With the application's own encoders."""
    return bound(resolve(AppConfig.model_validate(args), cluster_facts()), EncoderReplica, llm=TakesEmbeddings)
