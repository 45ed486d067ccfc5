"""Embeddings of a share of a folder's pictures, for a process that does not own the folder of embeddings.

It must not know who shares out, nor how embeddings are made.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from encoder.embedding_files import PREFIX, SUFFIX, Entry, save


class EmbeddingPart:
    """Files of a share of the pictures, written by a process that leaves the manifest to another one.

    Written again, a share takes the places of the files of the first time. A context manager.
    """

    def __init__(self, folder: Path, number: int, *, bytes_per_file: int) -> None:
        self.entries: list[Entry] = []
        """Of what is written."""
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

    def known(self, digest: str) -> Entry | None:
        """None: what is written already is the other process's to know."""
        return None

    def holds(self, digest: str) -> bool:
        return digest in self._files

    def add(self, entry: Entry, tokens: torch.Tensor | None) -> None:
        """As `EmbeddingFiles.add`."""
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
