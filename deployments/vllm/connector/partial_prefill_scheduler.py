"""vLLM's scheduler with early prefill: a prompt is prefilled up to the first item whose embedding is not available.

vLLM itself schedules a request once all of its embeddings are available. `make_scheduler` is the value of
`--scheduler-cls`: it creates the scheduler that vLLM would have chosen, but one method first asks the
`SharedMemoryConnector` how far the prompt may be prefilled. The engine's process imports this module by name.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deployments.vllm.connector.ec_connector import SharedMemoryConnector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


def make_scheduler(vllm_config: VllmConfig, *args: object, **kwargs: object) -> object:
    """Creates the scheduler that vLLM would have chosen, with early prefill."""
    config = copy.copy(vllm_config.scheduler_config)
    config.scheduler_cls = None
    return with_partial_prefill(config.get_scheduler_cls())(vllm_config, *args, **kwargs)


def with_partial_prefill(base: type[Any]) -> type[Any]:
    """Returns a subclass of `base`, one of vLLM's schedulers (0.26 to 0.33), whose steps need no missing embedding.

    The overridden method decides which of a request's items a step needs, and how many tokens the step computes. Its
    first result lists the items for which the engine's own tower would run.
    """

    class PartialPrefillScheduler(base):  # type: ignore[misc]
        def _try_schedule_encoder_inputs(
            self, request: Request, num_computed_tokens: int, num_new_tokens: int, *args: object, **kwargs: object
        ) -> Sequence[Any]:
            connector = self.ec_connector
            if isinstance(connector, SharedMemoryConnector):
                limit = connector.prefill_limit(request, num_computed_tokens)
                num_new_tokens = num_new_tokens if limit is None else min(num_new_tokens, limit)
            found: Sequence[Any] = super()._try_schedule_encoder_inputs(
                request, num_computed_tokens, num_new_tokens, *args, **kwargs
            )
            if isinstance(connector, SharedMemoryConnector):
                if found[0]:
                    raise RuntimeError("the engine scheduled items for its own tower, which has no weights")
                connector.load_further_chunks(request, num_computed_tokens, found[1])
            return found

    return PartialPrefillScheduler
