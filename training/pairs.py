"""Questions about two pictures at once and their answers, by family; as in questions.py, for two scenes."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from training.kinds import NUMBERS, QA, Kind, random_kind, sentence, until, yes_no
from training.questions import description, how_many
from training.scenes import MAX_THINGS, Scene

PairFamily = Callable[[Random, Scene, Scene], QA | None]


def _counts(kind: Kind, first: Scene, second: Scene) -> tuple[int, int]:
    return len(kind.among(first)), len(kind.among(second))


def which_has_more(rng: Random, first: Scene, second: Scene) -> QA | None:
    kind = random_kind(rng, first, second) if rng.random() < 0.75 else Kind()
    one, other = _counts(kind, first, second)
    if one == other and rng.random() < 0.7:  # equal numbers, most of them zeros, would be the answer too often
        return None
    word = rng.choice(("more", "more", "fewer"))
    many = kind.words(rng, plural=True)
    question = rng.choice(
        (
            f"Which picture has {word} {many}?",
            f"Which picture has {word} {many}?",
            f"In which picture are there {word} {many}?",
            f"Which of the two pictures has {word} {many}?",
            f"Which picture shows {word} {many}?",
            f"Which picture contains {word} {many}?",
            f"Which one has {word} {many}, the first or the second picture?",
            f"Where are there {word} {many}, in the first or in the second picture?",
        )
    )
    if one == other:
        return question, "They have the same number."
    return question, "The first." if (one > other) == (word == "more") else "The second."


def which_has_one(rng: Random, first: Scene, second: Scene) -> QA | None:
    kind = random_kind(rng, first, second)
    one, other = _counts(kind, first, second)
    words = kind.with_article(rng)
    question = rng.choice(
        (
            f"Which picture has {words}?",
            f"Which picture shows {words}?",
            f"In which picture is there {words}?",
            f"In which picture do you see {words}?",
            f"Which of the two pictures has {words}?",
            f"Which picture contains {words}?",
            f"Which one has {words}, the first or the second picture?",
        )
    )
    return question, "Both." if one and other else "The first." if one else "The second." if other else "Neither."


def same_number(rng: Random, first: Scene, second: Scene) -> QA | None:
    wanted = rng.random() < 0.5
    kind = until(
        lambda: random_kind(rng, first, second) if rng.random() < 0.7 else Kind(),
        lambda kind: (len(kind.among(first)) == len(kind.among(second))) == wanted,
    )
    one, other = _counts(kind, first, second)
    many = kind.words(rng, plural=True)
    question = rng.choice(
        (
            f"Do both pictures have the same number of {many}?",
            f"Do the two pictures show the same number of {many}?",
            f"Is the number of {many} the same in both pictures?",
        )
    )
    return question, yes_no(one == other)


def count_together(rng: Random, first: Scene, second: Scene) -> QA | None:
    kind = random_kind(rng, first, second) if rng.random() < 0.8 else Kind()
    total = sum(_counts(kind, first, second))
    if total > MAX_THINGS:
        return None
    where = rng.choice((" in both pictures together", " in total", " in the two pictures together", " altogether"))
    return how_many(rng, kind.words(rng, plural=True), where), sentence(NUMBERS[total])


def count_each(rng: Random, first: Scene, second: Scene) -> QA | None:
    kind = random_kind(rng, first, second) if rng.random() < 0.6 else Kind()
    one, other = _counts(kind, first, second)
    where = rng.choice((" in each picture", " in each of the two pictures"))
    answer = sentence(f"{NUMBERS[one]} in the first and {NUMBERS[other]} in the second")
    return how_many(rng, kind.words(rng, plural=True), where), answer


def same_picture(rng: Random, first: Scene, second: Scene) -> QA | None:
    question = rng.choice(
        (
            "Are the two pictures the same?",
            "Are the pictures the same?",
            "Are both pictures the same?",
            "Do the two pictures show the same?",
            "Are the two pictures identical?",
        )
    )
    return question, yes_no(first == second)


def describe_both(rng: Random, first: Scene, second: Scene) -> QA | None:
    if len(first.things) + len(second.things) > MAX_THINGS:
        return None
    question = rng.choice(
        (
            "Describe the pictures.",
            "Describe both pictures.",
            "Describe the two pictures.",
            "What do the two pictures show?",
            "What is in the two pictures?",
            "Compare the two pictures.",
        )
    )
    return question, f"The first shows {description(first)}. The second shows {description(second)}."


PAIR_FAMILIES: dict[str, tuple[PairFamily, float]] = {
    "which has more": (which_has_more, 3.0),
    "which has one": (which_has_one, 1.5),
    "same number": (same_number, 1.0),
    "count together": (count_together, 1.5),
    "count each": (count_each, 1.0),
    "same picture": (same_picture, 0.5),
    "describe both": (describe_both, 0.4),
}
