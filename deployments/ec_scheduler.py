"""vLLM's scheduler, reading a prompt up to the first image whose embedding is still on its way.

vLLM itself takes a request up once all of its embeddings are there. `arriving_scheduler` goes to `--scheduler-cls`: it
is the scheduler that vLLM would have taken, with one method before which the `SharedMemoryConnector` is asked how far
the prompt may be read. The engine's process imports this module by its name. It must not know how embeddings come.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deployments.ec_connector import SharedMemoryConnector, is_placeholder

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


def arriving_scheduler(vllm_config: VllmConfig, *args: object, **kwargs: object) -> object:
    """The scheduler of vLLM's own choice, reading prompts as they come."""
    own = copy.copy(vllm_config.scheduler_config)
    own.scheduler_cls = None
    return arriving(own.get_scheduler_cls())(vllm_config, *args, **kwargs)


def arriving(base: type[Any]) -> type[Any]:
    """`base`, one of vLLM's schedulers (0.26 to 0.33), so that no step reads beyond what has arrived.

    Its method says which of a request's images a step needs, and how many tokens the step may read then. The first
    value that it returns names the images that the tower is to run for.
    """

    class Arriving(base):  # type: ignore[misc]
        def _try_schedule_encoder_inputs(
            self, request: Request, num_computed_tokens: int, num_new_tokens: int, *args: object, **kwargs: object
        ) -> Sequence[Any]:
            connector = self.ec_connector
            if isinstance(connector, SharedMemoryConnector):
                within_reach = connector.within_reach(request, num_computed_tokens)
                num_new_tokens = num_new_tokens if within_reach is None else min(num_new_tokens, within_reach)
            found: Sequence[Any] = super()._try_schedule_encoder_inputs(
                request, num_computed_tokens, num_new_tokens, *args, **kwargs
            )
            if any(is_placeholder(request.mm_features[index]) for index in found[0]):
                raise RuntimeError("an image was to be encoded in the engine, which has no pixels of it")
            return found

    return Arriving
