"""Towers without weights in vLLM's workers: they exist on torch's meta device, and cannot run.

vLLM's own setting for that, `limit_mm_per_prompt` of 0, also refuses all media and disables deepstack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from vllm.model_executor.models.interfaces import SupportsMultiModal

Init = Callable[..., None]


def build_towers_on_meta() -> None:
    """Makes vLLM build towers on the meta device from now on. Call it in a worker process before the model is loaded;
    further calls have no effect. Loading a weight into a tower then has no effect, running the tower raises."""
    mark = SupportsMultiModal._mark_tower_model  # noqa: SLF001
    if mark.__module__ == __name__:
        return

    @contextmanager
    def mark_and_build_on_meta(
        self: object,
        vllm_config: object,
        modalities: object,
        *,
        targets: type | tuple[type, ...] | None = None,
    ) -> Iterator[None]:
        """`targets`: the tower's classes, of models that build their tower and language model in one context."""
        with mark(self, vllm_config, modalities, targets=targets):
            if targets is None:
                device = torch.get_default_device()
                with torch.device("meta"), _StayOnMeta():
                    yield
                _move_buffers_back(self, device)
            else:
                with _built_on_meta(targets if isinstance(targets, tuple) else (targets,)):
                    yield

    SupportsMultiModal._mark_tower_model = mark_and_build_on_meta  # noqa: SLF001


def _move_buffers_back(model: object, device: torch.device) -> None:
    """Replaces lists of tensors that the model itself holds, by zeros: the language model reads them. In vLLM 0.26,
    Qwen3-VL's class makes its deepstack buffers together with the tower."""
    for name, value in list(vars(model).items()):
        if isinstance(value, list) and value and all(isinstance(one, torch.Tensor) and one.is_meta for one in value):
            setattr(model, name, [one.new_zeros(one.shape, device=device) for one in value])


class _StayOnMeta(TorchFunctionMode):
    """Some model classes, such as Kimi K2.5's, move their tower to the engine's device themselves: there is nothing to
    move."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401 - what torch's functions return
        if func is torch.Tensor.to and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def _built_on_meta(classes: tuple[type, ...]) -> Iterator[None]:
    """Builds instances of these classes alone on the meta device. To move them there afterwards would replace their
    parameters, and lose the weight loaders that vLLM attaches."""
    with ExitStack() as patches:
        for each in classes:
            init: Init = each.__init__  # type: ignore[misc]
            patches.enter_context(mock.patch.object(each, "__init__", _on_meta(init)))
        yield


def _on_meta(init: Init) -> Init:
    def init_on_meta(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - any class's arguments
        with torch.device("meta"), _StayOnMeta():
            init(*args, **kwargs)

    return init_on_meta
