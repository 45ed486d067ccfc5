"""Folder of image embeddings: safetensors files and a manifest, consistent after a kill at any time.

An embedding file is written under a temporary name and renamed, then its lines are appended to the manifest. Files that
the manifest does not name are ignored.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

MANIFEST = "manifest.jsonl"
ABOUT = "encoder.json"
PREFIX, SUFFIX = "embeddings-", ".safetensors"
_TEMPORARY_SUFFIX = ".part"

Stamp: TypeAlias = tuple[str, int, int]


class EmbeddingFilesError(Exception):
    """A folder of embeddings cannot be used; the text states the reason and what to do."""


@dataclass(frozen=True)
class Entry:
    """A line of the manifest: the embedding of one image. The last line of a path is valid."""

    path: str
    """Path relative to the folder of images, with `/`."""
    digest: str
    """64 hex characters over all that determines the embedding; the tensor's name in `file`."""
    grid_thw: tuple[int, int, int]
    """Patches in time, height and width."""
    num_tokens: int
    file: str
    """File relative to the folder of embeddings; its tensor `digest` is `[num_tokens, width]`."""
    num_bytes: int
    """Size of the image file. An image with equal `num_bytes` and `mtime_ns` is taken as unchanged."""
    mtime_ns: int
    """Modification time of the image file."""

    @property
    def stamp(self) -> Stamp:
        return self.path, self.num_bytes, self.mtime_ns


class EmbeddingFiles:
    """A folder of embeddings opened for appending by one process. A context manager, which flushes at its end.

    with EmbeddingFiles(folder, about, images_per_file=1000, bytes_per_file=2**30) as files:
        files.add(entry, tokens)
    """

    def __init__(self, folder: Path, about: dict[str, object], *, images_per_file: int, bytes_per_file: int) -> None:
        """Creates the folder or opens an existing one.

        Args:
            about: description of the encoder in JSON values, stored in the folder, which is refused if it has another
                one.
            images_per_file, bytes_per_file: a file is written when either is reached.

        Raises:
            EmbeddingFilesError: the folder belongs to another encoder, another process has it open, or it holds other
                files.
        """
        self.folder = folder
        self._images_per_file, self._bytes_per_file = images_per_file, bytes_per_file
        self._tensors: dict[str, torch.Tensor] = {}
        self._pending: list[Entry] = []
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as undone:
            self._lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            undone.callback(os.close, self._lock)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise EmbeddingFilesError(f"another process is writing to {folder}: wait for it to end") from None
            self._claim(about)
            self.entries = self._read()
            undone.pop_all()
        self._by_digest = {entry.digest: entry for entry in self.entries}
        self._next = 1 + max((_number(entry.file) for entry in self.entries), default=-1)

    def __enter__(self) -> EmbeddingFiles:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.flush()
        finally:
            os.close(self._lock)

    def find_entry(self, digest: str) -> Entry | None:
        """Returns the entry of a written embedding, None if there is none."""
        return self._by_digest.get(digest)

    def holds(self, digest: str) -> bool:
        """Returns whether the embedding is written or pending."""
        return digest in self._by_digest or digest in self._tensors

    def add(self, entry: Entry, tokens: torch.Tensor | None) -> None:
        """Adds an entry, whose `file` is set at the flush, and flushes if a limit is reached.

        `tokens`: `[num_tokens, width]` on any device; None if the embedding is written or pending. Raises ValueError if
        it is neither, and as `flush` does.
        """
        if tokens is not None:
            self._tensors[entry.digest] = tokens.detach().to("cpu", copy=True).contiguous()
        elif not self.holds(entry.digest):
            raise ValueError(f"{entry.path}: no tokens for a new embedding")
        self._pending.append(entry)
        num_bytes = sum(tensor.nbytes for tensor in self._tensors.values())
        if len(self._pending) >= self._images_per_file or num_bytes >= self._bytes_per_file:
            self.flush()

    def flush(self) -> None:
        """Writes pending tensors, then their lines in the manifest. Raises EmbeddingFilesError, OSError."""
        name = f"{PREFIX}{self._next:05d}{SUFFIX}"
        if not self._pending:
            return
        if self._tensors:
            save(self.folder / name, self._tensors)
            self._next += 1
        written = []
        for entry in self._pending:
            file = name if entry.digest in self._tensors else self._by_digest[entry.digest].file
            written.append(replace(entry, file=file))
        with (self.folder / MANIFEST).open("ab") as manifest:
            manifest.write(_lines(written))
            manifest.flush()
            os.fsync(manifest.fileno())
        self.entries += written
        self._by_digest |= {entry.digest: entry for entry in written}
        self._tensors, self._pending = {}, []

    def _claim(self, about: dict[str, object]) -> None:
        """Stores `about` in a new folder. Raises EmbeddingFilesError if the folder belongs to another encoder."""
        file = self.folder / ABOUT
        if file.exists():
            if json.loads(file.read_bytes()) != json.loads(json.dumps(about)):
                raise EmbeddingFilesError(
                    f"{self.folder} holds embeddings of other weights, dtype or bounds (see its {ABOUT}): "
                    "name another folder"
                )
            return
        if any(there.suffix != _TEMPORARY_SUFFIX for there in self.folder.iterdir()):
            raise EmbeddingFilesError(f"{self.folder} has other files and no {ABOUT}: name another folder")
        with _atomic_write(file) as temporary:
            temporary.write_text(json.dumps(about, indent=1) + "\n")

    def _read(self) -> list[Entry]:
        """Reads the manifest and removes incomplete lines and lines whose file is missing."""
        manifest = self.folder / MANIFEST
        lines = manifest.read_bytes().splitlines(keepends=True) if manifest.exists() else []
        files = {there.name for there in self.folder.iterdir()}
        entries = [entry for entry in map(_entry, lines) if entry is not None and entry.file in files]
        if len(entries) < len(lines):
            with _atomic_write(manifest) as temporary:
                temporary.write_bytes(_lines(entries))
        return entries


def _entry(line: bytes) -> Entry | None:
    try:
        found = json.loads(line)
        entry = Entry(**{**found, "grid_thw": tuple(found["grid_thw"])})
        _number(entry.file)
    except (ValueError, TypeError, KeyError):
        return None
    return entry if line.endswith(b"\n") else None


def _lines(entries: list[Entry]) -> bytes:
    return b"".join(json.dumps(asdict(entry)).encode() + b"\n" for entry in entries)


def _number(file: str) -> int:
    """Returns the number in an embedding file's name. Raises ValueError."""
    return int(file.removeprefix(PREFIX).removesuffix(SUFFIX).partition("-")[0])


def save(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes a safetensors file atomically. Raises EmbeddingFilesError, OSError."""
    with _atomic_write(file) as temporary:
        try:
            save_file(tensors, temporary)
        except SafetensorError as error:  # a full disk, among others
            raise EmbeddingFilesError(f"{file} cannot be written: {error}") from error


@contextmanager
def _atomic_write(file: Path) -> Iterator[Path]:
    """Yields a temporary path that atomically replaces `file` if the block succeeds."""
    temporary = file.with_name(file.name + _TEMPORARY_SUFFIX)
    try:
        yield temporary
        _fsync(temporary)
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _fsync(file.parent)


def _fsync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
