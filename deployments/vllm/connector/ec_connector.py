"""vLLM `ECConnector`, as a consumer, for embeddings in encoders' shared memory.

vLLM imports this module by name in the engine's processes and creates one connector in the scheduler process and one in
every worker. vLLM 0.26 to 0.33 call the same six methods. The engine loads the embeddings of all items: requests
contain headers only, and the engine's own tower has no weights.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole

from deployments.vllm.connector.item_chunks import ItemChunk, item_chunks, parse_digest
from deployments.vllm.connector.lease_table import EngineLease
from deployments.vllm.connector.link import ADDRESS_KEY, MIN_TOKENS_KEY, Loaded
from deployments.vllm.connector.scheduler_link import SchedulerLink
from deployments.vllm.connector.worker_link import WorkerLink
from deployments.vllm.connector.worker_memory import WorkerMemory
from deployments.vllm.towerless import build_towers_on_meta

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

IDLE_STEP_S = 0.0005
"""Pause of a step that schedules nothing: vLLM's scheduler polls while all of its requests wait for embeddings."""


@dataclass(frozen=True)
class Load:
    """Load of an embedding."""

    identifier: str
    """vLLM's identifier of the item."""
    lease: EngineLease
    first_row: int
    num_item_rows: int | None
    """As in ItemChunk."""
    is_needed: bool = True
    """False if vLLM has evicted the item since: the load is only reported."""


@dataclass
class Loads(ECConnectorMetadata):  # type: ignore[misc]  # untyped: vLLM
    """Loads of the workers before a step."""

    loads: list[Load] = field(default_factory=list)


class SharedMemoryConnector(ECConnectorBase):  # type: ignore[misc]
    """Loads embeddings by leases that the replica granted, and nothing else."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        get_config = vllm_config.ec_transfer_config.get_from_extra_config
        address = get_config(ADDRESS_KEY, None)
        # Layers with a recurrent state need prefill chunks that end where its blocks do.
        self._min_tokens = None if vllm_config.model_config.is_hybrid else get_config(MIN_TOKENS_KEY, None)
        self._loads_further_chunks = get_config(MIN_TOKENS_KEY, None) is not None  # not with vLLM's own scheduler
        self._loads: list[Load] = []
        """Planned loads that were not yet sent to the workers."""
        if role is ECConnectorRole.SCHEDULER:
            self._scheduler = SchedulerLink(address)
            self._chunks: dict[str, dict[str, tuple[ItemChunk, ...]]] = {}
            """Chunks of items that have several, by request and by identifier."""
            self._planned: dict[str, set[str]] = {}
            """Digests of the embeddings that workers have of an item, or will load for the next step, by identifier.
            vLLM's cache has these items."""
            self._allocated: set[str] = set()
            """Identifiers of the items for which vLLM has allocated space in this step."""
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

        Those are the tokens before the first missing item, or before the first missing chunk of one. 0 if they are
        fewer than the configured minimum, if that embedding is the first one needed, or without early prefill, because
        vLLM's own scheduler cannot stop there. At most half of `max_num_seqs` requests are prefilled partially, so that
        stuck encoders do not block complete requests.

        With early prefill, chunks whose rows all belong to computed tokens are not demanded: `load_further_chunks`
        loads them for a request that shares the item and needs them. Without it nothing loads a chunk later: all are.
        """
        name = request.request_id
        needed = [
            (feature.mm_position.offset + chunk.start, chunk.digest)
            for feature in request.mm_features
            if feature.mm_position.offset + feature.mm_position.length > num_computed_tokens
            for chunk in self._chunks_of(name, feature)
            if not self._loads_further_chunks or feature.mm_position.offset + chunk.end > num_computed_tokens
        ]
        if not needed:
            self._partial_prefills.discard(name)
            return None
        num_loadable = self._scheduler.reserve(name, [digest for _, digest in needed])
        if num_loadable == len(needed):
            self._partial_prefills.discard(name)
            return None
        limit: int = needed[num_loadable][0] - num_computed_tokens
        if self._min_tokens is None or limit < self._min_tokens or not num_loadable:
            return 0
        if name not in self._partial_prefills and len(self._partial_prefills) >= self._max_partial_prefills:
            return 0
        self._partial_prefills.add(name)
        return limit

    def has_cache_item(self, identifier: str) -> bool:
        """Whether vLLM, which calls this while it plans a step, can plan a load of the embedding, or of a part."""
        chunks = next((items[identifier] for items in self._chunks.values() if identifier in items), None)
        digests = [parse_digest(identifier)] if chunks is None else [chunk.digest for chunk in chunks]
        pinned = [self._scheduler.table.pin(digest) for digest in digests]
        return any(pinned)

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        feature = request.mm_features[index]
        if feature.identifier not in self._allocated:  # vLLM's cache has no row of it
            self._allocated.add(feature.identifier)
            self._planned[feature.identifier] = set()
            self._plan_loads(request.request_id, feature)

    def load_further_chunks(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> None:
        """Plans loads of the chunks that have come, of items that the request holds in vLLM's cache. Called when vLLM
        has scheduled the items of these tokens."""
        for feature in request.mm_features:
            offset, end = feature.mm_position.offset, feature.mm_position.offset + feature.mm_position.length
            in_step = offset < num_computed_tokens + num_new_tokens and end > num_computed_tokens
            if in_step and feature.identifier in self._planned:
                self._plan_loads(request.request_id, feature)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ECConnectorMetadata:
        self._scheduler.end_step()
        freed = set(scheduler_output.free_encoder_mm_hashes) - self._allocated
        for identifier in freed:
            self._planned.pop(identifier, None)
        self._allocated.clear()
        loads = [replace(load, is_needed=False) if load.identifier in freed else load for load in self._loads]
        if not scheduler_output.total_num_scheduled_tokens:
            # Workers load nothing in such a step. vLLM may have preempted a request after planning loads for it.
            self._loads = loads
            time.sleep(IDLE_STEP_S)
            return Loads()
        self._loads = []
        return Loads(loads)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self._partial_prefills.discard(request.request_id)
        self._chunks.pop(request.request_id, None)
        self._scheduler.finish_request(request.request_id)
        return False, None

    def _chunks_of(self, request: str, feature: MultiModalFeatureSpec) -> tuple[ItemChunk, ...]:
        known = self._chunks.get(request, {}).get(feature.identifier)
        if known is None:
            known = item_chunks(feature)
            if known[0].num_item_rows is not None:
                self._chunks.setdefault(request, {})[feature.identifier] = known
        return known

    def _plan_loads(self, request: str, feature: MultiModalFeatureSpec) -> None:
        """Plans loads of the item's embeddings that have come and that workers do not have."""
        identifier, table = feature.identifier, self._scheduler.table
        planned = self._planned[identifier]
        for chunk in self._chunks_of(request, feature):
            if chunk.digest not in planned and (lease := table.plan_load(chunk.digest)) is not None:
                planned.add(chunk.digest)
                self._loads.append(Load(identifier, lease, chunk.first_row, chunk.num_item_rows))

    # Called in a worker process.

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: object) -> None:
        """Loads the step's embeddings. An error ends the engine: no step may run without an embedding that it needs."""
        loads = self._get_connector_metadata()
        assert isinstance(loads, Loads)
        for load in loads.loads:
            identifier, lease, num_bytes = load.identifier, load.lease, 0
            if load.is_needed and (load.num_item_rows is not None or identifier not in encoder_cache):
                rows = self._memory.load(lease, self._dtype)
                num_bytes = rows.nbytes
                if load.num_item_rows is None:
                    encoder_cache[identifier] = rows
                else:
                    if identifier not in encoder_cache:
                        encoder_cache[identifier] = rows.new_empty(load.num_item_rows, rows.shape[1])
                    encoder_cache[identifier][load.first_row : load.first_row + len(rows)] = rows
            self._worker.report_loaded(Loaded(lease.name, num_bytes, time.time() - lease.ready_at_s))

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: object) -> None:
        """Raises RuntimeError, which ends the engine: vLLM calls it for what its own tower has computed."""
        raise RuntimeError(f"the engine ran its own tower for item {mm_hash}")


def _device() -> torch.device:
    from vllm.platforms import current_platform

    if current_platform.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
