"""Towers on the meta device, on a model class with the marks of vLLM's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.models.interfaces import SupportsMultiModal

from deployments.vllm.towerless import build_towers_on_meta


class Tower(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 3)
        setattr(self.weight, "weight_loader", len)  # noqa: B010  # as vLLM attaches it


class LargeTower(Tower):
    """Without an `__init__` of its own."""


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Calls of vLLM's own mark, in place of which something simple stands."""
    calls: list[tuple[Any, ...]] = []

    @contextmanager
    def mark(self: object, vllm_config: object, modalities: object, *, targets: object = None) -> Iterator[None]:
        calls.append((self, vllm_config, modalities, targets))
        yield

    mark.__module__ = "vllm"
    monkeypatch.setattr(SupportsMultiModal, "_mark_tower_model", mark)
    build_towers_on_meta()
    return calls


class Model(nn.Module):
    """Builds tower and language model in one context, as Idefics3 does, or the tower alone."""

    def __init__(self, targets: Any) -> None:
        super().__init__()
        with SupportsMultiModal._mark_tower_model(self, "config", "image", targets=targets):
            self.tower, self.other = LargeTower(), nn.Linear(2, 2)
            self.buffers_of_levels = [torch.zeros(3, 2, dtype=torch.bfloat16) for _ in range(2)]
        self.language_model = nn.Linear(2, 2)


def devices(model: Model) -> dict[str, str]:
    return {name: next(child.parameters()).device.type for name, child in model.named_children()}


def test_the_marked_part_is_on_meta(marked: list[tuple[Any, ...]]) -> None:
    model = Model(None)
    assert devices(model) == {"tower": "meta", "other": "meta", "language_model": "cpu"}
    assert marked == [(model, "config", "image", None)]


def test_buffers_that_the_language_model_reads_are_where_it_is(marked: list[tuple[Any, ...]]) -> None:
    """vLLM 0.26 makes those of Qwen3-VL's deepstack together with the tower: its engine ended on a GPU."""
    for buffer in Model(None).buffers_of_levels:
        assert (buffer.device.type, buffer.dtype, buffer.abs().sum().item()) == ("cpu", torch.bfloat16, 0)


@pytest.mark.parametrize("targets", [None, LargeTower])
def test_a_tower_that_is_moved_stays_on_meta_with_its_loaders(marked: list[tuple[Any, ...]], targets: Any) -> None:
    """Kimi K2.5's class moves it to the engine's device, which ended the engine: "Cannot copy out of meta tensor"."""

    class MovedTower(LargeTower):
        def __init__(self) -> None:
            super().__init__()
            self.to(device="cpu", dtype=torch.float32)

    with SupportsMultiModal._mark_tower_model(nn.Module(), "config", "image", targets=targets and MovedTower):
        tower = MovedTower()
        if targets is None:
            tower = tower.to(device="cpu", dtype=torch.float32)
    assert tower.weight.device.type == "meta"
    assert getattr(tower.weight, "weight_loader") is len  # noqa: B009
    assert torch.zeros(1).to("cpu").device.type == "cpu"


@pytest.mark.parametrize("targets", [Tower, LargeTower, (LargeTower, Tower), (nn.Conv2d, Tower)])
def test_with_targets_only_they_are_on_meta(marked: list[tuple[Any, ...]], targets: Any) -> None:
    """A blanket device context would put the language model on meta too."""
    model = Model(targets)
    assert devices(model) == {"tower": "meta", "other": "cpu", "language_model": "cpu"}
    assert marked == [(model, "config", "image", targets)]
    assert Tower().weight.device.type == LargeTower().weight.device.type == "cpu", "after the context"
    assert nn.Conv2d(1, 1, 1).weight.device.type == "cpu"


def test_classes_are_restored_after_an_error(marked: list[tuple[Any, ...]]) -> None:
    init = Tower.__init__
    with pytest.raises(KeyError), SupportsMultiModal._mark_tower_model(None, "config", "image", targets=Tower):
        raise KeyError
    assert Tower.__init__ is init


def test_a_tower_keeps_its_loaders_and_cannot_run(marked: list[tuple[Any, ...]]) -> None:
    """vLLM loads weights by what it attached to the parameters; into meta that does nothing."""
    tower = Model(Tower).tower
    assert vars(tower.weight)["weight_loader"] is len
    tower.weight.data.copy_(torch.ones(3, 2))
    with pytest.raises((RuntimeError, NotImplementedError)):
        tower(torch.ones(1, 2)).tolist()


def test_a_second_call_changes_nothing(marked: list[tuple[Any, ...]]) -> None:
    before = SupportsMultiModal._mark_tower_model
    build_towers_on_meta()
    assert SupportsMultiModal._mark_tower_model is before
    Model(None)
    assert len(marked) == 1
