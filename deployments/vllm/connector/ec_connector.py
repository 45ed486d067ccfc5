"""vLLM `ECConnector`, as a consumer, for embeddings in encoders' shared memory.

vLLM imports this module by name in the engine's processes and creates one connector in the scheduler process and one in
every worker. vLLM 0.26 to 0.33 call the same six methods. The engine loads the embeddings of all items: requests
contain headers only, and the engine's own tower has no weights.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole

from deployments.vllm.connector.lease_table import EngineLease
from deployments.vllm.connector.link import ADDRESS_KEY, MIN_TOKENS_KEY, Loaded
from deployments.vllm.connector.scheduler_link import SchedulerLink
from deployments.vllm.connector.worker_link import WorkerLink
from deployments.vllm.connector.worker_memory import WorkerMemory
from deployments.vllm.towerless import build_towers_on_meta

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

DIGEST_CHARACTERS = 64
IDLE_STEP_S = 0.0005
"""Pause of a step that schedules nothing: vLLM's scheduler polls while all of its requests wait for embeddings."""


@dataclass
class Loads(ECConnectorMetadata):  # type: ignore[misc]  # untyped: vLLM
    """Loads of the workers before a step."""

    leases: dict[str, EngineLease] = field(default_factory=dict)
    """Leases by vLLM's identifier of the item."""


class SharedMemoryConnector(ECConnectorBase):  # type: ignore[misc]
    """Loads embeddings by leases that the replica granted, and nothing else."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        get_config = vllm_config.ec_transfer_config.get_from_extra_config
        address = get_config(ADDRESS_KEY, None)
        # Layers with a recurrent state need prefill chunks that end where its blocks do.
        self._min_tokens = None if vllm_config.model_config.is_hybrid else get_config(MIN_TOKENS_KEY, None)
        self._loads = Loads()
        if role is ECConnectorRole.SCHEDULER:
            self._scheduler = SchedulerLink(address)
            self._partial_prefills: set[str] = set()
            self._max_partial_prefills = max(1, vllm_config.scheduler_config.max_num_seqs // 2)
        else:
            build_towers_on_meta()  # vLLM loads the model after it has created its connectors
            self._dtype = vllm_config.model_config.dtype
            self._memory = WorkerMemory(_device())
            self._worker = WorkerLink(address, self._memory)

    def shutdown(self) -> None:
        (self._scheduler if self.role is ECConnectorRole.SCHEDULER else self._worker).close()

    # Called in the scheduler process.

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        return self.prefill_limit(request, num_computed_tokens) != 0

    def prefill_limit(self, request: Request, num_computed_tokens: int) -> int | None:
        """Returns how many tokens of the prompt can be computed next; None if no embedding is missing.

        These are the tokens before the first missing item. 0 if they are fewer than the configured minimum, if that
        item is the first one needed, or without early prefill, because vLLM's own scheduler cannot stop there. At most
        half of `max_num_seqs` requests are prefilled partially, so that stuck encoders do not block complete requests.
        """
        needed = [
            feature
            for feature in request.mm_features
            if feature.mm_position.offset + feature.mm_position.length > num_computed_tokens
        ]
        if not needed:
            return None
        name = request.request_id
        num_loadable = self._scheduler.reserve(name, [parse_digest(feature.identifier) for feature in needed])
        if num_loadable == len(needed):
            self._partial_prefills.discard(name)
            return None
        limit: int = needed[num_loadable].mm_position.offset - num_computed_tokens
        if self._min_tokens is None or limit < self._min_tokens or not num_loadable:
            return 0
        if name not in self._partial_prefills and len(self._partial_prefills) >= self._max_partial_prefills:
            return 0
        self._partial_prefills.add(name)
        return limit

    def has_cache_item(self, identifier: str) -> bool:
        """Whether vLLM, which calls this while it plans a step, can plan a load of the embedding."""
        return self._scheduler.table.pin(parse_digest(identifier))

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        identifier, table = request.mm_features[index].identifier, self._scheduler.table
        if identifier not in self._loads.leases and table.has(parse_digest(identifier)):
            self._loads.leases[identifier] = table.plan_load(parse_digest(identifier))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ECConnectorMetadata:
        if not scheduler_output.total_num_scheduled_tokens:
            time.sleep(IDLE_STEP_S)
        self._scheduler.end_step()
        loads, self._loads = self._loads, Loads()
        return loads

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self._partial_prefills.discard(request.request_id)
        self._scheduler.finish_request(request.request_id)
        return False, None

    # Called in a worker process.

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: object) -> None:
        """Loads the step's embeddings. An error ends the engine: no step may run without an embedding that it needs."""
        loads = self._get_connector_metadata()
        assert isinstance(loads, Loads)
        for identifier, lease in loads.leases.items():
            num_bytes = 0
            if identifier not in encoder_cache:
                encoder_cache[identifier] = self._memory.load(lease, self._dtype)
                num_bytes = encoder_cache[identifier].nbytes
            self._worker.report_loaded(Loaded(lease.name, num_bytes, time.time() - lease.ready_at_s))

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: object) -> None:
        """Raises RuntimeError, which ends the engine: vLLM calls it for what its own tower has computed."""
        raise RuntimeError(f"the engine ran its own tower for item {mm_hash}")


def parse_digest(identifier: str) -> str:
    """Returns the digest at the end of `identifier`, before which vLLM may put a LoRA adapter's name."""
    return identifier[-DIGEST_CHARACTERS:]


def _device() -> torch.device:
    from vllm.platforms import current_platform

    if current_platform.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
