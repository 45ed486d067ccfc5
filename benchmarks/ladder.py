"""One tower's ladder: every rung and peer on the same weights and inputs, interleaved; times, errors, memory.

Returns plain dictionaries for the record. It must not print, and not know how they are shown.
"""

from __future__ import annotations

import gc
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
from torch import Tensor

from benchmarks import peer_transformers as hf
from benchmarks.measure import Deadline, held_bytes, interleaved, reserved_bytes, timed
from benchmarks.rungs import LABELS, Rung, RungUnavailableError, make_rung
from benchmarks.towers import NAMES, Shape, config_of, random_patches, random_tower, shapes_of, unseen_grids
from encoder.geometry import Grid
from encoder.planning import PAIRS_PER_UNIT
from encoder.vision_config import VisionConfig
from encoder.weights import VisionTower

logger = logging.getLogger(__name__)

INPUT_SETS = 3
"""Inputs in turn, so that a run never meets the values of the run before."""
WARM_UPS = 3
PEER = "transformers"

Run = Callable[[Tensor, Sequence[Grid]], list[Tensor]]


@dataclass(frozen=True)
class Asked:
    """What the command line asks for."""

    rungs: tuple[str, ...]
    peers: tuple[str, ...]
    rounds: int
    seed: int
    tiny: bool
    dtype: torch.dtype
    device: torch.device
    cold_batches: int
    cold_images: int


@dataclass
class Way:
    """A rung or a peer in the making."""

    name: str
    label: str
    run: Run
    row: dict[str, object] = field(default_factory=dict)
    facts: Callable[[], dict[str, object]] | None = None


def measure(arch: str, asked: Asked, peak_tflops: float | None, deadline: Deadline) -> dict[str, object]:
    """The record of one tower."""
    config = config_of(arch, tiny=asked.tiny, dtype=str(asked.dtype).removeprefix("torch."))
    tower = random_tower(config, seed=asked.seed, dtype=asked.dtype, device=asked.device)
    shapes = shapes_of(config, tiny=asked.tiny)
    inputs = {shape.name: _inputs(config, shape.grids, asked, INPUT_SETS) for shape in shapes}
    reference = _reference(arch, tower, shapes, inputs, asked)
    ways, skipped = _ways(arch, tower, shapes, inputs, asked, deadline)
    cells: dict[str, dict[str, dict[str, object]]] = {way.name: {} for way in ways}
    for shape in shapes:
        if ways:
            _one_shape(shape, ways, inputs[shape.name], reference.get(shape.name), asked, deadline, cells)
    _derive(cells, shapes, peak_tflops, [way.name for way in ways])
    known = [grid for shape in shapes for grid in shape.grids]
    pool = unseen_grids(config, known, tiny=asked.tiny, seed=asked.seed)
    for way in ways:
        way.row["cells"] = cells[way.name]
        if deadline.over:
            skipped.append({"name": f"{way.name}, cold grids", "reason": "no time was left"})
        else:
            way.row["grids"] = _cold_and_warm(way.run, pool, config, asked)
        if way.facts is not None:
            way.row["facts"] = way.facts()
    return {
        "model": f"{NAMES[arch]}'s vision tower, random weights" + (" (tiny)" if asked.tiny else ""),
        "dtype": str(asked.dtype).removeprefix("torch."),
        "shapes": [
            {"name": s.name, "images": len(s.grids), "patches": s.tokens * config.merge_unit, "tokens": s.tokens,
             "work": sum(t * (h * w) ** 2 for t, h, w in s.grids) / PAIRS_PER_UNIT, "tflop": s.tflop} for s in shapes
        ],
        "rows": [{"name": way.name, "label": way.label, **way.row} for way in ways],
        "skipped": skipped,
    }  # fmt: skip


def _inputs(config: VisionConfig, grids: Sequence[Grid], asked: Asked, sets: int) -> list[Tensor]:
    rows = sum(t * h * w for t, h, w in grids)
    return [random_patches(config, rows, seed=asked.seed + 1 + n, device=asked.device) for n in range(sets)]


def _reference(
    arch: str, tower: VisionTower, shapes: Sequence[Shape], inputs: dict[str, list[Tensor]], asked: Asked
) -> dict[str, list[Tensor]]:
    """transformers in float32 on each shape's first input; empty where transformers is not installed."""
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    unit = tower.config.merge_unit
    try:
        theirs = hf.make_tower(arch, tower, tiny=asked.tiny, dtype=torch.float32)
        return {shape.name: hf.reference(theirs, inputs[shape.name][0], shape.grids, unit) for shape in shapes}
    except ImportError as error:
        logger.warning("no errors without transformers: %s", error)
        return {}
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32


def _ways(
    arch: str,
    tower: VisionTower,
    shapes: Sequence[Shape],
    inputs: dict[str, list[Tensor]],
    asked: Asked,
    deadline: Deadline,
) -> tuple[list[Way], list[dict[str, str]]]:
    """Builds each way, runs every shape once and notes what memory it took; says what could not be had."""
    ways: list[Way] = []
    skipped: list[dict[str, str]] = []
    weights = sum(parameter.nbytes for parameter in tower.parameters())
    wanted = [*asked.rungs, *(peer for peer in asked.peers if peer == PEER)]
    for name in wanted:
        if deadline.over:
            skipped.append({"name": name, "reason": "no time was left"})
            continue
        gc.collect()
        before = reserved_bytes(asked.device)
        began = time.perf_counter()
        try:
            if name == PEER:
                theirs = hf.make_tower(arch, tower, tiny=asked.tiny, dtype=asked.dtype)
                way = Way(
                    name, "transformers, eager", partial(hf.run_tower, theirs, merge_unit=tower.config.merge_unit)
                )
                own = sum(parameter.nbytes for parameter in theirs.parameters())
            else:
                rung: Rung = make_rung(name, tower)
                way, own = Way(name, LABELS[name], rung.run, facts=rung.facts), 0
                way.row["start_s"] = rung.build_s
            for shape in shapes:
                way.run(inputs[shape.name][0], shape.grids)
        except (RungUnavailableError, ImportError) as error:
            skipped.append({"name": name, "reason": str(error)})
            continue
        except Exception as error:  # one rung that fails must not cost the others their figures
            logger.exception("%s: %s failed", arch, name)
            skipped.append({"name": name, "reason": f"failed: {error!r}"[:500]})
            continue
        way.row["build_s"] = time.perf_counter() - began
        if asked.device.type == "cuda":
            way.row["peak_memory_bytes"] = weights - own + held_bytes(asked.device) - before
            way.row["weights_bytes"] = weights
        ways.append(way)
        logger.info("%s: %s is ready after %.1f s", arch, name, way.row["build_s"])
    return ways, skipped


def _one_shape(
    shape: Shape,
    ways: Sequence[Way],
    inputs: Sequence[Tensor],
    expected: list[Tensor] | None,
    asked: Asked,
    deadline: Deadline,
    cells: dict[str, dict[str, dict[str, object]]],
) -> None:
    times = interleaved(
        {way.name: lambda n, run=way.run: run(inputs[n % len(inputs)], shape.grids) for way in ways},  # type: ignore[misc]
        rounds=asked.rounds,
        warm_ups=WARM_UPS,
        device=asked.device,
        deadline=deadline,
    )
    for way in ways:
        cell: dict[str, object] = asdict(times[way.name])
        if expected is not None:
            # Clones: an output may be memory that the next run of another way overwrites.
            found = [tokens.float() for tokens in way.run(inputs[0], shape.grids)]
            cell["errors"] = [relative_error(ours, theirs) for ours, theirs in zip(found, expected, strict=True)]
        cells[way.name][shape.name] = cell


def relative_error(found: Tensor, expected: Tensor) -> float:
    """‖found - expected‖ / ‖expected‖ of one image; NaN where a value is."""
    return float((found - expected).norm() / expected.norm())


def _derive(
    cells: dict[str, dict[str, dict[str, object]]], shapes: Sequence[Shape], peak: float | None, names: Sequence[str]
) -> None:
    """Adds to each cell its ratio to the first row, TFLOP/s, share of the peak, and errors over transformers'."""
    for shape in shapes:
        for name in names:
            cell = cells[name][shape.name]
            ms, first = cell["ms"], cells[names[0]][shape.name]["ms"]
            assert isinstance(ms, float)
            assert isinstance(first, float)
            cell["speedup"] = first / ms
            cell["tflops"] = 1e3 * shape.tflop / ms
            cell["peak_share"] = None if peak is None else 1e3 * shape.tflop / ms / peak
            ours, theirs = cell.get("errors"), cells.get(PEER, {}).get(shape.name, {}).get("errors")
            if isinstance(ours, list):
                cell["error"] = max(ours)
                if isinstance(theirs, list):
                    cell["error_over_transformers"] = max(a / b for a, b in zip(ours, theirs, strict=True))


def _cold_and_warm(run: Run, pool: list[Grid], config: VisionConfig, asked: Asked) -> dict[str, object]:
    """Batches of images of sizes that this process has not met, then the same again. Takes its grids out of `pool`."""
    cold: list[float] = []
    warm: list[float] = []
    tokens = 0
    for _ in range(asked.cold_batches):
        grids = [pool.pop() for _ in range(min(asked.cold_images, len(pool)))]
        if not grids:
            break
        patches = _inputs(config, grids, asked, 1)[0]
        cold.append(timed(lambda p=patches, g=grids: run(p, g), asked.device))  # type: ignore[misc]
        again = [timed(lambda p=patches, g=grids: run(p, g), asked.device) for _ in range(3)]  # type: ignore[misc]
        warm.append(statistics.median(again))
        tokens += sum(t * h * w for t, h, w in grids) // config.merge_unit
    if not cold:
        return {"cold_ms": None, "warm_ms": None, "batches": 0, "images": 0, "tokens": 0}
    return {
        "cold_ms": statistics.median(cold),
        "warm_ms": statistics.median(warm),
        "batches": len(cold),
        "images": asked.cold_images,
        "tokens": tokens / len(cold),
    }
