"""Accuracy on held-out questions about scenes: each rung and attention backend of our encoder, and vLLM's own tower.

`python benchmarks/bench_accuracy.py --out accuracy.json`. First each configuration encodes the pictures; then one vLLM
answers all questions with its own tower, and again with each configuration's embeddings, in the same order and without
caches between passes. Unavailable configurations are skipped with the reason. Needs vLLM but not Ray; takes five
minutes on a GPU. The record contains every question whose answer differs from that with vLLM's own tower. The last line
on stdout is JSON.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.ladder.measure import Deadline
from benchmarks.ladder.rungs import RUNGS, RungUnavailableError
from benchmarks.record import ROOT, gpu, provenance, save, write
from benchmarks.serving.accuracy_ways import BACKENDS, Configuration, Encoded, distance, encode, list_configurations
from deployments.vllm import import_shim
from encoder.towers.backends import BackendUnavailableError
from training.conversations import PICTURE_FAMILIES, Conversation, messages
from training.held_out import MAX_ANSWER_TOKENS, differences, is_right, pictures, questions, score

ALONE = "vLLM's own tower"
ENCODING_SHARE = 0.5
"""Maximum share of the time for encoding; configurations not encoded by then are skipped."""
SHOWN_DIFFERENCES = 20
MAX_MODEL_LEN = 2048
Say = Callable[[Sequence[Encoded] | None], list[str]]
"""Returns the answers to all questions, given their pictures' embeddings in order, or for None the pictures."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Answers through every rung and backend, beside vLLM's own tower.")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "scenes-8m", help="folder of the checkpoint")
    parser.add_argument("--questions", type=int, default=12, help="questions per family")
    parser.add_argument("--seed", type=int, default=1000, help="offset from the first held-out seed")
    parser.add_argument("--rungs", type=_some_of(RUNGS), default=RUNGS, help=f"some of {','.join(RUNGS)}")
    parser.add_argument("--backends", type=_some_of(BACKENDS), default=BACKENDS, help=f"some of {','.join(BACKENDS)}")
    parser.add_argument("--minutes", type=float, default=5.5, help="time limit of the whole run")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--commit", help="commit of the sources, if they are not a git checkout")
    asked = parser.parse_args(arguments)
    if asked.questions < 1:
        parser.error(f"--questions is {asked.questions}; it must be at least 1")
    return asked


def _some_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        names = tuple(name for name in text.split(",") if name)
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return names

    return read


def build_prompts(
    asked: Sequence[Conversation], texts: Sequence[str], embeddings: Sequence[Encoded] | None
) -> list[dict[str, Any]]:
    """Returns vLLM's prompts: each text with its pictures, or with the next of `embeddings` for each picture."""
    made: list[dict[str, Any]] = []
    used = 0
    for one, text in zip(asked, texts, strict=True):
        shown = pictures(one)
        prompt: dict[str, Any] = {"prompt": text}
        if shown and embeddings is None:
            prompt["multi_modal_data"] = {"image": shown}
        elif shown and embeddings is not None:
            own = embeddings[used : used + len(shown)]
            used += len(shown)
            tensors = {
                "image_embeds": torch.cat([picture.tokens for picture in own]),
                "image_grid_thw": torch.tensor([picture.grid_thw for picture in own]),
            }
            prompt["multi_modal_data"] = {"image": tensors}
        made.append(prompt)
    return made


def start_vllm(model: Path, asked: Sequence[Conversation], *, on_gpu: bool) -> Say:
    """Starts vLLM in this process, so that its scheduling does not depend on the arrival of messages."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if not on_gpu:
        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        import_shim.activate()  # for an environment with torch's CPU build and media packages built for CUDA
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [tokenizer.apply_chat_template(messages(one), add_generation_prompt=True, tokenize=False) for one in asked]
    bound: dict[str, Any] = {"num_gpu_blocks_override": 128}
    if on_gpu:  # explicit limits, because vLLM's measurement of free memory is wrong while our encoder uses the GPU
        bound = {"kv_cache_memory_bytes": 2 * 1024**3, "gpu_memory_utilization": 0.5}
    engine = LLM(
        model=str(model), dtype="bfloat16", max_model_len=MAX_MODEL_LEN, max_num_seqs=32, enforce_eager=True,
        enable_mm_embeds=True, limit_mm_per_prompt={"image": 2, "video": 0}, skip_mm_profiling=True,
        # No cached result of one configuration may be used for another.
        enable_prefix_caching=False, mm_processor_cache_gb=0, disable_log_stats=True, **bound,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_ANSWER_TOKENS)

    def say(embeddings: Sequence[Encoded] | None) -> list[str]:
        done = engine.generate(build_prompts(asked, texts, embeddings), greedy, use_tqdm=False)
        return [str(one.outputs[0].text) for one in done]

    return say


def compare_answers(asked: Sequence[Conversation], given: Sequence[str], alone: Sequence[str] | None) -> dict[str, Any]:
    """Returns a row: correct answers, and how many equal those with vLLM's own tower, and which differ."""
    found = score(asked, given)
    row: dict[str, Any] = {key: found[key] for key in ("questions", "accuracy", "families")}
    if alone is not None:
        apart = differences(asked, {"ours": given, ALONE: alone})
        judged = [
            is_right(ours, one.turns[-1].answer) == is_right(theirs, one.turns[-1].answer)
            for one, ours, theirs in zip(asked, given, alone, strict=True)
        ]
        row |= {
            "same_words": len(asked) - len(apart),
            "same_judgement": sum(judged),
            "differences": apart[:SHOWN_DIFFERENCES],
        }
    return row


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a table with a line per configuration."""
    lines = [f"{'':44}{'right':>9}{'same words':>14}{'same judgement':>18}"]
    for name, row in rows.items():
        same = [f"{row[key]}/{row['questions']}" if key in row else "" for key in ("same_words", "same_judgement")]
        lines.append(f"{name:44}{100 * row['accuracy']:7.1f} %{same[0]:>14}{same[1]:>18}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    deadline = Deadline(60 * options.minutes)
    device = gpu()
    asked = questions(options.questions, options.seed, PICTURE_FAMILIES)
    shown = [picture for one in asked for picture in pictures(one)]
    skipped: list[dict[str, str]] = []
    report: dict[str, Any] = {
        "benchmark": "accuracy",
        "gpu": device,
        "model": options.model.name,
        "pictures": len(shown),
        "seed": options.seed,
        "rows": {},
        "skipped": skipped,
        **provenance(options.commit, arguments),
    }

    def left_out(name: str, reason: str) -> None:
        skipped.append({"name": name, "reason": reason[:500]})
        print(f"skipped: {name}: {reason[:200]}", flush=True)

    made: dict[Configuration, tuple[list[Encoded], dict[str, Any]]] = {}
    last_start = (1 - ENCODING_SHARE) * deadline.left
    for configuration in list_configurations(options.rungs, options.backends):
        if deadline.left < last_start:
            left_out(configuration.name, "no time was left to encode")
            continue
        began = time.perf_counter()
        try:
            made[configuration] = encode(options.model, configuration, shown)
        except (ValueError, BackendUnavailableError, RungUnavailableError) as error:
            left_out(configuration.name, str(error))
        except Exception as error:  # a configuration that fails must not stop the others
            left_out(configuration.name, f"failed: {error!r}")
        else:
            print(f"{configuration.name}: encoded after {time.perf_counter() - began:.1f} s", flush=True)
    first = next(iter(made.values()))[0] if made else []
    for embeddings, facts in made.values():
        facts["distance_to_first"] = distance(embeddings, first)
    # Saved here in case the language model fails to start.
    report["encoded"] = {configuration.label: facts for configuration, (_, facts) in made.items()}
    if options.out is not None:
        save(report, options.out)
    say = start_vllm(options.model, asked, on_gpu=device is not None)
    alone = say(None)
    report["rows"][ALONE] = compare_answers(asked, alone, None)
    for configuration, (embeddings, _) in made.items():
        if deadline.over:
            left_out(configuration.name, "no time was left to ask")
            continue
        began = time.perf_counter()
        given = say(embeddings)
        report["rows"][configuration.label] = compare_answers(asked, given, alone) | {
            "answers_s": time.perf_counter() - began
        }
        if options.out is not None:
            save(report, options.out)
    print(f"\n{table(report['rows'])}", flush=True)
    write(report, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
