"""Trains the small model that answers questions about scenes.

    python -m training.train --out models/scenes-8m --steps 8000        (minutes on one H200)
    python -m training.train --out /tmp/try --steps 3 --tiny            (a try without a GPU)

Scenes are drawn on the fly in worker processes; none is seen twice in a run. The same arguments give the same data in
the same order. Weights and record are written with each line of the log: `--start` continues a run that was cut off.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from training.batches import Batch, Encoder, Limits, batches
from training.optimizer import optimizers_for
from training.packed import PackedModel, Untyped
from training.scenes import HELD_OUT
from training.scenes_model import save_scenes_model, scenes_config, scenes_tokenizer

TINY = Limits(2048, 1536, 512, 64, 64)


class Batches(IterableDataset[Batch]):
    """Each worker packs batches of its own seeds."""

    def __init__(self, tokenizer: str, limits: Limits, seed: int) -> None:
        self._tokenizer, self._limits, self._seed = tokenizer, limits, seed

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        index, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        first = (self._seed << 32) % HELD_OUT
        return batches(Encoder(Tokenizer.from_str(self._tokenizer)), count(first + index, workers), self._limits)


def new_model(config: dict[str, Any], seed: int) -> Untyped:
    """transformers' model with fresh weights in float32."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    torch.manual_seed(seed)
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(**config)).float()


def learning_rate(step: int, steps: int, warmup: int) -> float:
    """As a part of the highest: a rise, a level stretch, and a fall to nothing over the second half."""
    if step < warmup:
        return (step + 1) / warmup
    part = step / steps
    return 1.0 if part < 0.4 else 0.5 * (1 + math.cos(math.pi * (part - 0.4) / 0.6))


class Step:
    """Loss and gradients of a batch; on a GPU, if asked for, recorded once as a CUDA graph and replayed.

    A step is some thousands of small launches, which take the host as long as the GPU. All shapes are fixed, so a
    recording serves every batch; its gradients stay where they are and are overwritten.
    """

    def __init__(self, packed: PackedModel, *, graphed: bool) -> None:
        self._packed = packed
        self._graphed = graphed
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Batch = {}
        self._outputs: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """`batch` in pinned memory or on the device; returns the loss and, for each label, whether it was found."""
        if not self._graphed:
            self._packed.zero_grad()
            device = next(self._packed.parameters()).device
            return self._run({name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()})
        if self._graph is None:
            self._record(batch)
        for name, tensor in batch.items():
            self._inputs[name].copy_(tensor, non_blocking=True)
        assert self._graph is not None
        assert self._outputs is not None
        self._graph.replay()
        return self._outputs[0].clone(), self._outputs[1].clone()

    def _run(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        device = batch["ids"].device.type
        mixed = torch.autocast(device, torch.bfloat16, cache_enabled=False) if device == "cuda" else nullcontext()
        with mixed:
            loss, right = self._packed(batch)
        loss.backward()
        return loss.detach(), right

    def _record(self, batch: Batch) -> None:
        self._inputs = {name: tensor.cuda() for name, tensor in batch.items()}
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self._packed.zero_grad()
                self._run(self._inputs)
        torch.cuda.current_stream().wait_stream(aside)
        self._packed.zero_grad()
        self._graph = torch.cuda.CUDAGraph()
        # Not "global": the loader's thread pins memory meanwhile, which would end the capture.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._outputs = self._run(self._inputs)


def train(arguments: argparse.Namespace) -> None:
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    limits = TINY if arguments.tiny else Limits()
    tokenizer = scenes_tokenizer()
    model = new_model(scenes_config(tokenizer), arguments.seed)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters} parameters on {device}", flush=True)
    if arguments.start:
        from safetensors.torch import load_file

        model.load_state_dict(load_file(Path(arguments.start) / "model.safetensors"), strict=False)
    loader = DataLoader(
        Batches(tokenizer.to_str(), limits, arguments.seed + 1),
        batch_size=None,
        num_workers=arguments.workers,
        pin_memory=device == "cuda",
        prefetch_factor=3 if arguments.workers else None,
        multiprocessing_context="fork" if arguments.workers else None,
    )
    source = iter(loader)  # the workers are forked before this process holds anything of the GPU
    packed = PackedModel(model.to(device), limits, compiled=device == "cuda" and not arguments.eager)
    run = Step(packed, graphed=arguments.graph)
    optimizers = optimizers_for(model, lr=arguments.lr, decay=arguments.decay)
    log: list[dict[str, float]] = []
    record = {"arguments": vars(arguments), "parameters": parameters, "torch": torch.__version__, "log": log}
    record["device"] = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    started, waited, conversations = time.perf_counter(), 0.0, 0
    recent: list[torch.Tensor] = []
    for step in range(arguments.steps):
        asked = time.perf_counter()
        batch = next(source)
        waited += time.perf_counter() - asked
        conversations += int((batch["conversation_borders"].diff() > 0).sum())
        loss, right = run(batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = arguments.lr * learning_rate(step, arguments.steps, arguments.warmup)
            optimizer.step()
        # A label that is padding is never found.
        recent.append(torch.stack([loss, right.sum() / int((batch["labels"] >= 0).sum())]))
        if (step + 1) % arguments.every == 0 or step + 1 == arguments.steps:
            mean = torch.stack(recent).mean(0).tolist()
            recent = []
            entry = {
                "step": step + 1,
                "loss": round(mean[0], 4),
                "tokens_right": round(mean[1], 4),
                "conversations": conversations,
                "seconds": round(time.perf_counter() - started, 1),
                "seconds_waited": round(waited, 1),
            }
            log.append(entry)
            print(json.dumps(entry), flush=True)
            save_scenes_model(Path(arguments.out), tokenizer, model.state_dict())
            if arguments.record:
                Path(arguments.record).parent.mkdir(parents=True, exist_ok=True)
                Path(arguments.record).write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.train", description="Train the scenes model.")
    parser.add_argument("--out", required=True, help="folder of the checkpoint")
    parser.add_argument("--record", help="file for the log, as JSON")
    parser.add_argument("--start", help="checkpoint to continue from")
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--decay", type=float, default=0.01)
    parser.add_argument(
        "--seed", type=int, default=0, help="decides the data; a continuation of the same seed repeats the first run's"
    )
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--every", type=int, default=100, help="steps between lines of the log, and between saves")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--graph", action="store_true", help="replay each step as a CUDA graph")
    parser.add_argument("--tiny", action="store_true", help="small batches, for a test run")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
