"""The two ways to call a language model on a real Ray Serve: by gRPC, and by Ray alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.cluster.served import Cluster, ServedApp, deploy
from tests.cluster.test_served_images import ask, chat
from tests.unit.deployments.samples import png

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]


@pytest.fixture(scope="module")
def by_ray(cluster: Cluster, checkpoints: dict[str, Path]) -> Iterator[ServedApp]:
    from ray import serve

    yield deploy(cluster, checkpoints["qwen3_vl"], "by-ray", ingress={"llm_transport": "ray"})
    serve.delete("by-ray")


def test_ray_alone_brings_the_same_answers(by_ray: ServedApp, app: ServedApp) -> None:
    """As gRPC does: of text, and of a picture that is asked about again."""
    text = {"messages": [{"role": "user", "content": "Hello"}]}
    body = chat(png(96, 64, (5, 5, 5)))
    before = app.ingress("counts")["GRPC_CALLS"]
    without, with_grpc = (
        [answer.json()["images"] for answer in map(partial(ask, asked), (text, body, body))] for asked in (by_ray, app)
    )
    assert without[0] == with_grpc[0] == []
    for one, other in zip(without[1:], with_grpc[1:], strict=True):
        assert one[0]["norm"] == pytest.approx(other[0]["norm"], rel=1e-4)
    assert app.ingress("counts")["GRPC_CALLS"] - before == 3, "the first look at the picture waits for an encoder"
    assert by_ray.ingress("counts")["GRPC_CALLS"] == 0


def test_an_answer_over_the_largest_message_of_grpc_comes_whole(by_ray: ServedApp, app: ServedApp) -> None:
    """4 MiB. It was a 500, after all the work."""
    body = chat(png(96, 64, (5, 5, 6)), logprobs=True, top_logprobs=20)
    for asked in (by_ray, app):
        assert ask(asked, body).json()["more"] == "x" * (20 << 18)
