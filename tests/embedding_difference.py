"""How much embeddings differ from expected ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Difference:
    """Difference of embeddings from expected ones; cosines are taken per part, main or deepstack level."""

    lowest_token_cosine: float
    lowest_image_cosine: float
    largest_error: float
    """‖found - expected‖ / ‖expected‖ of an image."""


def compare_embeddings(
    found: Tensor, expected: Tensor, image_tokens: Sequence[int], out_hidden_size: int
) -> Difference:
    """Compares embeddings `[num_tokens, width]`; NaN agrees with nothing. Synchronises."""
    ours, theirs = (x.double().unflatten(1, (-1, out_hidden_size)) for x in (found, expected))
    pairs = list(zip(ours.split(list(image_tokens)), theirs.split(list(image_tokens)), strict=True))
    images = torch.stack([F.cosine_similarity(*(x.transpose(0, 1).flatten(1) for x in pair)) for pair in pairs])
    errors = torch.stack([(one - other).norm() / other.norm() for one, other in pairs])
    tokens = F.cosine_similarity(ours, theirs, dim=-1)
    return Difference(
        float(tokens.nan_to_num(-1.0).min()),
        float(images.nan_to_num(-1.0).min()),
        float(errors.nan_to_num(float("inf"), posinf=float("inf")).max()),
    )
