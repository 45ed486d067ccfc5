"""vLLM's tower as a peer, for real on the CPU: built without an engine, with our weights, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="the peer is vLLM itself")

from benchmarks.ladder.baton import BUILD_S, Build, Built, Peer, Take, Taken
from benchmarks.ladder.towers import config_of, random_inputs, random_tower, shapes_of
from benchmarks.peers import vllm_process
from benchmarks.peers.vllm_tower import published_files, write_weights

CPU = torch.device("cpu")


def test_vllm_computes_what_our_tower_does(tmp_path: Path) -> None:
    """Times of two towers are only worth comparing if they have the same weights and inputs: here both are seen to."""
    with Peer(vllm_process.make, tmp_path / "vllm.log") as peer:
        for name in ("qwen3_vl_2b", "qwen2_5_vl"):
            config = config_of(name, tiny=True, dtype="bfloat16")
            tower = random_tower(config, seed=3, dtype=torch.float32, device=CPU)
            shapes = tuple(shapes_of(config, tiny=True))
            folder = published_files(name, tmp_path / name, tiny=True)
            write_weights(tower.to(torch.bfloat16), folder)
            built = peer.ask(Build(name, str(folder), shapes, 3, True, "bfloat16"), Built, BUILD_S)
            (way,) = [label for label in built.labels if label.startswith("vllm ")]
            for shape in shapes:
                patches = random_inputs(config, shape.grids, sets=1, seed=3, device=CPU)[0].float()
                exact = random_tower(config, seed=3, dtype=torch.float32, device=CPU)
                lengths = [h * w // config.merge_unit for _, h, w in shape.grids]
                reference = tmp_path / "reference.pt"
                torch.save(list(exact(patches, exact.prepare(shape.grids)).split(lengths)), reference)
                taken = peer.ask(Take(shape.name, str(reference)), Taken, BUILD_S)
                # bfloat16 against float32: rounding. Other weights or other inputs are 1 apart.
                assert 1e-3 < max(taken.errors[way]) < 4e-2
            assert peer.contestant(way).run(0, read_clock=True).ms > 0
            assert len(peer.contestant(way).sustain(0.0, 0.01).samples_ms) >= 1
