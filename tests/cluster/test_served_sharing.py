"""Language models and encoders that share GPUs, as `vitray plan` prints it: Ray puts one of each on every GPU.

The GPUs are Ray's alone, which counts them and gives their numbers; what is placed there computes nothing.
"""

from __future__ import annotations

import ast
import textwrap
from typing import Any

import pytest

from deployments.routing.replica_identity import version_metadata
from tests.programs import output_of_python

pytestmark = pytest.mark.slow

GPUS = 2
START_S = 90
"""A language model that has no GPU waits for ever."""
PROGRAM = textwrap.dedent(
    """
    import sys

    import yaml
    from ray import serve

    from benchmarks.serving.own_serve import own_serve
    from planner import configuration
    from planner.model import Layout, Placement
    from tests.cluster.test_served_sharing import NAME

    GPUS, START_S = int(sys.argv[1]), float(sys.argv[2])
    printed = configuration.serve_config("model", Layout(Placement.SHARED, GPUS, GPUS), llm_gpus=1)
    (application,) = yaml.safe_load(printed)["applications"]
    with own_serve(start_s=START_S, num_cpus=8, num_gpus=GPUS) as (_, deploy):
        deploy(application | {"import_path": NAME})
        told = {}
        for name in ("Encoder", "LLM"):
            replicas = serve.get_deployment_handle(name, application["name"]).broadcast("gpus")
            told[name] = sorted(replicas.results(timeout_s=60))
    print(told)
    """
)
NAME = f"{__name__}:build"


class Placed:
    """In place of each deployment's class."""

    def __init__(self, *arguments: object, **others: object) -> None:
        """As all of them are bound."""

    def __call__(self) -> None:
        """What an ingress needs to be one."""

    def record_replica_metadata(self) -> dict[str, str]:
        return version_metadata()

    def gpus(self) -> list[int]:
        import ray

        return [int(number) for number in ray.get_gpu_ids()]


def build(args: dict[str, Any]) -> object:
    """The application's own, with nothing in it."""
    from deployments import app

    vars(app).update(EncoderReplica=Placed, LLM=Placed, Ingress=Placed)
    return app.build_app(args)


def test_every_gpu_has_one_of_each() -> None:
    told = ast.literal_eval(output_of_python(PROGRAM, str(GPUS), str(START_S)).splitlines()[-1])
    each = [[number] for number in range(GPUS)]
    assert told == {"Encoder": each, "LLM": each}
