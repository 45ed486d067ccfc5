"""Embeddings of a share of a folder's images, written by a process that does not own the manifest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from encoder.offline.store import PREFIX, SUFFIX, Entry, save


class EmbeddingPart:
    """Writes the embedding files of one share; another process adds `entries` to the manifest.

    A share that is written again overwrites its files. A context manager, which flushes unless the block raises.
    """

    def __init__(self, folder: Path, number: int, *, bytes_per_file: int) -> None:
        self.entries: list[Entry] = []
        """Manifest entries of the written embeddings."""
        self._folder, self._number, self._bytes_per_file = folder, number, bytes_per_file
        self._tensors: dict[str, torch.Tensor] = {}
        self._files: dict[str, str] = {}
        self._pending: list[Entry] = []
        self._written = 0

    def __enter__(self) -> EmbeddingPart:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._flush()

    def find_entry(self, digest: str) -> Entry | None:
        """Returns None: only the process that owns the manifest looks up written embeddings."""
        return None

    def holds(self, digest: str) -> bool:
        return digest in self._files

    def add(self, entry: Entry, tokens: torch.Tensor | None) -> None:
        """Adds an entry as `EmbeddingFiles.add` does."""
        if tokens is not None:
            self._tensors[entry.digest] = tokens.detach().to("cpu", copy=True).contiguous()
            self._files[entry.digest] = f"{PREFIX}{self._number:05d}-{self._written}{SUFFIX}"
        self._pending.append(replace(entry, file=self._files[entry.digest]))
        if sum(tensor.nbytes for tensor in self._tensors.values()) >= self._bytes_per_file:
            self._flush()

    def _flush(self) -> None:
        if self._tensors:
            save(self._folder / f"{PREFIX}{self._number:05d}-{self._written}{SUFFIX}", self._tensors)
            self._written += 1
        self.entries += self._pending
        self._tensors, self._pending = {}, []
