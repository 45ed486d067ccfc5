"""Asks a checkpoint held-out questions through transformers and counts the right answers, family by family.

    python -m training.evaluate --model models/scenes-8m --questions 200 --record training/results/h200.json

An answer is right when it is the expected one word for word; in a description the things may come in any order.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from training.clips import Clip
from training.conversations import Conversation, messages
from training.held_out import MAX_ANSWER_TOKENS, pictures, questions, score

Untyped = Any  # what comes from transformers


def answers(model: Untyped, processor: Untyped, conversations: Sequence[Conversation], batch_size: int) -> list[str]:
    """The model's greedy answers to the last turn of each conversation."""
    processor.tokenizer.padding_side = "left"
    given: list[str] = []
    for start in range(0, len(conversations), batch_size):
        chunk = conversations[start : start + batch_size]
        texts = [
            processor.apply_chat_template(messages(one), add_generation_prompt=True, tokenize=False) for one in chunk
        ]
        shown = [picture for one in chunk for picture in pictures(one)]
        clips = [turn.clip for one in chunk for turn in one.turns if turn.clip]
        videos = {"videos": [frames(clip) for clip in clips], "video_metadata": [metadata(clip) for clip in clips]}
        inputs = processor(
            text=texts,
            images=shown or None,
            **({**videos, "do_sample_frames": False} if clips else {}),
            padding=True,
            return_tensors="pt",
        ).to(model.device)
        with torch.inference_mode():
            tokens = model.generate(**inputs, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
        given += processor.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return given


def frames(clip: Clip) -> NDArray[np.uint8]:
    """The sampled frames of a clip, `[num_frames, height, width, 3]`."""
    return np.stack([np.asarray(clip.frame(index)) for index in clip.sampled])


def metadata(clip: Clip) -> Untyped:
    """What transformers' processor is told of the frames."""
    from transformers.video_utils import VideoMetadata

    return VideoMetadata(clip.num_frames, clip.fps, frames_indices=list(clip.sampled))


def evaluate(model: Untyped, processor: Untyped, each: int, seed: int, batch_size: int) -> dict[str, Any]:
    """What `held_out.score` says, with some of the wrong answers."""
    asked = questions(each, seed)
    found = score(asked, answers(model, processor, asked, batch_size))
    return {**found, "wrong": found["wrong"][:: max(1, len(found["wrong"]) // 40)]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description="Measure the scenes model.")
    parser.add_argument("--model", required=True, help="folder of the checkpoint")
    parser.add_argument("--questions", type=int, default=100, help="questions per family")
    parser.add_argument("--seed", type=int, default=0, help="offset from the first held-out seed")
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
    found = evaluate(model.to(device).eval(), processor, arguments.questions, arguments.seed, arguments.batch)
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
