"""Embeddings of many pictures in a folder: safetensors files and a manifest, whole after every kill.

A file of embeddings is written aside and renamed, then its lines are added to the manifest; what the manifest does not
name is not there. It must not know how embeddings are made.
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
_ASIDE = ".part"

Stamp: TypeAlias = tuple[str, int, int]


class EmbeddingFilesError(Exception):
    """A folder that cannot be gone on with; says why and what to do."""


@dataclass(frozen=True)
class Entry:
    """A line of the manifest: where the embedding of one picture is. The last line of a path counts."""

    path: str
    """Relative to the folder of pictures, with `/`."""
    digest: str
    """64 hex characters over the picture and all else that decides the embedding; the tensor's name in `file`."""
    grid_thw: tuple[int, int, int]
    """Patches in time, height and width."""
    num_tokens: int
    file: str
    """Relative to the folder of embeddings; its tensor `digest` is `[num_tokens, width]`."""
    num_bytes: int
    """Of the picture's file, as `mtime_ns` is: both unchanged, the picture counts as unchanged."""
    mtime_ns: int

    @property
    def stamp(self) -> Stamp:
        return self.path, self.num_bytes, self.mtime_ns


class EmbeddingFiles:
    """A folder of embeddings, opened for adding to it. A context manager, which writes what is pending when it ends.

    One process may have it open.
    """

    def __init__(
        self, folder: Path, about: dict[str, object] | None, *, images_per_file: int, bytes_per_file: int
    ) -> None:
        """Makes the folder, or goes on with it.

        Args:
            about: of the encoder, kept in the folder; JSON values. A folder with another one is refused. None where it
                is not known yet: `settle` wants it before anything is added.
            images_per_file, bytes_per_file: a file is written when either is reached.

        Raises:
            EmbeddingFilesError: the folder is another encoder's, another process has it open, or it is no such folder.
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
            self.about = self._read_about()
            if about is not None:
                self.settle(about)
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

    def known(self, digest: str) -> Entry | None:
        """An entry with this embedding, written already."""
        return self._by_digest.get(digest)

    def holds(self, digest: str) -> bool:
        """Whether the embedding is written or pending."""
        return digest in self._by_digest or digest in self._tensors

    def add(self, entry: Entry, tokens: torch.Tensor | None) -> None:
        """`entry.file` is filled in here; `tokens` `[num_tokens, width]` on any device, None for an embedding that is
        known or pending."""
        if tokens is not None:
            self._tensors[entry.digest] = tokens.detach().to("cpu", copy=True).contiguous()
        elif not self.holds(entry.digest):
            raise ValueError(f"{entry.path}: no tokens for a new embedding")
        self._pending.append(entry)
        num_bytes = sum(tensor.nbytes for tensor in self._tensors.values())
        if len(self._pending) >= self._images_per_file or num_bytes >= self._bytes_per_file:
            self.flush()

    def flush(self) -> None:
        """Writes what is pending: the tensors, then the lines that name them. Raises EmbeddingFilesError, OSError."""
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
        self._append(written)
        self._tensors, self._pending = {}, []

    def _append(self, written: list[Entry]) -> None:
        with (self.folder / MANIFEST).open("ab") as manifest:
            manifest.write(_lines(written))
            manifest.flush()
            os.fsync(manifest.fileno())
        self.entries += written
        self._by_digest |= {entry.digest: entry for entry in written}

    def take(self, entries: list[Entry]) -> None:
        """Names in the manifest what others have written whole, see encoder/embedding_part.py. Raises OSError."""
        assert self.about is not None
        self._append(entries)

    @property
    def next_number(self) -> int:
        """Of files of embeddings, those of encoder/embedding_part.py too."""
        return self._next

    def settle(self, about: dict[str, object]) -> None:
        """Keeps `about` in a new folder. Raises EmbeddingFilesError where the folder is another encoder's."""
        if self.about is None:
            with _whole(self.folder / ABOUT) as aside:
                aside.write_text(json.dumps(about, indent=1) + "\n")
            self.about = about
        elif not same_encoder(self.about, about):
            raise EmbeddingFilesError(another_encoder(self.folder))

    def _read_about(self) -> dict[str, object] | None:
        file = self.folder / ABOUT
        if file.exists():
            found: dict[str, object] = json.loads(file.read_bytes())
            return found
        if any(there.suffix != _ASIDE for there in self.folder.iterdir()):
            raise EmbeddingFilesError(f"{self.folder} holds something else: name another folder")
        return None

    def _read(self) -> list[Entry]:
        """The manifest without lines that were not written whole, or whose file is gone."""
        manifest = self.folder / MANIFEST
        lines = manifest.read_bytes().splitlines(keepends=True) if manifest.exists() else []
        files = {there.name for there in self.folder.iterdir()}
        entries = [entry for entry in map(_entry, lines) if entry is not None and entry.file in files]
        if len(entries) < len(lines):
            with _whole(manifest) as aside:
                aside.write_bytes(_lines(entries))
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
    """Of a file of embeddings. Raises ValueError."""
    return int(file.removeprefix(PREFIX).removesuffix(SUFFIX).partition("-")[0])


def save(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """At once: a reader never sees half a file. Raises EmbeddingFilesError, OSError."""
    with _whole(file) as aside:
        try:
            save_file(tensors, aside)
        except SafetensorError as error:  # a full disk, among others
            raise EmbeddingFilesError(f"{file} cannot be written: {error}") from error


def same_encoder(about: dict[str, object], other: dict[str, object]) -> bool:
    return bool(json.loads(json.dumps(about)) == json.loads(json.dumps(other)))


def another_encoder(folder: Path) -> str:
    """What is said of a folder of another encoder's embeddings."""
    return (
        f"{folder} holds embeddings of other weights, dtype or bounds ({ABOUT} there says which): name another folder"
    )


@contextmanager
def _whole(file: Path) -> Iterator[Path]:
    """Where to write what becomes `file`, at once, when the block ends well."""
    aside = file.with_name(file.name + _ASIDE)
    try:
        yield aside
        _to_disk(aside)
        aside.replace(file)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    _to_disk(file.parent)


def _to_disk(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
