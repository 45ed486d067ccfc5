"""Measures one tower's ladder: every rung and peer on the same weights and inputs, first in turn, then each alone.

Fills a record of plain dictionaries, and calls `save` after each shape.
"""

from __future__ import annotations

import gc
import logging
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.ladder.baton import BUILD_S, Build, Built, Peer, Take, Taken
from benchmarks.ladder.cells import derive, relative_errors, sustained_cell
from benchmarks.ladder.gpu_clock import Nvml, Readings
from benchmarks.ladder.massive import TOWERS, WEIGHTS
from benchmarks.ladder.measure import Deadline, Local, held_bytes, reserved_bytes, timed
from benchmarks.ladder.rungs import LABELS, Rung, RungUnavailableError, make_rung
from benchmarks.ladder.summary import OTHER_PEER, sustained_stages
from benchmarks.ladder.towers import (
    INPUT_SETS,
    NAMES,
    Shape,
    config_of,
    random_inputs,
    shapes_of,
    unseen_grids,
)
from benchmarks.ladder.turns import Contestant, RunFailedError, Times, run_in_turns
from benchmarks.peers import transformers_tower as hf
from benchmarks.peers.vllm_tower import published_files, write_weights
from encoder.checkpoint.vision_config import VisionConfig
from encoder.metadata.geometry import Grid
from encoder.packing.cost_based import PAIRS_PER_UNIT
from encoder.towers.tower import VisionTower

logger = logging.getLogger(__name__)

NO_TIME = "no time was left"
WARM_UPS = 1
"""Runs of each shape by each contestant before its rounds begin."""
SHAPE_S = 4.0
"""Seconds after which rounds of a shape end, except for the minimum number of rounds: large shapes need fewer."""
LEAST_BUILD_S = 90.0
"""Seconds that the peer has to build a tower, even past the deadline: with fewer, it would lose all its rows."""
MOST_REFERENCE_TOKENS = 2200
"""Largest shapes, in tokens, that are compared across processes, through a file."""

RunBatch = Callable[[Tensor, Sequence[Grid]], list[Tensor]]


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    rungs: tuple[str, ...]
    peers: tuple[str, ...]
    rounds: int
    seed: int
    tiny: bool
    dtype: torch.dtype
    device: torch.device
    cold_batches: int
    cold_images: int
    settle_s: float
    sustain_s: float
    """Seconds for which a contestant runs alone; 0: none does."""
    sustain_all: bool
    shapes: tuple[str, ...] = ()
    """Names of the shapes to measure; empty: all."""
    weights: str = "random"
    """A key of `WEIGHTS`."""

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@dataclass
class Configuration:
    """A rung or a peer of this process while it is set up."""

    name: str
    label: str
    run: RunBatch
    row: dict[str, object] = field(default_factory=dict)
    facts: Callable[[], dict[str, object]] | None = None


def new_record(arch: str, options: Options) -> dict[str, Any]:
    """Returns a record without rows."""
    config = config_of(arch, tiny=options.tiny, dtype=options.dtype_name)
    return {
        "model": f"{NAMES[arch]}'s vision tower, {WEIGHTS[options.weights]}" + (" (tiny)" if options.tiny else ""),
        "dtype": options.dtype_name,
        "shapes": [
            {"name": s.name, "images": len(s.grids), "patches": s.tokens * config.merge_unit, "tokens": s.tokens,
             "work": sum(t * (h * w) ** 2 for t, h, w in s.grids) / PAIRS_PER_UNIT, "tflop": s.tflop,
             "held_out": s.held_out} for s in _shapes(config, options)
        ],
        "rows": [],
        "skipped": [],
    }  # fmt: skip


def _shapes(config: VisionConfig, options: Options) -> list[Shape]:
    return [
        shape for shape in shapes_of(config, tiny=options.tiny) if not options.shapes or shape.name in options.shapes
    ]


class Ladder:
    """One tower's measurement. `record` is filled in progressively; its existing cells are not measured again."""

    def __init__(
        self,
        arch: str,
        options: Options,
        record: dict[str, Any],
        *,
        peak_tflops: float | None,
        deadline: Deadline,
        readings: Readings,
        save: Callable[[], None],
        peer: Peer | None = None,
    ) -> None:
        """`peer`: a process that can build vLLM's tower, or None."""
        self._arch, self._asked, self._record, self._peak = arch, options, record, peak_tflops
        self._deadline, self._readings, self._save, self._peer = deadline, readings, save, peer
        self._config = config_of(arch, tiny=options.tiny, dtype=options.dtype_name)
        self._shapes = _shapes(self._config, options)
        self._nvml = Nvml.open() if options.device.type == "cuda" else None
        self._remote: tuple[str, ...] = ()

    def measure(self) -> None:
        """Measures everything, as far as the deadline allows."""
        options = self._asked
        tower = TOWERS[options.weights](self._config, seed=options.seed, dtype=options.dtype, device=options.device)
        self._inputs = {
            s.name: random_inputs(self._config, s.grids, sets=INPUT_SETS, seed=options.seed, device=options.device)
            for s in self._shapes
        }
        self._reference = self._references(tower)
        with tempfile.TemporaryDirectory() as folder:
            self._folder = Path(folder)
            self._configurations = self._build(tower)
            self._build_peer(tower)
            if not self._configurations and not self._remote:
                return
            for shape in self._shapes:
                self._turns(shape)
            derive(self._record, self._peak)
            self._save()
            self._alone()
        self._cold_grids()

    # Building.

    def _references(self, tower: VisionTower) -> dict[str, list[Tensor]]:
        """Returns transformers' float32 embeddings of each shape's first input; empty without transformers."""
        tf32 = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        unit = self._config.merge_unit
        try:
            theirs = hf.make_tower(self._arch, tower, tiny=self._asked.tiny, dtype=torch.float32)
            return {s.name: hf.reference(theirs, self._inputs[s.name][0], s.grids, unit) for s in self._shapes}
        except ImportError as error:
            logger.warning("no errors without transformers: %s", error)
            return {}
        finally:
            torch.backends.cuda.matmul.allow_tf32 = tf32

    def _build(self, tower: VisionTower) -> list[Configuration]:
        """Builds each contestant of this process, runs every shape once, and records its memory."""
        configurations: list[Configuration] = []
        options = self._asked
        weights = sum(parameter.nbytes for parameter in tower.parameters())
        for name in [*options.rungs, *(peer for peer in options.peers if peer == OTHER_PEER)]:
            if self._deadline.over:
                self._skip(name, NO_TIME)
                continue
            gc.collect()
            before = reserved_bytes(options.device)
            began = time.perf_counter()
            try:
                configuration, own = self._make(name, tower)
                for shape in self._shapes:
                    configuration.run(self._inputs[shape.name][0], shape.grids)
            except (RungUnavailableError, ImportError) as error:
                self._skip(name, str(error))
                continue
            except Exception as error:  # a rung that fails must not stop the others
                logger.exception("%s: %s failed", self._arch, name)
                self._skip(name, f"failed: {error!r}"[:500])
                continue
            configuration.row["build_s"] = time.perf_counter() - began
            if options.device.type == "cuda":
                configuration.row["peak_memory_bytes"] = weights - own + held_bytes(options.device) - before
                configuration.row["weights_bytes"] = weights
            self._row(name, configuration.label).update(configuration.row)
            configurations.append(configuration)
            logger.info("%s: %s is ready after %.1f s", self._arch, name, configuration.row["build_s"])
        return configurations

    def _make(self, name: str, tower: VisionTower) -> tuple[Configuration, int]:
        """Returns a contestant, and the bytes of weights that it does not share."""
        if name == OTHER_PEER:
            theirs = hf.make_tower(self._arch, tower, tiny=self._asked.tiny, dtype=self._asked.dtype)
            run = partial(hf.run_tower, theirs, merge_unit=self._config.merge_unit)
            return Configuration(name, "transformers, eager", run), sum(p.nbytes for p in theirs.parameters())
        rung: Rung = make_rung(name, tower, limited=self._asked.weights == "massive")
        return Configuration(name, LABELS[name], rung.run, {"start_s": rung.build_s}, rung.facts), 0

    def _build_peer(self, tower: VisionTower) -> None:
        options = self._asked
        if self._peer is None:
            if "vllm" in options.peers:
                self._skip("vllm", "it is not installed here")
            return
        folder = published_files(self._arch, self._folder / "checkpoint", tiny=options.tiny)
        write_weights(tower, folder)
        shapes = tuple(self._shapes)
        message = Build(self._arch, str(folder), shapes, options.seed, options.tiny, options.dtype_name)
        began = time.perf_counter()
        try:
            built = self._peer.ask(message, Built, max(LEAST_BUILD_S, min(BUILD_S, self._deadline.left)))
        except RunFailedError as error:
            self._skip("vllm", f"failed: {error}")
            return
        for name, reason in built.skipped.items():
            self._skip(name, reason)
        for name, label in built.labels.items():
            self._row(name, label)
        self._record["vllm"] = {**built.facts, "build_s": time.perf_counter() - began}
        self._remote = tuple(built.labels)

    # Measuring.

    def _turns(self, shape: Shape) -> None:
        """Measures all contestants in turn, unless the record contains this shape."""
        if any(shape.name in row["cells"] for row in self._record["rows"]):
            return
        if self._deadline.over:
            self._skip(f"{shape.name}, in turn", NO_TIME)
            return
        contestants: dict[str, Contestant] = {
            configuration.name: self._local(configuration, shape) for configuration in self._configurations
        }
        taken = self._take(shape)
        contestants |= {name: self._peer_contestant(name) for name in self._remote if name not in taken.failed}
        deadline = Deadline(min(SHAPE_S, max(0.0, self._deadline.left)))
        found = run_in_turns(
            contestants,
            rounds=self._asked.rounds,
            warm_ups=WARM_UPS,
            seed=f"{self._asked.seed}/{self._arch}/{shape.name}",
            enough=lambda: deadline.over,
        )
        for name, reason in {**taken.failed, **found.failed}.items():
            self._skip(f"{name}, {shape.name}", f"failed: {reason}")
        for name, times in found.times.items():
            self._row(name)["cells"][shape.name] = self._cell(name, shape, times, taken)
        self._save()

    def _cell(self, name: str, shape: Shape, times: Times, taken: Taken) -> dict[str, object]:
        cell: dict[str, object] = asdict(times)
        configuration = next(
            (configuration for configuration in self._configurations if configuration.name == name), None
        )
        expected = self._reference.get(shape.name)
        if configuration is not None and expected is not None:
            cell["errors"] = relative_errors(configuration.run(self._inputs[shape.name][0], shape.grids), expected)
        elif errors := taken.errors.get(name):
            cell["errors"] = errors
        return cell

    def _take(self, shape: Shape) -> Taken:
        """Makes the peer load a shape; without a peer, or if that fails, its contestants are dropped."""
        if self._peer is None or not self._remote:
            return Taken({}, {})
        reference = None
        expected = self._reference.get(shape.name)
        if expected is not None and shape.tokens <= MOST_REFERENCE_TOKENS:
            reference = self._folder / "reference.pt"
            torch.save([tokens.half().cpu() for tokens in expected], reference)
        try:
            return self._peer.ask(Take(shape.name, None if reference is None else str(reference)), Taken, BUILD_S)
        except RunFailedError as error:
            return Taken({}, dict.fromkeys(self._remote, str(error)))

    def _alone(self) -> None:
        """Measures the chosen contestants alone, in random order for each shape; the headline's first at all shapes."""
        options = self._asked
        if not options.sustain_s:
            return
        for stage in range(3 if options.sustain_all else 2):
            for shape in self._shapes:
                stages = sustained_stages(self._record, shape.name)
                names = [name for name in stages[stage] if not self._has_sustained(name, shape)]
                random.Random(f"{options.seed}/{self._arch}/{shape.name}/alone").shuffle(names)
                taken = Taken({}, {})
                if any(name in self._remote for name in names) and not self._deadline.over:
                    taken = self._take(shape)
                for name in names:
                    if self._deadline.over:
                        self._skip(f"{name}, {shape.name}, alone", NO_TIME)
                    elif reason := taken.failed.get(name) or self._sustain(name, shape):
                        self._skip(f"{name}, {shape.name}, alone", f"failed: {reason}")
                self._save()

    def _has_sustained(self, name: str, shape: Shape) -> bool:
        return "sustained" in self._row(name)["cells"][shape.name]

    def _sustain(self, name: str, shape: Shape) -> str | None:
        """Measures a contestant alone; returns the reason if it failed."""
        configuration = next(
            (configuration for configuration in self._configurations if configuration.name == name), None
        )
        if configuration is None and name not in self._remote:
            return "it was not built in this run"
        contestant = self._peer_contestant(name) if configuration is None else self._local(configuration, shape)
        try:
            spell = contestant.sustain(self._asked.settle_s, self._asked.sustain_s)
        except RunFailedError as error:
            return str(error)
        self._row(name)["cells"][shape.name]["sustained"] = sustained_cell(spell, self._readings)
        return None

    def _local(self, configuration: Configuration, shape: Shape) -> Local:
        inputs = self._inputs[shape.name]
        return Local(
            lambda number: configuration.run(inputs[number % INPUT_SETS], shape.grids), self._asked.device, self._nvml
        )

    def _peer_contestant(self, name: str) -> Contestant:
        assert self._peer is not None
        return self._peer.contestant(name)

    def _cold_grids(self) -> None:
        known = [grid for shape in self._shapes for grid in shape.grids]
        pool = unseen_grids(self._config, known, tiny=self._asked.tiny, seed=self._asked.seed)
        for configuration in self._configurations:
            row = self._row(configuration.name)
            if "grids" not in row and self._asked.cold_batches:
                if self._deadline.over:
                    self._skip(f"{configuration.name}, cold grids", NO_TIME)
                else:
                    row["grids"] = _cold_and_warm(configuration.run, pool, self._config, self._asked)
            if configuration.facts is not None:
                row["facts"] = configuration.facts()
        self._save()

    # The record.

    def _row(self, name: str, label: str = "") -> dict[str, Any]:
        for row in self._record["rows"]:
            if row["name"] == name:
                found: dict[str, Any] = row
                return found
        made: dict[str, Any] = {"name": name, "label": label, "cells": {}}
        self._record["rows"].append(made)
        return made

    def _skip(self, name: str, reason: str) -> None:
        self._record["skipped"].append({"name": name, "reason": reason})


def _cold_and_warm(run: RunBatch, pool: list[Grid], config: VisionConfig, options: Options) -> dict[str, object]:
    """Measures batches of image sizes new to this process, then the same again. Removes its grids from `pool`."""
    cold: list[float] = []
    warm: list[float] = []
    tokens = 0
    for _ in range(options.cold_batches):
        grids = [pool.pop() for _ in range(min(options.cold_images, len(pool)))]
        if not grids:
            break
        patches = random_inputs(config, grids, sets=1, seed=options.seed, device=options.device)[0]
        cold.append(timed(lambda p=patches, g=grids: run(p, g), options.device))  # type: ignore[misc]
        again = [timed(lambda p=patches, g=grids: run(p, g), options.device) for _ in range(3)]  # type: ignore[misc]
        warm.append(statistics.median(again))
        tokens += sum(t * h * w for t, h, w in grids) // config.merge_unit
    if not cold:
        return {"cold_ms": None, "warm_ms": None, "batches": 0, "images": 0, "tokens": 0}
    return {
        "cold_ms": statistics.median(cold),
        "warm_ms": statistics.median(warm),
        "batches": len(cold),
        "images": options.cold_images,
        "tokens": tokens / len(cold),
    }
