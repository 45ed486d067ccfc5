"""The simplest ECConnector, which vLLM imports in the engine's process: embeddings are files `<digest>.pt`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole

from deployments.vllm.towerless import build_towers_on_meta

FOLDER_KEY = "folder"


class Loads(ECConnectorMetadata):  # type: ignore[misc]  # untyped: vLLM
    def __init__(self) -> None:
        self.digests: set[str] = set()


class FolderConnector(ECConnectorBase):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        self._folder = Path(vllm_config.ec_transfer_config.get_from_extra_config(FOLDER_KEY, None))
        self._loads = Loads()
        if role is ECConnectorRole.WORKER:
            build_towers_on_meta()

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """False defers the request."""
        return all(self.has_cache_item(feature.identifier) for feature in request.mm_features)

    def has_cache_item(self, identifier: str) -> bool:
        return self._file(identifier).exists()

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        self._loads.digests.add(request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        loads, self._loads = self._loads, Loads()
        return loads

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: object) -> None:
        for digest in self._get_connector_metadata().digests - encoder_cache.keys():
            encoder_cache[digest] = torch.load(self._file(digest))

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: object) -> None:
        """vLLM calls this for embeddings that the tower has computed."""
        raise RuntimeError(f"the tower ran for {mm_hash}")

    def _file(self, digest: str) -> Path:
        return self._folder / f"{digest}.pt"


class TowerReport:
    """Extension of vLLM's worker."""

    def tower_devices(self) -> list[str]:
        """Devices of the tower's weights."""
        tower: torch.nn.Module = self.model_runner.get_model().visual  # type: ignore[attr-defined]
        return sorted({weight.device.type for weight in tower.parameters()})
