"""vLLM's towers as a peer, in a process of their own, on the same inputs: launched, and as vLLM's encoder graphs.

vLLM's weights are random ones of its own making, so there are no errors to compare. `add` puts rows into a tower's
record; run as a program, this is the process, which writes what it has after each shape. Written for vLLM 0.26, whose
names are not public; where they have moved, the rows are left out with the reason.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.record import ROOT, save
from benchmarks.towers import SECTIONS, config_of, random_patches, shapes_of

if TYPE_CHECKING:
    from benchmarks.ladder import Asked
    from benchmarks.measure import Deadline

MODES = {
    # vLLM 0.26 compiles the tower of Qwen2.5-VL alone: `compile_mm_encoder` changes nothing for the other.
    "qwen3_vl": ("launched",),
    "qwen2_5_vl": ("compiled", "launched"),
}
BUDGETS = [64 * 2**power for power in range(8)]
MAX_IMAGES = 16
_ERROR = re.compile(r"[\w.]*(Error|Exception): ")
_TEXT = {
    "qwen3_vl": {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    "qwen2_5_vl": {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4},
}
_SECTIONS = {"qwen3_vl": [24, 20, 20], "qwen2_5_vl": [16, 24, 24]}


def add(record: dict[str, Any], arch: str, asked: Asked, deadline: Deadline) -> None:
    """Appends vLLM's rows to a tower's record, or the reason why there are none."""
    if importlib.util.find_spec("vllm") is None or asked.device.type != "cuda" or asked.tiny:
        record["skipped"].append({"name": "vllm", "reason": "needs vLLM for CUDA, and the published shapes"})
        return
    for mode in MODES[arch]:
        if deadline.over:
            record["skipped"].append({"name": f"vllm, {mode}", "reason": "no time was left"})
            continue
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "found.json"
            command = [sys.executable, __file__, arch, mode, str(asked.rounds), str(asked.seed), str(out)]
            reason = _run(command, max(30.0, deadline.left))
            found = json.loads(out.read_text()) if out.exists() else {}
        record["rows"] += rows(found, mode, record)
        if reason is not None:
            record["skipped"].append({"name": f"vllm, {mode}", "reason": reason})


def _run(command: list[str], limit_s: float) -> str | None:
    """Why the process did not end well; None where it did."""
    with tempfile.TemporaryFile("w+") as log:
        try:
            status = subprocess.run(
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=limit_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return f"cut short after {limit_s:.0f} s"
        log.seek(0)
        output = log.read()
    if status == 0:
        return None
    print(output[-20_000:], file=sys.stderr, flush=True)
    told = [line for line in output.splitlines() if _ERROR.match(line)]
    return (told or output.strip().splitlines() or ["no message"])[-1][:500]


def rows(found: dict[str, dict[str, Any]], mode: str, record: dict[str, Any]) -> list[dict[str, Any]]:
    """The process's times as rows of the record, with what the other rows' cells have; of the shapes that it got to."""
    made = []
    first = record["rows"][0]["cells"] if record["rows"] else {}
    peaks = [cell["tflops"] / cell["peak_share"] for cell in first.values() if cell.get("peak_share")]
    for way, cells in found.items():
        for shape in record["shapes"]:
            if shape["name"] not in cells:
                continue
            cell = cells[shape["name"]]
            cell["speedup"] = first[shape["name"]]["ms"] / cell["ms"] if first else 1.0
            cell["tflops"] = 1e3 * shape["tflop"] / cell["ms"]
            cell["peak_share"] = cell["tflops"] / peaks[0] if peaks else None
        prefix = "vLLM, compiled" if mode == "compiled" else "vLLM"
        if cells:
            made.append({"name": f"vllm {mode} {way}", "label": f"{prefix}, {way}", "cells": cells})
    return made


def main(arch: str, mode: str, rounds: int, seed: int, out: Path) -> None:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # else the model lies in a process of its own
        VLLM_USE_V2_MODEL_RUNNER="0",  # the newer one has no encoder graphs
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        FLASHINFER_DISABLE_VERSION_CHECK="1",
    )
    import torch
    from vllm import LLM
    from vllm.forward_context import set_forward_context

    from benchmarks.measure import Deadline, interleaved

    device = torch.device("cuda")
    with tempfile.TemporaryDirectory() as folder:
        engine = LLM(
            model=str(published_files(arch, Path(folder) / arch)),
            load_format="dummy",
            max_model_len=16384,
            max_num_batched_tokens=16384,
            gpu_memory_utilization=0.5,
            limit_mm_per_prompt={"image": MAX_IMAGES, "video": 0},
            max_num_seqs=MAX_IMAGES,
            compilation_config={
                "cudagraph_mm_encoder": True,
                "compile_mm_encoder": mode == "compiled",
                "encoder_cudagraph_token_budgets": BUDGETS,
                "encoder_cudagraph_max_vision_items_per_batch": MAX_IMAGES,
                "cudagraph_capture_sizes": [1, 2, 4],
            },
        )
        runner = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        config = config_of(arch, tiny=False, dtype="bfloat16")
        found: dict[str, dict[str, object]] = {"eager": {}, "graphs": {}}
        with torch.inference_mode(), set_forward_context(None, runner.vllm_config):
            for shape in shapes_of(config, tiny=False):
                grid_thw = torch.tensor(shape.grids)
                patches = shape.tokens * config.merge_unit
                inputs = [random_patches(config, patches, seed=seed + 1 + n, device=device) for n in range(3)]

                def fields(number: int, inputs: list[Any] = inputs, grids: Any = grid_thw) -> dict[str, Any]:  # noqa: ANN401
                    return {"pixel_values": inputs[number % len(inputs)], "image_grid_thw": grids}

                times = interleaved(
                    {
                        "eager": lambda n, fields=fields: runner.model.embed_multimodal(**fields(n)),  # type: ignore[misc]
                        "graphs": lambda n, fields=fields: runner.encoder_cudagraph_manager.execute(fields(n)),  # type: ignore[misc]
                    },
                    rounds=rounds,
                    warm_ups=3,
                    device=device,
                    deadline=Deadline(600),
                )
                for way, measured in times.items():
                    found[way][shape.name] = asdict(measured)
                save(found, out)


def published_files(arch: str, folder: Path, *, text: Mapping[str, int] = MappingProxyType({})) -> Path:
    """A small checkpoint's files with the published tower and a language model of its width; no weights are read.

    `text`: of the language model's configuration, what is to be as in `text` and not small.
    """
    from training.checkpoints import make_checkpoint

    make_checkpoint(arch, folder, dtype="bfloat16")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["vision_config"] = config["vision_config"] | dict(SECTIONS[arch])
    language = config.get("text_config", config)
    language |= {"intermediate_size": 4096, "num_hidden_layers": 4, **_TEXT[arch], **text}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(language.get(key), dict):
            language[key]["mrope_section"] = _SECTIONS[arch]
    path.write_text(json.dumps(config))
    return folder


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
