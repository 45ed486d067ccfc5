"""Encodes all images of a folder into a folder of embeddings and skips those encoded before.

Threads read and decode images while others are encoded.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from encoder.checkpoint.image_rules import PixelBounds
from encoder.encoder import Encoder
from encoder.images.decoded import Decoded
from encoder.images.size import ImageError, num_tokens
from encoder.offline.store import EmbeddingFiles, Entry, Stamp
from encoder.pixels.preprocess import Pixels

SUFFIXES = frozenset({
    ".avif", ".bmp", ".dib", ".gif", ".icns", ".ico", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".pbm", ".pcx",
    ".pgm", ".png", ".pnm", ".ppm", ".qoi", ".sgi", ".tga", ".tif", ".tiff", ".webp", ".xbm",
})  # fmt: skip
"""File name suffixes of images; other files of the folder are ignored."""

_WINDOW = 16
"""Number of decoded images that are packed together."""


@dataclass
class Outcome:
    """Number of images by result."""

    encoded: int = 0
    skipped: int = 0
    """Images with an embedding for their path, size and modification time."""
    duplicates: int = 0
    """Images with the same bytes as another one that has an embedding."""
    failed: list[tuple[str, str]] = field(default_factory=list)
    """Path and reason of each image that could not be read."""


@dataclass(frozen=True)
class _Prepared:
    """An image after reading. `pixels` is None if its embedding is known; without `entry` it failed with `reason`."""

    entry: Entry | None = None
    pixels: Pixels | Decoded | None = None
    path: str = ""
    reason: str = ""


def list_images(folder: Path) -> list[str]:
    """Returns the paths of all images below `folder`, relative to it and sorted, without hidden files and folders."""
    found = []
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inside = Path(where).relative_to(folder)
        found += [
            (inside / name).as_posix()
            for name in files
            if Path(name).suffix.lower() in SUFFIXES and not name.startswith(".")
        ]
    return sorted(found)


def encode_folder(
    encoder: Encoder,
    folder: Path,
    files: EmbeddingFiles,
    *,
    bounds: PixelBounds | None = None,
    threads: int = 2,
    progress: Callable[[int], object] = lambda number: None,
) -> Outcome:
    """Encodes the images of `folder` that `files` does not hold. Unreadable images are reported in `Outcome.bad`.

    `progress` is called with the number of newly finished images, skipped ones included. Raises OSError and
    EmbeddingFilesError if embeddings cannot be written.
    """
    there = {entry.path: entry.stamp for entry in files.entries}
    found = list_images(folder)
    wanted = [path for path in found if path not in there or _stamp(folder, path) != there[path]]
    outcome = Outcome(skipped=len(found) - len(wanted))
    progress(outcome.skipped)
    window: list[_Prepared] = []
    for prepared in _prepare_images(encoder, folder, wanted, files, bounds, threads):
        if prepared.entry is None:
            outcome.failed.append((prepared.path, prepared.reason))
            progress(1)
            continue
        window.append(prepared)
        if len(window) == _WINDOW:
            _encode(encoder, window, files, outcome, progress)
            window = []
    _encode(encoder, window, files, outcome, progress)
    return outcome


def _encode(
    encoder: Encoder,
    window: Sequence[_Prepared],
    files: EmbeddingFiles,
    outcome: Outcome,
    progress: Callable[[int], object],
) -> None:
    """Encodes and adds the images of a window; images with equal digests are encoded once."""
    first: dict[str, tuple[Entry, Pixels | Decoded]] = {}
    again: list[Entry] = []
    for prepared in window:
        assert prepared.entry is not None
        digest = prepared.entry.digest
        if prepared.pixels is None or digest in first or files.holds(digest):
            again.append(prepared.entry)
        else:
            first[digest] = prepared.entry, prepared.pixels
    entries = [entry for entry, _ in first.values()]
    for batch, outputs in encoder.encode_batches([pixels for _, pixels in first.values()]):
        for index, tokens in zip(batch.indices, outputs, strict=True):
            files.add(entries[index], tokens)
            outcome.encoded += 1
            progress(1)
    for entry in again:
        files.add(entry, None)
        outcome.duplicates += 1
        progress(1)


def _prepare_images(
    encoder: Encoder,
    folder: Path,
    wanted: Sequence[str],
    files: EmbeddingFiles,
    bounds: PixelBounds | None,
    threads: int,
) -> Iterator[_Prepared]:
    """Yields the prepared images in the order of `wanted`; threads prepare up to `2 * threads` ahead."""

    def prepare(path: str) -> _Prepared:
        try:
            stat = (folder / path).stat()
            data = (folder / path).read_bytes()
            digest = encoder.identity.digest(data, bounds)
            if known := files.find_entry(digest):
                pixels, grid = None, known.grid_thw
            else:
                pixels = encoder.prepare(data, bounds)
                grid = pixels.grid_thw
        except ImageError as error:
            return _Prepared(path=path, reason=str(error))
        except OSError as error:
            return _Prepared(path=path, reason=error.strerror or type(error).__name__)
        except MemoryError:
            return _Prepared(path=path, reason="there is not enough memory to decode it")
        tokens = num_tokens(grid, encoder.identity.rules.merge_size)
        return _Prepared(Entry(path, digest, grid, tokens, "", stat.st_size, stat.st_mtime_ns), pixels)

    ahead: deque[Future[_Prepared]] = deque()
    remaining = iter(wanted)
    with ThreadPoolExecutor(threads, thread_name_prefix="decode") as pool:
        try:
            while True:
                while len(ahead) < 2 * threads and (path := next(remaining, None)) is not None:
                    ahead.append(pool.submit(prepare, path))
                if not ahead:
                    return
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()


def _stamp(folder: Path, path: str) -> Stamp | None:
    """Returns path, size and modification time; None if the file cannot be accessed."""
    try:
        found = (folder / path).stat()
    except OSError:
        return None
    return path, found.st_size, found.st_mtime_ns
