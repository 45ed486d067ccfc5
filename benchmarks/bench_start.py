"""Start-up time of an encoder in fresh processes: `python benchmarks/bench_start.py`.

Each start is a separate process without Ray, on one checkpoint of a published tower's shape with random weights: lazy
capture on an empty state folder and again on the same folder, then capture of the default budgets at start-up, twice.
Python's bytecode is cached in the state folder, because not every host has it with its packages. The encoder is ready
when it has encoded a first blank image; the figure from the weights on excludes imports, creation of the device's
context and reading of the checkpoint. The last line on stdout is JSON. Needs torch, transformers' tokenizers and
safetensors, on a GPU triton; `--tiny` runs without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.ladder.text import GIB, columns
from benchmarks.record import ROOT, gpu, provenance, save, write

CHILD_LIMIT_S = 300.0
STARTS = (("on_demand", "empty"), ("on_demand", "warm"), ("startup", "warm"), ("startup", "warm again"))
"""`graph_capture`, and the content of the state folder before the start."""
IMAGE_SIDE = 448
MOST_IDLE_STEPS = 200
_SHOWN = ("weights", "forward", "graphs_and_tables", "warm_up", "ready_after_weights", "first_image_after_weights")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the options. Those of a child are not validated: that imports torch, and the child measures its import."""
    parser = argparse.ArgumentParser(description="Seconds until an encoder serves.")
    parser.add_argument("--arch", default="qwen3_vl", help="a published tower, such as qwen3_vl or qwen2_5_vl")
    parser.add_argument("--rungs", default="fusion", help="some of the ladder's rungs, such as fusion,cudagraph")
    parser.add_argument("--checkpoint", type=Path, help="folder of a checkpoint; default: a generated one")
    parser.add_argument("--tiny", action="store_true", help="a small tower, which runs without a GPU")
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="time limit; measurements that would begin later are skipped"
    )
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--commit", help="commit of the sources, if they are not a git checkout")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        return options
    from benchmarks.ladder.rungs import RUNGS
    from benchmarks.ladder.towers import SECTIONS

    if options.arch not in SECTIONS:
        parser.error(f"--arch: {options.arch!r} is not one of {', '.join(SECTIONS)}")
    if unknown := [rung for rung in options.rungs.split(",") if rung not in RUNGS]:
        parser.error(f"--rungs: {unknown[0]!r} is not one of {', '.join(RUNGS)}")
    return options


def start(checkpoint: Path, switches: dict[str, Any]) -> dict[str, Any]:
    """Loads an encoder in this process and encodes an image twice; returns seconds of each part, bytes of graphs."""
    began = time.perf_counter()
    import numpy as np
    import torch

    from configs.encoder_config import EncoderConfig
    from encoder import encoder as module
    from encoder.pixels.preprocess import Pixels

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.zeros(1, device=device)
    seconds: dict[str, float] = {"imports": time.perf_counter() - began}

    def lap(name: str, run: Callable[[], Any]) -> Any:  # noqa: ANN401 # the result of `run`
        at = time.perf_counter()
        found = run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - at
        return found

    # Times the parts of `from_checkpoint` separately.
    for name, title in (("load_tower", "weights"), ("choose_forward", "forward"), ("weights_identity", "identity")):
        part = getattr(module, name)
        setattr(module, name, lambda *a, part=part, title=title, **k: lap(title, lambda: part(*a, **k)))
    config = EncoderConfig(**switches)
    encoder = lap("from_checkpoint", lambda: module.Encoder.from_checkpoint(checkpoint, config))
    seconds["graphs_and_tables"] = seconds["from_checkpoint"] - sum(
        seconds[name] for name in ("weights", "forward", "identity")
    )
    lap("warm_up", encoder.warm_up)
    seconds["ready_after_weights"] = seconds["from_checkpoint"] - seconds["weights"] + seconds["warm_up"]
    rules, runner = encoder.identity.rules, encoder.runner
    patches = IMAGE_SIDE // rules.factor * rules.factor // rules.patch_size
    side = patches * rules.patch_size
    pixels = Pixels(np.full((3, side, side), 128, np.uint8), (1, patches, patches))
    for name in ("first_image", "second_image"):
        lap(name, lambda: list(encoder.encode_batches([pixels])))
    seconds["first_image_after_weights"] = seconds["ready_after_weights"] + seconds["first_image"]
    steps = 0
    while config.graph_capture != "startup" and steps < MOST_IDLE_STEPS and lap("last_idle_step", runner.idle_step):
        steps += 1
    table = runner.cost_table
    return {
        "seconds": seconds,
        "idle_steps": steps,
        "graph_bytes": runner.graph_bytes,
        "graphs": 0 if table is None else len(table.budgets),
        "forward": runner.forward.name,
        "attention": runner.forward.attention,
        "switches": {name: value for name, value in switches.items() if name != "cache_dir"},
        "device": device.type,
    }


def _child(checkpoint: Path, switches: dict[str, Any], state: Path, out: Path) -> dict[str, Any]:
    """Runs `start` in a fresh process with the environment of a replica with this state folder."""
    from encoder.graphs import compile_caches

    options = {"checkpoint": str(checkpoint), "switches": switches | {"cache_dir": str(state)}, "out": str(out)}
    began = time.perf_counter()
    out.unlink(missing_ok=True)
    with tempfile.TemporaryFile("w+") as log:
        try:
            status: int | str = subprocess.run(
                [sys.executable, __file__, "--child", json.dumps(options)],
                cwd=ROOT,
                env=_with_bytecode(state) | compile_caches.environment(str(state)),
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=CHILD_LIMIT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"cut short after {CHILD_LIMIT_S:.0f} s"
        log.seek(0)
        if status != 0 or not out.exists():
            last = (log.read().strip().splitlines() or ["no message"])[-1]
            return {"error": f"{status}: {last}"[:500]}
    found: dict[str, Any] = json.loads(out.read_text())
    return found | {"process_s": time.perf_counter() - began}


def _with_bytecode(state: Path) -> dict[str, str]:
    """Returns this environment with a bytecode cache for Python's own modules too, as installed packages have one."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPYCACHEPREFIX": str(state / "bytecode")}


def text(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a table with a line per start."""
    lines = []
    for row in rows:
        name = f"{row['rung']}, capture {row['capture']}, {row['state']} folder"
        if "error" in row:
            lines.append([f"{name}: {row['error']}", *[""] * (len(_SHOWN) + 2)])
        else:
            cells = [f"{row['seconds'][part]:.2f}" for part in _SHOWN]
            lines.append([name, *cells, str(row["graphs"]), f"{row['graph_bytes'] / GIB:.2f}"])
    return "\n".join(columns(["seconds", *(name.replace("_", " ") for name in _SHOWN), "budgets", "GiB"], lines))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.child is not None:
        save(start(Path(options.child["checkpoint"]), options.child["switches"]), Path(options.child["out"]))
        return 0
    from benchmarks.ladder.rungs import LABELS, switches_of
    from benchmarks.ladder.towers import NAMES
    from benchmarks.serving.checkpoint import make_published
    from training.checkpoints import make_checkpoint

    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = {
        "benchmark": "start",
        "gpu": gpu(),
        "tiny": options.tiny,
        "model": f"{NAMES[options.arch]}'s vision tower, random weights" + (" (tiny)" if options.tiny else ""),
        "rows": rows,
        **provenance(options.commit, arguments),
    }
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / options.arch
        if options.checkpoint is not None:
            made = options.checkpoint
        elif options.tiny:
            make_checkpoint(options.arch, made, dtype="bfloat16")
        else:
            make_published(options.arch, made)
        for rung in options.rungs.split(","):
            for capture, state in STARTS:
                if time.monotonic() - began > 60 * options.minutes:
                    rows.append({"rung": rung, "capture": capture, "state": state, "error": "no time was left"})
                    continue
                switches = {**switches_of(rung), "graph_capture": capture}
                found = _child(made, switches, Path(folder) / f"state-{rung}", Path(folder) / "found.json")
                rows.append({"rung": rung, "label": LABELS[rung], "capture": capture, "state": state, **found})
                print(f"{rung}, {capture}, {state} folder: {found.get('error', 'done')}", flush=True)
                if options.out is not None:
                    save(report, options.out)
    print(text(rows), flush=True)
    write(report, options.out)
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
