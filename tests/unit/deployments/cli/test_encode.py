"""`vitray encode`: what it writes equals what the library gives, and neither a kill nor a bad picture costs more than
itself. A small checkpoint with random weights on the CPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image
from safetensors import safe_open

from deployments.cli import main as cli
from encoder import Embedding, Encoder
from encoder.checkpoint.image_rules import PixelBounds
from encoder.offline import store as kept
from encoder.offline.encode_folder import list_images
from encoder.offline.store import EmbeddingFiles, EmbeddingFilesError, Entry
from training.checkpoints import make_checkpoint

ROOT = Path(__file__).parents[4]
# Products of other shapes are summed in another order: float32 rounding, relative to the embedding's norm.
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_vl", tmp_path_factory.mktemp("checkpoint") / "small")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five pictures, one of them below another folder."""
    for number, name in enumerate(("a.png", "b.jpg", "c.webp", "below/d.PNG", "e.png")):
        draw(tmp_path / "pictures" / name, number)
    return tmp_path / "pictures"


def draw(file: Path, seed: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (40 + 16 * seed, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file)


def encode(folder: Path, checkpoint: Path, *more: str) -> Result:
    out = str(folder.parent / "out")
    command = ["encode", str(folder), "--out", out, "--model", str(checkpoint), "--device", "cpu", "--threads", "2"]
    return CliRunner().invoke(cli.main, [*command, *more])


def manifest(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder.parent / "out" / "manifest.jsonl").read_text().splitlines()]


def embeddings(folder: Path) -> dict[str, torch.Tensor]:
    """Path -> tokens, read as the help says."""
    found = {}
    for line in manifest(folder):
        with safe_open(folder.parent / "out" / line["file"], framework="pt") as file:
            found[line["path"]] = file.get_tensor(line["digest"])
    return found


def by_the_library(
    folder: Path, checkpoint: Path, paths: Sequence[str], bounds: PixelBounds | None = None
) -> dict[str, Embedding]:
    encoder = Encoder.from_checkpoint(checkpoint, device="cpu")
    return {path: encoder.encode([(folder / path).read_bytes()], bounds=bounds)[0] for path in paths}


def test_embeddings_are_those_of_the_library(folder: Path, checkpoint: Path) -> None:
    (folder / "notes.txt").write_text("no picture")
    draw(folder / ".hidden" / "f.png", 6)
    bounds = PixelBounds(max_pixels=64 * 64)
    result = encode(folder, checkpoint, "--images-per-file", "2", "--max-pixels", str(64 * 64))
    assert result.exit_code == 0, result.output
    assert "5 embeddings" in result.stdout
    assert "5 encoded" in result.stdout
    expected = by_the_library(folder, checkpoint, ["a.png", "b.jpg", "below/d.PNG", "c.webp", "e.png"], bounds)
    lines = {line["path"]: line for line in manifest(folder)}
    assert lines.keys() == expected.keys()
    assert {line["file"] for line in lines.values()} == {f"embeddings-0000{number}.safetensors" for number in range(3)}
    for path, tokens in embeddings(folder).items():
        embedding, line = expected[path], lines[path]
        assert tuple(line["grid_thw"]) == embedding.grid_thw
        assert (line["digest"], line["num_tokens"]) == (embedding.digest, len(embedding.tokens))
        assert tokens.dtype == embedding.tokens.dtype
        assert torch.dist(tokens, embedding.tokens) <= ROUNDING * torch.linalg.norm(embedding.tokens)


def test_a_second_run_does_what_is_missing(folder: Path, checkpoint: Path) -> None:
    """A new picture, a changed one, one with the bytes of another; what is unchanged is not even read."""
    assert encode(folder, checkpoint).exit_code == 0
    before = embeddings(folder)
    unchanged = folder / "a.png"
    times = unchanged.stat()
    unchanged.write_bytes(bytes(times.st_size))
    os.utime(unchanged, ns=(times.st_atime_ns, times.st_mtime_ns))
    draw(folder / "b.jpg", 9)
    draw(folder / "f.png", 8)
    shutil.copy(folder / "e.png", folder / "g.png")
    result = encode(folder, checkpoint)
    assert result.exit_code == 0, result.output
    assert "7 embeddings" in result.stdout
    assert "2 encoded, 1 of the same bytes as another, 4 there already; 0 bad" in result.stdout
    after = embeddings(folder)
    assert torch.equal(after["a.png"], before["a.png"])
    assert torch.equal(after["g.png"], before["e.png"])
    assert after["b.jpg"].shape != before["b.jpg"].shape
    assert "0 encoded" in encode(folder, checkpoint).stdout


def test_the_same_bytes_twice_in_one_run_are_encoded_once(folder: Path, checkpoint: Path) -> None:
    shutil.copy(folder / "a.png", folder / "z.png")
    assert "5 encoded, 1 of the same bytes" in encode(folder, checkpoint, "--images-per-file", "1").stdout
    found = embeddings(folder)
    assert torch.equal(found["a.png"], found["z.png"])


def test_bad_pictures_are_listed_and_tried_again(folder: Path, checkpoint: Path) -> None:
    (folder / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\nnot really")
    whole = (folder / "b.jpg").read_bytes()
    (folder / "b.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "gone.png").symlink_to("nowhere.png")
    result = encode(folder, checkpoint)
    assert result.exit_code == 0, result.output
    assert "4 encoded" in result.stdout
    assert "3 bad pictures" in result.stdout
    bad = [json.loads(line) for line in (folder.parent / "out" / "bad.jsonl").read_text().splitlines()]
    assert [line["path"] for line in bad] == ["b.jpg", "bad.png", "gone.png"]
    assert all(line["reason"] and f"bad: {line['path']}: {line['reason']}" in result.stderr for line in bad)
    (folder / "b.jpg").write_bytes(whole)
    (folder / "bad.png").unlink()
    assert "1 encoded, 0 of the same bytes as another, 4 there already; 1 bad" in encode(folder, checkpoint).stdout
    assert len(embeddings(folder)) == 5


@pytest.mark.slow
def test_a_killed_run_is_gone_on_with(folder: Path, checkpoint: Path) -> None:
    """Killed in the middle of writing its second file: what the manifest names is whole, and nothing is done twice."""
    source = (
        "import os, signal, sys\n"
        "from deployments.cli import main as cli\n"
        "from encoder.offline import store as kept\n"
        "save, calls = kept.save_file, []\n"
        "def save_and_die(tensors, file):\n"
        "    calls.append(file)\n"
        "    save(tensors, file)\n"
        "    if len(calls) == 2:\n"
        "        os.truncate(file, 100)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "kept.save_file = save_and_die\n"
        "cli.main(sys.argv[1:])\n"
    )
    out = folder.parent / "out"
    arguments = [str(folder), "--out", str(out), "--model", str(checkpoint), "--device", "cpu"]
    command = [sys.executable, "-c", source, "encode", *arguments, "--images-per-file", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(list(out.glob("*.part"))) == 1
    assert len(embeddings(folder)) == 2
    result = encode(folder, checkpoint, "--images-per-file", "2")
    assert "3 encoded, 0 of the same bytes as another, 2 there already" in result.stdout
    assert sorted(embeddings(folder)) == list_images(folder)
    assert list(out.glob("*.part")) == []


def test_what_an_interruption_leaves_pending_is_written(folder: Path, checkpoint: Path) -> None:
    """Ctrl-C loses nothing that was encoded."""
    with contextlib.suppress(KeyboardInterrupt), opened(folder.parent / "out") as files:
        files.add(entry("a"), torch.ones(2, 3))
        assert files.find_entry("digest of a") is None
        raise KeyboardInterrupt
    assert [line["path"] for line in manifest(folder)] == ["a"]


def opened(out: Path, **about: object) -> EmbeddingFiles:
    return EmbeddingFiles(out, {"fingerprint": "1", **about}, images_per_file=2, bytes_per_file=1000)


def entry(path: str, digest: str | None = None) -> Entry:
    return Entry(path, digest or f"digest of {path}", (1, 2, 4), 2, "", 10, 20)


def test_a_torn_manifest_loses_the_torn_line_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as files:
        for name in "abcd":
            files.add(entry(name), torch.full((2, 3), float(ord(name))))
    written = tmp_path / kept.MANIFEST
    lines = written.read_bytes().splitlines(keepends=True)
    written.write_bytes(b"".join([lines[0], b"{torn\n", *lines[2:]])[:-5])
    with opened(tmp_path) as files:
        assert [found.path for found in files.entries] == ["a", "c"]
        files.add(entry("e"), torch.ones(2, 3))
    with opened(tmp_path) as files:
        assert [(found.path, found.file) for found in files.entries] == [
            ("a", "embeddings-00000.safetensors"),
            ("c", "embeddings-00001.safetensors"),
            ("e", "embeddings-00002.safetensors"),
        ]


def test_a_file_that_is_gone_takes_its_lines_along(tmp_path: Path) -> None:
    with opened(tmp_path) as files:
        for name in "abc":
            files.add(entry(name), torch.ones(2, 3))
    (tmp_path / "embeddings-00000.safetensors").unlink()
    with opened(tmp_path) as files:
        assert [found.path for found in files.entries] == ["c"]
        assert files.find_entry("digest of a") is None
        with pytest.raises(ValueError, match="no tokens"):
            files.add(entry("again", "digest of a"), None)


def test_a_file_is_written_when_it_has_enough_bytes(tmp_path: Path) -> None:
    with opened(tmp_path) as files:
        files.add(entry("a"), torch.ones(100, 3))
        assert files.find_entry("digest of a") is not None
        files.add(entry("b"), torch.ones(2, 3))
        assert files.find_entry("digest of b") is None
        assert files.holds("digest of b")


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    """As on a full disk: the system refuses to let a file grow."""
    with opened(tmp_path) as files:
        files.add(entry("a"), torch.ones(2, 3))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(EmbeddingFilesError, match="cannot be written"), opened(tmp_path) as files:
            files.add(entry("b"), torch.ones(200, 3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "embeddings-00000.safetensors", kept.ABOUT, kept.MANIFEST
    ]  # fmt: skip
    with opened(tmp_path) as files:
        assert [found.path for found in files.entries] == ["a"]


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "out"), pytest.raises(EmbeddingFilesError, match="another process"):
        opened(tmp_path / "out")
    with pytest.raises(EmbeddingFilesError, match="other weights, dtype or bounds"):
        opened(tmp_path / "out", max_pixels=1)
    with opened(tmp_path / "out"):
        """The refused one has let go of it."""
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(EmbeddingFilesError, match="has other files"):
        opened(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mine.txt", "out"]


def test_what_cannot_begin_says_why(folder: Path, checkpoint: Path, tmp_path: Path) -> None:
    assert encode(folder, checkpoint).exit_code == 0
    other = encode(folder, checkpoint, "--max-pixels", "4096")
    assert (other.exit_code, "name another folder" in other.stderr) == (1, True)
    nowhere = encode(folder, tmp_path / "nowhere")
    assert (nowhere.exit_code, "there is no such folder" in nowhere.stderr) == (1, True)
    contradiction = encode(folder, checkpoint, "--max-pixels", "5", "--min-pixels", "6")
    assert (contradiction.exit_code, "min_pixels is 6" in contradiction.stderr) == (1, True)
    (tmp_path / "empty" / "pictures").mkdir(parents=True)
    empty = encode(tmp_path / "empty" / "pictures", checkpoint)
    assert (empty.exit_code, "contains no pictures" in empty.stderr) == (1, True)
