"""The application with a stand-in for vLLM, for measurements of the stages before the language model."""

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
from deployments.encoder_replica.deployment import EncoderReplica
from deployments.ingress.deployment import Ingress
from deployments.vllm.compat import AsgiApp
from encoder.checkpoint.vision_config import VisionConfig
from tests.cluster.stand_in_llm import StandInLLM


class TakesEmbeddings(StandInLLM):
    """Receives and checks each request's embeddings as the application's replica does, and answers immediately."""

    def __init__(self, config: AppConfig, width: int) -> None:
        super().__init__(config, width)

        async def chat(_: Request) -> Response:
            return JSONResponse({})

        self.seen.app = cast(AsgiApp, Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])]))


def bound(config: AppConfig, encoder: type[EncoderReplica], *of_encoder: object, llm: type[StandInLLM]) -> Application:
    """Builds the application as `deployments.app.build_app` does. `of_encoder`: the encoder's further arguments."""
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
        llm=llms.bind(config, vision.width),
        encoder=encoders.bind(config, *of_encoder),
    )


def build(args: dict[str, Any]) -> Application:
    """Builds it with the application's own encoders."""
    return bound(resolve(AppConfig.model_validate(args), cluster_facts()), EncoderReplica, llm=TakesEmbeddings)
