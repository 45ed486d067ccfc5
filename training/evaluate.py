"""Asks a checkpoint held-out questions through transformers and counts the right answers, family by family.

    python -m training.evaluate --model models/scenes-8m --questions 200 --record training/results/h200.json

An answer is right when it is the expected one word for word; in a description the things may come in any order.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from training.conversations import TEST_FAMILIES, Conversation, messages, single_question
from training.scenes import HELD_OUT, draw

Untyped = Any  # what comes from transformers

# Of a question's smallest picture: upper bounds of its shorter side, in pixels.
_SIDES = (96, 160, 256, 384, 512)


def is_right(answer: str, expected: str) -> bool:
    """Word for word; the parts of a list in any order."""
    return _parts(answer) == _parts(expected)


def _parts(text: str) -> list[list[str]]:
    sentences = re.sub(" (on an?|shows) ", r", \1, ", text.strip().lower()).split(".")
    return [sorted(one.strip().replace(" and ", ", ").split(", ")) for one in sentences if one.strip()]


def answers(model: Untyped, processor: Untyped, conversations: Sequence[Conversation], batch_size: int) -> list[str]:
    """The model's greedy answers to the last turn of each conversation."""
    processor.tokenizer.padding_side = "left"
    given: list[str] = []
    for start in range(0, len(conversations), batch_size):
        chunk = conversations[start : start + batch_size]
        texts = [
            processor.apply_chat_template(messages(one), add_generation_prompt=True, tokenize=False) for one in chunk
        ]
        pictures = [draw(scene) for one in chunk for turn in one.turns for scene in turn.scenes]
        inputs = processor(text=texts, images=pictures or None, padding=True, return_tensors="pt").to(model.device)
        with torch.inference_mode():
            tokens = model.generate(**inputs, max_new_tokens=96, do_sample=False)
        given += processor.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return given


def evaluate(model: Untyped, processor: Untyped, questions: int, first_seed: int, batch_size: int) -> dict[str, Any]:
    """Accuracy by family and by picture size, and some of the wrong answers."""
    asked = [single_question(first_seed + index, family) for family in TEST_FAMILIES for index in range(questions)]
    asked.sort(key=_length)
    given = answers(model, processor, asked, batch_size)
    families: dict[str, list[bool]] = defaultdict(list)
    sides: dict[str, list[bool]] = defaultdict(list)
    wrong = []
    for one, answer in zip(asked, given, strict=True):
        turn = one.turns[-1]
        right = is_right(answer, turn.answer)
        families[turn.family].append(right)
        if turn.scenes:
            side = min(min(scene.width, scene.height) for scene in turn.scenes)
            sides[f"up to {next(bound for bound in _SIDES if side <= bound)}"].append(right)
        if not right:
            wrong.append({"family": turn.family, "question": turn.question, "answer": answer, "right": turn.answer})
    every = [right for rights in families.values() for right in rights]
    return {
        "questions": len(every),
        "accuracy": round(sum(every) / len(every), 4),
        "families": {name: round(sum(families[name]) / len(families[name]), 4) for name in TEST_FAMILIES},
        "shorter_side": {name: [round(sum(s) / len(s), 4), len(s)] for name, s in sorted(sides.items())},
        "wrong": wrong[:: max(1, len(wrong) // 40)],
    }


def _length(one: Conversation) -> tuple[bool, int]:
    """What belongs in one batch, which is padded to its longest question and runs until its longest answer ends."""
    turn = one.turns[-1]
    return turn.family.startswith("describe"), sum(scene.width * scene.height for scene in turn.scenes)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description="Measure the scenes model.")
    parser.add_argument("--model", required=True, help="folder of the checkpoint")
    parser.add_argument("--questions", type=int, default=100, help="for each family")
    parser.add_argument("--seed", type=int, default=0, help="counted from the first held-out seed")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--record", type=Path, help="file for the result, as JSON")
    arguments = parser.parse_args()

    import transformers
    from transformers import AutoModelForImageTextToText, AutoProcessor

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForImageTextToText.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype))
    processor = AutoProcessor.from_pretrained(arguments.model)
    started = time.perf_counter()
    found = evaluate(
        model.to(device).eval(), processor, arguments.questions, HELD_OUT + arguments.seed, arguments.batch
    )
    result = {
        "command": f"python -m training.evaluate --model {arguments.model} --questions {arguments.questions} "
        f"--seed {arguments.seed} --dtype {arguments.dtype}",
        "weights_sha256": hashlib.sha256((Path(arguments.model) / "model.safetensors").read_bytes()).hexdigest(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seconds": round(time.perf_counter() - started, 1),
        **found,
    }
    if arguments.record:
        arguments.record.parent.mkdir(parents=True, exist_ok=True)
        arguments.record.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "wrong"}))


if __name__ == "__main__":
    main()
