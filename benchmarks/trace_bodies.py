"""A trace's requests as bodies of OpenAI's chat route: words of the length asked for, pictures as data addresses.

It must not know when they are sent, nor anything of a server but the tokens that a word of this file has there.
"""

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

from benchmarks.trace_requests import Trace

_WORDS = ("picture", "shape", "colour", "left", "right", "above", "below", "large", "small", "count", "which", "where")
_PROBES = (64, 192)
"""Words of the two requests from which the tokens of a word are found."""


@dataclass(frozen=True)
class Bodies:
    """Makes the body of each request of a trace. From any thread."""

    trace: Trace
    files: Mapping[int, Path]
    """JPEG files by the image's id."""
    model: str
    tokens_per_word: float
    ignore_eos: bool = True
    """Ask for answers of the full length, in vLLM's way; else a length is an upper bound."""
    detail: str | None = None

    def of(self, index: int) -> bytes:
        """Pictures first, then text that no other request of the trace has. Raises OSError."""
        request = self.trace.requests[index]
        text = words(f"{self.trace.digest} {index}", round(request.prompt_tokens / self.tokens_per_word))
        pictures = [_data_address(self.files[image.id]) for image in request.images]
        return body(self.model, text, pictures, request.output_tokens, ignore_eos=self.ignore_eos, detail=self.detail)


def words(seed: str, number: int) -> str:
    """So many words, at least one; the same for the same seed, and other ones for another."""
    chance = random.Random(seed)
    own = f"{chance.getrandbits(32):08x}"  # at the front, so that no two requests share a prefix of text
    return " ".join([own, *(chance.choice(_WORDS) for _ in range(max(0, number - 1)))])


def body(
    model: str, text: str, pictures: Sequence[str], output_tokens: int, *, ignore_eos: bool, detail: str | None = None
) -> bytes:
    """One message, streamed greedily, with its usage at the end. `pictures`: addresses."""
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
    """Two requests of text alone, for `tokens_per_word`."""
    return [body(model, words(f"probe {number}", number), [], 1, ignore_eos=False) for number in _PROBES]


def tokens_per_word(prompt_tokens: Sequence[int]) -> float:
    """From the prompt tokens that a server counted in `probes`; what its template adds falls out.

    Raises ValueError where they tell nothing.
    """
    few, many = prompt_tokens
    if many <= few:
        raise ValueError(
            f"the server counted {few} and {many} tokens in prompts of {_PROBES[0]} and {_PROBES[1]} words"
        )
    return (many - few) / (_PROBES[1] - _PROBES[0])


def warm_up_pictures(number: int) -> list[str]:
    """Addresses of so many small pictures of one colour each, other ones every time."""
    found = []
    for _ in range(number):
        out = io.BytesIO()
        Image.new("RGB", (64, 64), tuple(os.urandom(3))).save(out, "png")
        found.append("data:image/png;base64," + base64.b64encode(out.getvalue()).decode())
    return found


def _data_address(file: Path) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(file.read_bytes()).decode()
