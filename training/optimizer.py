"""Muon for the matrices, AdamW for the rest.

Muon (Jordan et al., 2024) replaces a matrix's momentum by the nearest orthogonal one, found by a few Newton-Schulz
steps; scaled by 0.2 times the square root of the longer side (Liu et al., 2025) it takes AdamW's learning rates.
Matrices of one shape are worked on together, since one by one they would be thousands of tiny launches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_STEPS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalised(matrices: Tensor) -> Tensor:
    """`[count, rows, columns]`: each with its singular values brought near 1."""
    x = matrices.to(torch.bfloat16)
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_STEPS):
        square = x @ x.transpose(1, 2)
        x = _A * x + (_B * square + _C * square @ square) @ x
    out: Tensor = (x.transpose(1, 2) if tall else x).to(matrices.dtype)
    return out


class Muon(torch.optim.Optimizer):
    """For parameters of two dimensions. `parts`: how many matrices are stacked in each, as in a joint qkv."""

    def __init__(self, parameters: Iterable[nn.Parameter], parts: dict[int, int], *, lr: float, decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay, "momentum": 0.95})
        self._parts = parts

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(momentum, group["momentum"])
                parts = self._parts.get(id(parameter), 1)
                for matrix, change in zip(parameter.chunk(parts), update.chunk(parts), strict=True):
                    by_shape[tuple(matrix.shape)].append((matrix, change))
            for shape, pairs in by_shape.items():
                changes = orthogonalised(torch.stack([change for _, change in pairs]))
                scale = 0.2 * max(shape) ** 0.5
                matrices = [matrix for matrix, _ in pairs]
                torch._foreach_mul_(matrices, 1 - group["lr"] * group["decay"])
                torch._foreach_add_(matrices, list(changes.unbind(0)), alpha=-group["lr"] * scale)


def optimizers_for(model: nn.Module, *, lr: float, decay: float) -> list[torch.optim.Optimizer]:
    """One for the matrices of the layers, one for embeddings, norms and biases."""
    matrices, rest, parts = [], [], {}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name and "lm_head" not in name:
            matrices.append(parameter)
            parts[id(parameter)] = 3 if name.endswith("qkv.weight") else 1
        else:
            rest.append(parameter)
    fused = rest[0].is_cuda
    adam = torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=fused)
    return [Muon(matrices, parts, lr=lr, decay=decay), adam]
