"""Converts a trace's requests into bodies of OpenAI's chat route: words of the given length, pictures as data: URLs."""

from __future__ import annotations

import base64
import io
import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from benchmarks.trace.requests import Trace

_WORDS = ("picture", "shape", "colour", "left", "right", "above", "below", "large", "small", "count", "which", "where")
_PROBES = (64, 192)
"""Words of the two requests from which the tokens per word are measured."""


@dataclass(frozen=True)
class Bodies:
    """Makes the body of each request of a trace. Thread-safe."""

    trace: Trace
    files: Mapping[int, Path]
    """JPEG files by image id."""
    model: str
    tokens_per_word: float
    ignore_eos: bool = True
    """Whether to request answers of the full length with vLLM's option; otherwise a length is an upper bound."""
    detail: str | None = None

    def of(self, index: int) -> bytes:
        """Returns a body with pictures first, then text that is unique within the trace. Raises OSError."""
        request = self.trace.requests[index]
        text = words(f"{self.trace.digest} {index}", round(request.prompt_tokens / self.tokens_per_word))
        pictures = [_data_address(self.files[image.id]) for image in request.images]
        return body(self.model, text, pictures, request.output_tokens, ignore_eos=self.ignore_eos, detail=self.detail)


def words(seed: str, number: int) -> str:
    """Returns `number` words, at least one, determined by the seed and different for each seed."""
    chance = random.Random(seed)
    own = f"{chance.getrandbits(32):08x}"  # first, so that no two requests share a prefix of text
    return " ".join([own, *(chance.choice(_WORDS) for _ in range(max(0, number - 1)))])


def body(
    model: str, text: str, pictures: Sequence[str], output_tokens: int, *, ignore_eos: bool, detail: str | None = None
) -> bytes:
    """Returns a chat of one message, streamed greedily, with its usage at the end. `pictures`: URLs."""
    parts: list[dict[str, object]] = [
        {"type": "image_url", "image_url": {"url": url} if detail is None else {"url": url, "detail": detail}}
        for url in pictures
    ]
    parts.append({"type": "text", "text": text})
    asked: dict[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": output_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if ignore_eos:
        asked["ignore_eos"] = True
    return json.dumps(asked).encode()


def probes(model: str) -> list[bytes]:
    """Returns two requests of text only, for `tokens_per_word`."""
    return [body(model, words(f"probe {number}", number), [], 1, ignore_eos=False) for number in _PROBES]


def tokens_per_word(prompt_tokens: Sequence[int]) -> float:
    """Returns the tokens per word, from the prompt tokens that a server counted in `probes`; those of its template
    cancel out.

    Raises ValueError if the counts do not grow.
    """
    few, many = prompt_tokens
    if many <= few:
        raise ValueError(
            f"the server counted {few} and {many} tokens in prompts of {_PROBES[0]} and {_PROBES[1]} words"
        )
    return (many - few) / (_PROBES[1] - _PROBES[0])


def warm_up_pictures(number: int) -> list[str]:
    """Returns URLs of `number` small pictures of one random colour each."""
    found = []
    for _ in range(number):
        out = io.BytesIO()
        Image.new("RGB", (64, 64), tuple(os.urandom(3))).save(out, "png")
        found.append("data:image/png;base64," + base64.b64encode(out.getvalue()).decode())
    return found


def _data_address(file: Path) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(file.read_bytes()).decode()
