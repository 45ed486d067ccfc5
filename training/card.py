"""Writes the model card of the scenes model; its numbers come from the records, and nowhere else.

python -m training.card
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.clips import MAX_THINGS as MAX_IN_CLIP
from training.conversations import PICTURE_FAMILIES
from training.kinds import NUMBERS
from training.motion import CLIP_FAMILIES
from training.scenes import BACKGROUNDS, COLOURS, MAX_SIDE, MAX_THINGS, MIN_SIDE, SHAPES
from training.scenes_model import VOCAB_SIZE

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "models" / "scenes-8m"
RESULTS = ROOT / "training" / "results"

_EXAMPLES = {
    "count all": "How many shapes are there?",
    "count some": "How many small red circles are there?",
    "exists": "Is there a blue star?",
    "colour": "What colour is the large square?",
    "shape": "What shape is the red thing?",
    "size": "Is the cross large or small?",
    "yes or no": "Is the circle red?",
    "relation": "Is the circle left of the square?",
    "which side": "Where is the circle relative to the square?",
    "further": "Which is higher, the circle or the square?",
    "extreme": "Which shape is furthest left?",
    "beside": "What is below the circle?",
    "half": "Is the circle in the left or the right half?",
    "where": "Where is the circle?",
    "compare sizes": "Which is larger, the circle or the square?",
    "compare counts": "Are there more circles than squares?",
    "colours": "Which colours do you see?",
    "background": "What colour is the background?",
    "describe": "Describe the picture.",
    "which has more": "Which picture has more circles?",
    "which has one": "Which picture has a star?",
    "same number": "Do both pictures have the same number of circles?",
    "count together": "How many circles are there in both pictures together?",
    "count each": "How many circles are there in each picture?",
    "same picture": "Are the two pictures the same?",
    "describe both": "Describe the two pictures.",
    "no picture": "Hello! · What is in the picture? (without one)",
    "direction": "Which way does the circle move?",
    "moves that way": "Does the circle move to the left?",
    "what moves": "What moves?",
    "what moves there": "What moves up?",
    "what appears": "What appears?",
    "what disappears": "What disappears?",
    "how often": "How many times does the star appear?",
    "which first": "Which appears first, the star or the cross?",
    "is it there": "Is the star there at the end?",
    "what happens": "What happens in the video?",
}

_CARD = """\
---
license: apache-2.0
language: en
pipeline_tag: image-text-to-text
library_name: transformers
---

# scenes-8m

A vision-language model of {parameters} parameters ({megabytes} MB in bf16) with Qwen3-VL's architecture that answers
questions about drawn scenes: up to {most} shapes on a plain background, in one picture or two, or in a video of two to
four seconds. It is small enough to live in this repository and to run on a laptop's CPU, and it really looks: tests use
it to prove that a picture, and the order of a video's frames, reach the answer.

## What it can do

- Shapes: {shapes}. Colours: {colours}. Sizes: small (up to a fifth of the picture's shorter side) and large (from
  three tenths). Backgrounds: {backgrounds}, or any of the colours.
- Pictures of {low} to {high} pixels a side; larger ones are made smaller before it sees them.
- Counts up to {most_word}, positions, comparisons, descriptions, one picture or two, several turns. English, in many
  wordings. Asked about a thing that is not there it says so ("There is no red circle."); without a picture it says
  "I see no picture."
- Videos of up to {most_in_clip} shapes: what moves which way, what appears, disappears, how often and in which order.

| questions | for example | {gpu_title} | {cpu_title} |
|---|---|---|---|
{table}
{totals}
| **all** | {gpu_count} and {cpu_count} questions | **{gpu_all}** | **{cpu_all}** |

Right means word for word what was expected; in a description the things may come in any order. The scenes are held
out: their seeds are never trained on. By the picture's shorter side in pixels (on the GPU): {sides}.

    {gpu_command}
    {cpu_command}

The first ran on {gpu_device} with torch {gpu_torch} and transformers {gpu_transformers}, the second on a CPU with
torch {cpu_torch} and transformers {cpu_transformers}; the records are in `training/results/`. Weights: sha256
`{sha256}`.

Served, the same {served_count} questions over HTTP on a CPU: the whole application (`serve run serve_config.yaml`)
answers {served_ours} of them right, vLLM alone with its own vision tower {served_alone}; {served_different}.
<!-- run: 2 CPU cores, training/results/accuracy_served_cpu.json -->

    {served_command}
{ways}
## What it cannot do

- Anything but such scenes: photographs, text, drawings of things. It then still answers, and wrongly; a picture of
  noise gives babble.
- More than {most_word} shapes (of six it said {most_word}), shapes that overlap (it missed the one behind), outlines
  without filling, shapes that are turned by more than 15 degrees or stand on their heads, shapes and colours that it
  has no word for (it called an oval a rectangle, and magenta pink), sizes between small and large.
- Three pictures or more, other videos, tools, other languages, reasoning, knowledge. Other subjects are mostly refused:
  "I only answer questions about pictures of simple shapes."
- It is weakest where most is asked at once: {weakest}; and in small pictures, where a shape covers few pixels.

## How it was trained

    {train_command}

{conversations} conversations about scenes that were drawn on the fly, {steps} steps in {minutes} minutes on {device},
from random weights, with Muon for the matrices and AdamW for the rest. Then, from these weights,

    {clips_command}

{clips_conversations} conversations about pictures and clips, {clips_steps} steps in {clips_minutes} minutes on
{clips_device}.
No data but the generator's (`training/scenes.py`, `training/clips.py`, `training/conversations.py`). The seed fixes the
data and the first weights; the order of a GPU's sums does not repeat, so another run gives other weights of the same
quality. The byte-level tokenizer of {vocabulary} entries is learned from generated conversations, the chat template is
Qwen's format.
"""


def card(model: Path = MODEL, results: Path = RESULTS) -> str:
    """The text of README.md for the checkpoint in `model`."""
    gpu, cpu, training, clips = (
        json.loads((results / f"{name}.json").read_text())
        for name in ("accuracy_gpu", "accuracy_cpu", "train_h200", "train_clips_h100")
    )
    served = json.loads((results / "accuracy_served_cpu.json").read_text())
    ours, alone = served["servers"].values()
    weakest = sorted(gpu["families"], key=lambda name: gpu["families"][name])[:3]
    last, last_of_clips = training["log"][-1], clips["log"][-1]
    return _CARD.format(
        parameters=f"{training['parameters'] / 1e6:.2f} million",
        megabytes=f"{(model / 'model.safetensors').stat().st_size / 1e6:.1f}",
        most=MAX_THINGS,
        most_word=NUMBERS[MAX_THINGS],
        shapes=", ".join(SHAPES),
        colours=", ".join(COLOURS),
        backgrounds=", ".join(BACKGROUNDS),
        low=MIN_SIDE,
        high=MAX_SIDE,
        most_in_clip=NUMBERS[MAX_IN_CLIP],
        gpu_title="GPU, bf16",
        cpu_title="CPU, bf16",
        table="\n".join(
            f"| {name} | {_EXAMPLES[name]} | {_percent(gpu['families'][name])} | {_percent(cpu['families'][name])} |"
            for name in gpu["families"]
        ),
        totals="\n".join(
            f"| **{name}** | {len(of)} families | {_percent(_mean(gpu, of))} | {_percent(_mean(cpu, of))} |"
            for name, of in (("pictures", PICTURE_FAMILIES), ("videos", tuple(CLIP_FAMILIES)))
        ),
        gpu_all=_percent(gpu["accuracy"]),
        cpu_all=_percent(cpu["accuracy"]),
        sides=", ".join(f"{side} {_percent(part)} of {count}" for side, (part, count) in _by_size(gpu)),
        sha256=gpu["weights_sha256"],
        weakest=", ".join(f"“{_EXAMPLES[name]}” ({_percent(gpu['families'][name])})" for name in weakest),
        train_command=train_command(training["arguments"]),
        conversations=f"{last['conversations']:,}",
        steps=f"{last['step']:,}",
        minutes=f"{last['seconds'] / 60:.1f}",
        device=f"one {training['device']}",
        clips_command=train_command(clips["arguments"]),
        clips_conversations=f"{last_of_clips['conversations']:,}",
        clips_steps=f"{last_of_clips['step']:,}",
        clips_minutes=f"{last_of_clips['seconds'] / 60:.1f}",
        clips_device=f"one {clips['device']}",
        vocabulary=VOCAB_SIZE,
        **{f"gpu_{key}": gpu[key] for key in ("command", "device", "torch", "transformers")},
        **{f"cpu_{key}": cpu[key] for key in ("command", "torch", "transformers")},
        served_count=served["questions"],
        served_ours=_percent(ours["accuracy"]),
        served_alone=_percent(alone["accuracy"]),
        served_different=_different(len(served["differences"])),
        served_command=served["command"],
        ways=_ways(results),
        gpu_count=gpu["questions"],
        cpu_count=cpu["questions"],
    )


def _different(count: int) -> str:
    return f"{count} they answer differently" if count else "no answer differs, to the letter"


def _ways(results: Path) -> str:
    """What benchmarks/bench_accuracy.py found, wherever it was run: the same questions through each way of encoding."""
    told = []
    for name in ("accuracy_ways_cpu", "accuracy_ways_h200"):
        if not (results / f"{name}.json").is_file():
            continue
        found = json.loads((results / f"{name}.json").read_text())
        device = found["gpu"]["name"] if found["gpu"] else "a CPU"
        rows = "\n".join(
            f"| {label} | {_percent(row['accuracy'])} | "
            + (f"{row['same_words']} of {row['questions']} |" if "same_words" in row else "|")
            for label, row in found["rows"].items()
        )
        told.append(
            f"\nOne vLLM with the embeddings of each way of encoding, and with its own tower, on {device}\n"
            f"(`python {' '.join(found['command'])}`):\n\n"
            f"| encoded by | right | the same answer as by vLLM's own tower, to the letter |\n|---|---|---|\n{rows}\n"
        )
    return "".join(told)


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def _mean(result: dict[str, Any], families: Sequence[str]) -> float:
    """Of all questions of the families, of which each has as many."""
    rights: list[float] = [result["families"][name] for name in families]
    return sum(rights) / len(rights)


def _by_size(result: dict[str, Any]) -> list[tuple[str, tuple[float, int]]]:
    return sorted(result["shorter_side"].items(), key=lambda item: int(item[0].rsplit(" ", 1)[-1]))


def train_command(arguments: dict[str, Any]) -> str:
    said = f"--start {arguments['start']} " if arguments["start"] else ""
    said += f"--seed {arguments['seed']} " if arguments["seed"] else ""
    said += f"--steps {arguments['steps']} --lr {arguments['lr']} --out {arguments['out']}"
    return f"python -m training.train {'--graph ' if arguments['graph'] else ''}{said} --record {arguments['record']}"


if __name__ == "__main__":
    (MODEL / "README.md").write_text(card())
