"""Seconds until an encoder serves, in fresh processes: `python benchmarks/bench_start.py`.

Each start is a process of its own on one checkpoint of a published tower's shape with random weights, as a replica's
is, without Ray: lazy capture on an empty state folder and on the same folder again, then the default budgets captured
at the start, twice. Python's bytecode is kept in the state folder, since not every host has it with its packages.
Ready is when a first blank image has been encoded; what is counted from the weights on leaves out imports, the device's
context and reading the checkpoint. The last line on stdout is JSON. Needs torch, transformers' tokenizers and
safetensors, on a GPU triton; `--tiny` runs anywhere.
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

from benchmarks.ladder_text import GIB, columns
from benchmarks.record import ROOT, gpu, provenance, save, write
from benchmarks.towers import NAMES, SECTIONS

CHILD_LIMIT_S = 300.0
STARTS = (("lazy", "empty"), ("lazy", "warm"), ("eager", "warm"), ("eager", "warm again"))
"""`capture`, and what the state folder holds by then."""
IMAGE_SIDE = 448
MOST_IDLE_STEPS = 200
_SHOWN = ("weights", "forward", "graphs_and_tables", "warm_up", "ready_after_weights", "first_image_after_weights")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Seconds until an encoder serves.")
    parser.add_argument("--arch", choices=tuple(SECTIONS), default="qwen3_vl")
    parser.add_argument("--rungs", default="fusion", help="some of the ladder's rungs, such as fusion,cudagraph")
    parser.add_argument("--checkpoint", type=Path, help="a folder; default: one is made")
    parser.add_argument("--tiny", action="store_true", help="a small tower, to try the program anywhere")
    parser.add_argument("--minutes", type=float, default=5.0, help="what does not begin within them is left out")
    parser.add_argument("--out", type=Path, help="write the JSON to this file too")
    parser.add_argument("--commit", help="of the sources, where git is not there to say it")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def start(checkpoint: Path, switches: dict[str, Any]) -> dict[str, Any]:
    """In this process: loads, builds, encodes an image twice. Seconds of each, and what the graphs took."""
    began = time.perf_counter()
    import numpy as np
    import torch

    from configs.encoder_config import EncoderConfig
    from encoder import encoder as module
    from encoder.preprocess import Pixels

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.zeros(1, device=device)
    seconds: dict[str, float] = {"imports": time.perf_counter() - began}

    def lap(name: str, run: Callable[[], Any]) -> Any:  # noqa: ANN401 # whatever `run` gives
        at = time.perf_counter()
        found = run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - at
        return found

    # The parts of `from_checkpoint`, each by its own clock.
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
    while config.capture != "eager" and steps < MOST_IDLE_STEPS and lap("last_idle_step", runner.idle_step):
        steps += 1
    runner.close()
    table = runner.cost_table
    return {
        "seconds": seconds,
        "idle_steps": steps,
        "graph_bytes": runner.graph_bytes,
        "graphs": 0 if table is None else len(table.budgets),
        "forward": runner.forward.name,
        "attention": runner.forward.attention,
        "switches": {name: value for name, value in switches.items() if name != "state_folder"},
        "device": device.type,
    }


def _child(checkpoint: Path, switches: dict[str, Any], state: Path, out: Path) -> dict[str, Any]:
    """`start` in a fresh process with the environment that a replica with this state folder gets."""
    from encoder import compile_caches

    asked = {"checkpoint": str(checkpoint), "switches": switches | {"state_folder": str(state)}, "out": str(out)}
    began = time.perf_counter()
    out.unlink(missing_ok=True)
    with tempfile.TemporaryFile("w+") as log:
        try:
            status: int | str = subprocess.run(
                [sys.executable, __file__, "--child", json.dumps(asked)],
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
    """This environment, with Python's own compiled modules kept too, as they are where packages were installed."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPYCACHEPREFIX": str(state / "bytecode")}


def text(rows: Sequence[dict[str, Any]]) -> str:
    """A line a start."""
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
    asked = parse(arguments)
    if asked.child is not None:
        save(start(Path(asked.child["checkpoint"]), asked.child["switches"]), Path(asked.child["out"]))
        return 0
    from benchmarks.rungs import LABELS, switches_of
    from benchmarks.serving_checkpoint import make_published
    from training.checkpoints import make_checkpoint

    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = {
        "benchmark": "start",
        "gpu": gpu(),
        "tiny": asked.tiny,
        "model": f"{NAMES[asked.arch]}'s vision tower, random weights" + (" (tiny)" if asked.tiny else ""),
        "rows": rows,
        **provenance(asked.commit, arguments),
    }
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / asked.arch
        if asked.checkpoint is not None:
            made = asked.checkpoint
        elif asked.tiny:
            make_checkpoint(asked.arch, made, dtype="bfloat16")
        else:
            make_published(asked.arch, made)
        for rung in asked.rungs.split(","):
            for capture, state in STARTS:
                if time.monotonic() - began > 60 * asked.minutes:
                    rows.append({"rung": rung, "capture": capture, "state": state, "error": "no time was left"})
                    continue
                switches = {**switches_of(rung), "capture": capture}
                found = _child(made, switches, Path(folder) / f"state-{rung}", Path(folder) / "found.json")
                rows.append({"rung": rung, "label": LABELS[rung], "capture": capture, "state": state, **found})
                print(f"{rung}, {capture}, {state} folder: {found.get('error', 'done')}", flush=True)
                if asked.out is not None:
                    save(report, asked.out)
    print(text(rows), flush=True)
    write(report, asked.out)
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
