"""`vitray encode` by several processes: Ray Data with two of them on CPUs, a small checkpoint with random weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from safetensors import safe_open

from deployments.cli import encode_ray_data
from deployments.cli import main as cli
from deployments.cli.encode_ray_data import EncodeShares, Job
from encoder import Encoder
from encoder.offline.store import EmbeddingFiles, EmbeddingFilesError
from tests.cluster.served import Cluster

# Products of other shapes are summed in another order: float32 rounding, relative to the embedding's norm.
ROUNDING = 1e-5


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Seven, one of them bad and two of the same bytes."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(5):
        noise = np.random.default_rng(number).integers(0, 256, (40 + 16 * number, 64, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{number}.png")
    (folder / "again.png").write_bytes((folder / "0.png").read_bytes())
    (folder / "bad.png").write_bytes(b"no picture")
    return folder


def job_of(pictures: Path, checkpoint: Path) -> Job:
    return Job(str(checkpoint), str(pictures), str(pictures.parent / "out"), device="cpu", threads=1)


def opened(job: Job, about: dict[str, object] | None = None) -> EmbeddingFiles:
    return EmbeddingFiles(Path(job.out), about, images_per_file=256, bytes_per_file=2**20)


def embeddings(out: Path) -> dict[str, torch.Tensor]:
    """Path -> tokens, as the help says where they are."""
    found = {}
    for line in map(json.loads, (out / "manifest.jsonl").read_text().splitlines()):
        with safe_open(out / line["file"], framework="pt") as file:
            found[line["path"]] = file.get_tensor(line["digest"])
    return found


@pytest.mark.slow
def test_two_processes_make_what_one_makes_and_go_on_where_they_were(
    cluster: Cluster, checkpoints: dict[str, Path], pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after the first share: it is in the manifest, and the command does the rest."""
    monkeypatch.setattr(encode_ray_data, "SHARE", 2)
    job = job_of(pictures, checkpoints["qwen3_vl"])

    def stop(number: int) -> None:
        if files.entries:
            raise KeyboardInterrupt

    with opened(job) as files, pytest.raises(KeyboardInterrupt):
        encode_ray_data.encode_folder(job, files, processes=2, progress=stop)
    first = embeddings(Path(job.out))
    assert 1 <= len(first) <= 2
    words = ["encode", str(pictures), "--out", job.out, "--model", job.checkpoint, "--device", "cpu"]
    ran = CliRunner().invoke(cli.main, [*words, "--processes", "2"])
    assert ran.exit_code == 0, ran.output
    assert f"6 embeddings in {job.out}: " in ran.stdout
    assert f", {len(first)} there already; 1 bad" in ran.stdout
    assert "bad: bad.png: " in ran.stderr
    expected = Encoder.from_checkpoint(checkpoints["qwen3_vl"], device="cpu")
    found = embeddings(Path(job.out))
    assert sorted(found) == ["0.png", "1.png", "2.png", "3.png", "4.png", "again.png"]
    for path, tokens in found.items():
        (embedding,) = expected.encode([(pictures / path).read_bytes()])
        assert torch.dist(tokens, embedding.tokens) <= ROUNDING * torch.linalg.norm(embedding.tokens)
    assert "0 encoded" in CliRunner().invoke(cli.main, words).stdout, "one process takes it for its own"


def test_a_share_done_again_comes_out_the_same(checkpoints: dict[str, Path], pictures: Path) -> None:
    """As after the loss of a process; files are cut by bytes, and equal bytes are encoded once."""
    job = Job(**{**vars(job_of(pictures, checkpoints["qwen3_vl"])), "bytes_per_file": 1})
    Path(job.out).mkdir()
    share = json.dumps({"number": 3, "paths": ["0.png", "1.png", "again.png", "bad.png"]})
    process = EncodeShares(job)
    (once,), (twice,) = (process({"share": np.array([share])})["done"] for _ in range(2))
    assert once == twice
    done = json.loads(once)
    file_of = {entry["path"]: entry["file"] for entry in done["entries"]}
    assert file_of["again.png"] == file_of["0.png"] != file_of["1.png"]
    assert (done["encoded"], [path for path, _ in done["bad"]]) == (2, ["bad.png"])
    written = sorted(file.name for file in Path(job.out).iterdir())
    assert written == sorted(set(file_of.values())) == [f"embeddings-00003-{part}.safetensors" for part in range(2)]


def test_a_folder_of_another_encoder_is_refused_before_anything_is_written(
    checkpoints: dict[str, Path], pictures: Path
) -> None:
    job = job_of(pictures, checkpoints["qwen3_vl"])
    with opened(job, {"fingerprint": "another"}) as files:
        there = files.about
    process = EncodeShares(Job(**{**vars(job), "about": there}))
    (done,) = process({"share": np.array([json.dumps({"number": 0, "paths": ["0.png"]})])})["done"]
    assert "name another folder" in json.loads(done)["error"]
    assert list(Path(job.out).glob("*.safetensors")) == []
    with opened(job) as files, pytest.raises(EmbeddingFilesError, match="other weights, dtype or bounds"):
        files.claim({"fingerprint": "mine"})


def test_every_process_has_something_to_do() -> None:
    paths = [str(number) for number in range(130)]
    cut = encode_ray_data.shares(paths, 2, 5)
    assert [len(share["paths"]) for share in cut] == [64, 64, 2]
    assert [share["number"] for share in cut] == [5, 6, 7]
    assert [len(share["paths"]) for share in encode_ray_data.shares(paths[:5], 2, 0)] == [3, 2]
    assert [path for share in cut for path in share["paths"]] == paths
