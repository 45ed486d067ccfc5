"""vLLM's ECConnector for `prove.py`: loads embeddings from files named by digest, in an engine without towers.

vLLM imports it in the engine's process, by `ec_connector_module_path`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole

from deployments.vllm.towerless import build_towers_on_meta

FIELDS = "fields.json"
"""File with the sizes in bytes of each field that reached the engine."""


@dataclass
class Loads(ECConnectorMetadata):  # type: ignore[misc]  # untyped: vLLM
    digests: set[str] = field(default_factory=set)


class EngineConnector(ECConnectorBase):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        self._folder = Path(vllm_config.ec_transfer_config.get_from_extra_config("folder", None))
        self._dtype, self._device = vllm_config.model_config.dtype, vllm_config.device_config.device
        self._loads = Loads()
        if role is ECConnectorRole.WORKER:  # made before the model is loaded
            build_towers_on_meta()

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        sizes = {
            f"{feature.modality}.{name}": element.data.nbytes if isinstance(element.data, torch.Tensor) else 0
            for feature in request.mm_features
            if feature.data is not None
            for name, element in feature.data.items()
        }
        (self._folder / FIELDS).write_text(json.dumps(sizes))
        return all(self.has_cache_item(feature.identifier) for feature in request.mm_features)

    def has_cache_item(self, identifier: str) -> bool:
        return self._file(identifier).exists()

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        self._loads.digests.add(request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        loads, self._loads = self._loads, Loads()
        return loads

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: object) -> None:
        loads = self._get_connector_metadata()
        assert isinstance(loads, Loads)
        for digest in loads.digests - encoder_cache.keys():
            encoder_cache[digest] = torch.load(self._file(digest), weights_only=True).to(self._device, self._dtype)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: object) -> None:
        raise RuntimeError(f"the tower ran for {mm_hash}")

    def _file(self, digest: str) -> Path:
        return self._folder / f"{digest}.pt"


class TowerBytes:
    """Methods that are added to vLLM's worker."""

    model_runner: Any

    def tower_bytes(self) -> int:
        """Returns the bytes of weights in the modules that vLLM marks as towers."""
        model = self.model_runner.get_model()
        towers = (model.get_submodule(name) for name in model._tower_model_names)
        return sum(weight.nbytes for tower in towers for weight in tower.parameters() if weight.device.type != "meta")
