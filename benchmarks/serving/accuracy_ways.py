"""Configurations of our encoder: each rung of the ladder and each attention backend; and the embeddings that each
computes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from PIL import Image

from benchmarks.ladder.rungs import LABELS, RUNGS, switches_of
from configs.encoder_config import AttentionName, EncoderConfig
from encoder import Encoder

BACKENDS = tuple(name for name in get_args(AttentionName) if name != "auto")
BUDGETS = (64, 128, 256, 512, 1024, 2048)
"""Token budgets of graphs: sixteen pictures of 64 to 512 pixels fit, and capturing a set takes seconds."""
IMAGES_AT_ONCE = 16
SLOW = "compile"


@dataclass(frozen=True)
class Configuration:
    """A rung with an attention backend."""

    rung: str
    attention: AttentionName = "auto"

    @property
    def name(self) -> str:
        return self.rung if self.attention == "auto" else f"{self.rung}, {self.attention}"

    @property
    def label(self) -> str:
        chosen = "" if self.attention == "auto" else f", attention by {self.attention}"
        return f"{LABELS[self.rung]}{chosen}"


@dataclass(frozen=True)
class Encoded:
    """One picture's embedding in host memory, in the form that vLLM accepts."""

    tokens: torch.Tensor
    """`[num_tokens, width]`"""
    grid_thw: tuple[int, int, int]


def list_configurations(rungs: Sequence[str] = RUNGS, backends: Sequence[str] = BACKENDS) -> list[Configuration]:
    """Returns each rung with its defaults, then each backend on the eager and the fused tower if those rungs are
    requested.

    The rung that compiles for every size is last, so that its time is not taken from the others.
    """
    with_backends = [rung for rung in ("eager", "fusion") if rung in rungs]
    return [
        *(Configuration(rung) for rung in rungs if rung != SLOW),
        *(Configuration(rung, backend) for rung in with_backends for backend in backends),  # type: ignore[arg-type]
        *(Configuration(rung) for rung in rungs if rung == SLOW),
    ]


def encode(
    model: Path, configuration: Configuration, pictures: Sequence[Image.Image]
) -> tuple[list[Encoded], dict[str, Any]]:
    """Encodes all pictures, sixteen at a time; returns the embeddings, and facts for the record.

    Raises:
        ValueError, BackendUnavailableError, RungUnavailableError: this configuration is unavailable.
    """
    switches = dict(switches_of(configuration.rung))
    if switches["cudagraph_mm_encoder"]:
        switches["encoder_cudagraph_token_budgets"] = BUDGETS
    config = EncoderConfig(attention_backend=configuration.attention, warm_image_sizes=(), **switches)  # type: ignore[arg-type]
    began = time.perf_counter()
    encoder = Encoder.from_checkpoint(model, config)
    start_s = time.perf_counter() - began
    began = time.perf_counter()
    made: list[Encoded] = []
    for first in range(0, len(pictures), IMAGES_AT_ONCE):
        found = encoder.encode(pictures[first : first + IMAGES_AT_ONCE])
        made += [Encoded(one.tokens.to("cpu", copy=True), one.grid_thw) for one in found]
    forward = encoder.runner.forward
    facts = {
        "forward": forward.name,
        "attention": forward.attention,
        "start_s": start_s,
        "encode_s": time.perf_counter() - began,
        "counts": asdict(encoder.counts),
        "fp8": None if forward.agreement is None else asdict(forward.agreement),
    }
    del encoder, forward
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return made, facts


def distance(made: Sequence[Encoded], reference: Sequence[Encoded]) -> float:
    """Returns the largest ‖ours - reference‖ / ‖reference‖ of a picture."""
    return max(
        float((one.tokens.float() - other.tokens.float()).norm() / other.tokens.float().norm())
        for one, other in zip(made, reference, strict=True)
    )
