"""Conversations made of a trace's requests, and prompts with several images of one size, for `many_hosts.py`.

A trace states which images and texts users send, but not which requests belong together. Each turn of a conversation
takes the image sizes and the text of a random request of the trace; later turns follow after a while, with all images
of the turns before. A share of the images is known to all users.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.simulation.affinity_replay import Image
from encoder.checkpoint.image_rules import ImageRules
from planner.traces import TraceError, image_cost, read_lines

CATALOGUE = 20_000
"""Distinct images that are known to all users; the n-th is requested in proportion to 1/n."""
SHARED = 0.2
"""Share of the new images of a turn that are from the catalogue."""
MAX_LATER_TURNS = 6
MEAN_LATER_TURNS = 2.0
SAMPLE = 10_000
"""Conversations from which the mean of their tokens is estimated."""


@dataclass(frozen=True)
class Question:
    """What one turn adds to a conversation."""

    image_tokens: tuple[int, ...]
    text_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Turn:
    """A request: the images of the turns before, then its own."""

    at_s: float
    conversation: str
    """64 hexadecimal characters."""
    images: tuple[Image, ...]
    """Distinct images."""
    num_earlier: int
    """Images of the turns before; they are the first ones."""
    text_tokens: int
    output_tokens: int

    @property
    def visual_tokens(self) -> int:
        return sum(image.num_tokens for image in self.images)

    @property
    def prompt_tokens(self) -> int:
        return self.text_tokens + self.visual_tokens


def digest_of(name: object) -> str:
    return hashlib.sha256(str(name).encode()).hexdigest()


def read_questions(path: Path, rules: ImageRules) -> list[Question]:
    """Returns the requests with images of a trace. Raises TraceError."""

    def question(line: dict[str, Any]) -> Question:
        tokens = tuple(image_cost(image, rules).num_tokens for image in line["images"])
        return Question(tokens, int(line["prompt_tokens"]), int(line["output_tokens"]))

    found = [question for question in read_lines(path, question) if question.image_tokens]
    if not found:
        raise TraceError(f"{path.name} has no image")
    return found


def conversations(
    questions: Sequence[Question],
    *,
    seconds: float,
    tokens_per_s: float,
    think_s: float,
    shared: float = SHARED,
    seed: int = 0,
) -> list[Turn]:
    """Returns the turns of `seconds` in order of arrival. Some conversations have begun before.

    Args:
        tokens_per_s: prompt tokens of all turns, those of earlier turns included.
        think_s: mean time from a turn to the next one of its conversation.
        shared: share of the new images that are from the catalogue.
    """
    draw = _Draw(questions, shared, random.Random(seed))
    sample = [list(_turns(draw, 0.0, think_s)) for _ in range(SAMPLE)]
    per_conversation = sum(turn.prompt_tokens for turns in sample for turn in turns) / len(sample)
    chance = random.Random(seed + 1)
    found: list[Turn] = []
    at_s = -MAX_LATER_TURNS * think_s
    while at_s < seconds:
        found += (turn for turn in _turns(draw, at_s, think_s) if 0 <= turn.at_s < seconds)
        at_s += chance.expovariate(tokens_per_s / per_conversation)
    return sorted(found, key=lambda turn: turn.at_s)


class _Draw:
    """Draws questions, and images for them."""

    def __init__(self, questions: Sequence[Question], shared: float, chance: random.Random) -> None:
        self.chance = chance
        self._questions, self._shared = questions, shared
        self._numbers = itertools.count()
        self._weights = list(itertools.accumulate(1 / rank for rank in range(1, CATALOGUE + 1)))
        sizes = [tokens for question in questions for tokens in question.image_tokens]
        self._catalogue = [Image(digest_of(f"shared {n}"), chance.choice(sizes)) for n in range(CATALOGUE)]

    def conversation(self) -> str:
        return digest_of(f"conversation {next(self._numbers)}")

    def question(self) -> tuple[Question, list[Image]]:
        question = self.chance.choice(self._questions)
        return question, [self._image(tokens) for tokens in question.image_tokens]

    def _image(self, tokens: int) -> Image:
        if self.chance.random() < self._shared:
            return self.chance.choices(self._catalogue, cum_weights=self._weights)[0]
        return Image(digest_of(f"image {next(self._numbers)}"), tokens)


def _turns(draw: _Draw, at_s: float, think_s: float) -> Iterator[Turn]:
    """Yields the turns of one conversation. Their texts add up as their images do."""
    conversation, images, text_tokens = draw.conversation(), dict[str, Image](), 0
    later = min(MAX_LATER_TURNS, int(draw.chance.expovariate(1 / MEAN_LATER_TURNS)))
    for _ in range(1 + later):
        question, new = draw.question()
        num_earlier = len(images)
        images |= {image.digest: image for image in new}
        text_tokens += question.text_tokens
        yield Turn(at_s, conversation, tuple(images.values()), num_earlier, text_tokens, question.output_tokens)
        at_s += draw.chance.expovariate(1 / think_s)
        text_tokens += question.output_tokens


def single_images(*, seconds: float, per_s: float, mean_tokens: int, spread: float, seed: int = 0) -> list[Turn]:
    """Returns requests with one new image each, at Poisson times, of `mean_tokens` times 1 ± `spread`."""
    chance = random.Random(seed)

    def image(number: int) -> tuple[Image, ...]:
        return (Image(digest_of(number), round(mean_tokens * chance.uniform(1 - spread, 1 + spread))),)

    return _poisson(chance, seconds, per_s, lambda number: (digest_of(f"conversation {number}"), image(number)))


def grouped_prompts(
    *, seconds: float, per_s: float, images: int, image_tokens: int, groups: int | None, seed: int = 0
) -> list[Turn]:
    """Returns prompts with `images` images of one size, at Poisson times.

    `groups`: number of different prompts, of which the n-th is requested in proportion to 1/n; None: all differ.
    """
    chance = random.Random(seed)
    weights = list(itertools.accumulate(1 / rank for rank in range(1, (groups or 1) + 1)))

    def prompt(number: int) -> tuple[str, tuple[Image, ...]]:
        group = number if groups is None else chance.choices(range(groups), cum_weights=weights)[0]
        return digest_of(f"prompt {group}"), tuple(
            Image(digest_of(f"{group} {place}"), image_tokens) for place in range(images)
        )

    return _poisson(chance, seconds, per_s, prompt, text_tokens=100, output_tokens=300)


def _poisson(
    chance: random.Random,
    seconds: float,
    per_s: float,
    prompt: Callable[[int], tuple[str, tuple[Image, ...]]],
    *,
    text_tokens: int = 0,
    output_tokens: int = 1,
) -> list[Turn]:
    found: list[Turn] = []
    at_s = chance.expovariate(per_s)
    while at_s < seconds:
        conversation, images = prompt(len(found))
        found.append(Turn(at_s, conversation, images, 0, text_tokens, output_tokens))
        at_s += chance.expovariate(per_s)
    return found
