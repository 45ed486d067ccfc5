"""vLLM's way to embeddings that lie in an encoder's shared memory: its `ECConnector`, as a consumer.

vLLM imports this module by its name, in the processes of the engine, and makes one connector beside the scheduler and
one in every worker. 0.26 to 0.33 call the same six methods. An embedding that a request does not bring is one without
columns: `placeholder`. It must not know of Ray or of encoders.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole

from deployments.engine_link import ADDRESS_KEY, LEAST_TOKENS_KEY, Loaded, SchedulerEnd, WorkerEnd
from deployments.engine_memory import EngineMemory
from deployments.engine_table import Place

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

DIGEST_CHARACTERS = 64


@dataclass
class Loads(ECConnectorMetadata):  # type: ignore[misc]  # vLLM is not typed for us
    """What the workers are to load before a step."""

    places: dict[str, Place] = field(default_factory=dict)
    """By vLLM's identifier."""


class SharedMemoryConnector(ECConnectorBase):  # type: ignore[misc]
    """Loads what the replica has given leases for, and nothing else."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        given = vllm_config.ec_transfer_config.get_from_extra_config
        address, self._least_tokens = given(ADDRESS_KEY, None), given(LEAST_TOKENS_KEY, None)
        self._loads = Loads()
        if role is ECConnectorRole.SCHEDULER:
            self._scheduler = SchedulerEnd(address)
            self._in_parts: set[str] = set()
            self._most_in_parts = max(1, vllm_config.scheduler_config.max_num_seqs // 2)
        else:
            self._dtype = vllm_config.model_config.dtype
            self._memory = EngineMemory(_device())
            self._worker = WorkerEnd(address, self._memory)

    def shutdown(self) -> None:
        (self._scheduler if self.role is ECConnectorRole.SCHEDULER else self._worker).close()

    # Beside the scheduler.

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        return self.within_reach(request, num_computed_tokens) != 0

    def within_reach(self, request: Request, num_computed_tokens: int) -> int | None:
        """How many tokens of its prompt can be computed next; None where nothing is missing.

        Up to the first image that is not there, if those are as many as were asked for; else none, and so everywhere
        where only `arriving_scheduler` could stop there and is not in use. Half of the requests that run at once may be
        read in parts, so that encoders that are stuck hold up nobody whose images are there.
        """
        needed = [
            feature
            for feature in request.mm_features
            if feature.mm_position.offset + feature.mm_position.length > num_computed_tokens and is_placeholder(feature)
        ]
        if not needed:
            return None
        name = request.request_id
        num_there = self._scheduler.available(name, [digest_of(each.identifier) for each in needed])
        if num_there == len(needed):
            self._in_parts.discard(name)
            return None
        reach: int = needed[num_there].mm_position.offset - num_computed_tokens
        if self._least_tokens is None or reach < self._least_tokens or not num_there:
            return 0
        if name not in self._in_parts and len(self._in_parts) >= self._most_in_parts:
            return 0
        self._in_parts.add(name)
        return reach

    def has_cache_item(self, identifier: str) -> bool:
        return self._scheduler.table.has(digest_of(identifier))

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        identifier = request.mm_features[index].identifier
        if identifier not in self._loads.places and self.has_cache_item(identifier):
            self._loads.places[identifier] = self._scheduler.table.load(digest_of(identifier))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ECConnectorMetadata:
        loads, self._loads = self._loads, Loads()
        return loads

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self._in_parts.discard(request.request_id)
        self._scheduler.finished(request.request_id)
        return False, None

    # In a worker.

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: object) -> None:
        """An error here ends the engine: what the table has, a worker must find. Nothing is answered without it."""
        loads = self._get_connector_metadata()
        assert isinstance(loads, Loads)
        for identifier, place in loads.places.items():
            num_bytes = 0
            if identifier not in encoder_cache:
                encoder_cache[identifier] = self._memory.load(place, self._dtype)
                num_bytes = encoder_cache[identifier].nbytes
            self._worker.loaded(Loaded(place.lease, num_bytes, time.time() - place.ready_at_s))

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: object) -> None:
        """A consumer has nothing to save."""


def digest_of(identifier: str) -> str:
    """vLLM may put a LoRA adapter's name before it."""
    return identifier[-DIGEST_CHARACTERS:]


def is_placeholder(feature: Any) -> bool:  # noqa: ANN401 - vLLM's MultiModalFeatureSpec
    """Whether the request came without this embedding."""
    element = None if feature.data is None else feature.data.get("image_embeds")
    return element is not None and element.data.shape[-1] == 0


def _device() -> torch.device:
    from vllm.platforms import current_platform

    if current_platform.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
