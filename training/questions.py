"""Questions about what is in a scene and their answers, by family.

A family is a function (rng, scene, where) -> (question, answer), or None where the scene has no clear answer. `where`
is what names the picture: "", " in the picture", " in the second picture". "The circle" is only asked for where one
circle is there, or where the answer says that it is not.
"""

from __future__ import annotations

from random import Random

from training.kinds import (
    NUMBERS,
    QA,
    Kind,
    article,
    asked_about,
    counted,
    listed,
    not_one,
    nouns,
    random_kind,
    sentence,
    until,
    yes_no,
)
from training.scenes import COLOURS, SHAPES, SIZES, Scene

_SHORT = ("What is this?", "Describe it.", "Describe what you see.", "Can you describe what you see?", "What is here?")


def how_many(rng: Random, what: str, where: str) -> str:
    """A question for a number; `what` in the plural."""
    return rng.choice(
        (
            f"How many {what} are there{where}?",
            f"How many {what} are there{where}?",
            f"How many {what} do you see{where}?",
            f"How many {what} can you see{where}?",
            f"How many {what}{where}?",
            f"Count the {what}{where}.",
            f"What is the number of {what}{where}?",
            f"Tell me how many {what} there are{where}.",
        )
    )


def count_all(rng: Random, scene: Scene, where: str) -> QA | None:
    return how_many(rng, nouns(rng), where), sentence(NUMBERS[len(scene.things)])


def count_some(rng: Random, scene: Scene, where: str) -> QA | None:
    kind = random_kind(rng, scene)
    answer = sentence(NUMBERS[len(kind.among(scene))])
    if kind.shape is None and kind.size is None and rng.random() < 0.3:
        return f"How many of the {nouns(rng)}{where} are {kind.colour}?", answer
    return how_many(rng, kind.words(rng, plural=True), where), answer


def exists(rng: Random, scene: Scene, where: str) -> QA | None:
    wanted = rng.random() < 0.5
    kind = until(lambda: random_kind(rng, scene), lambda kind: bool(kind.among(scene)) == wanted)
    one, many = kind.with_article(rng), kind.words(rng, plural=True)
    picture = where.removeprefix(" in ") or "the picture"
    question = rng.choice(
        (
            f"Is there {one}{where}?",
            f"Do you see {one}{where}?",
            f"Can you see {one}{where}?",
            f"Are there any {many}{where}?",
            f"Do you see any {many}{where}?",
            f"Can you find {one}{where}?",
            f"Does {picture} contain {one}?",
            f"Does {picture} have {one}?",
            f"Does {picture} show any {many}?",
        )
    )
    return question, yes_no(bool(kind.among(scene)))


def colour_of(rng: Random, scene: Scene, where: str) -> QA | None:
    kind, things = asked_about(rng, scene, "colour")
    the = f"the {kind.words(rng)}"
    question = rng.choice(
        (
            f"What colour is {the}{where}?",
            f"What colour is {the}{where}?",
            f"Which colour is {the}{where}?",
            f"What is the colour of {the}{where}?",
            f"Which colour does {the}{where} have?",
            f"Tell me the colour of {the}{where}.",
        )
    )
    return question, sentence(things[0].colour) if len(things) == 1 else not_one(kind, things)


def shape_of(rng: Random, scene: Scene, where: str) -> QA | None:
    kind, things = asked_about(rng, scene, "shape")
    the = f"the {kind.words(rng)}"
    question = rng.choice(
        (
            f"What shape is {the}{where}?",
            f"What shape is {the}{where}?",
            f"What is the shape of {the}{where}?",
            f"Which shape does {the}{where} have?",
            f"What is {the}{where}?",
        )
    )
    return question, sentence(f"a {things[0].shape}") if len(things) == 1 else not_one(kind, things)


def size_of(rng: Random, scene: Scene, where: str) -> QA | None:
    kind, things = asked_about(rng, scene, "size")
    the = f"the {kind.words(rng)}"
    question = rng.choice(
        (
            f"Is {the}{where} large or small?",
            f"Is {the}{where} small or large?",
            f"Is {the}{where} big or small?",
            f"What size is {the}{where}?",
            f"What is the size of {the}{where}?",
            f"How big is {the}{where}?",
        )
    )
    return question, sentence(things[0].size) if len(things) == 1 else not_one(kind, things)


def is_it(rng: Random, scene: Scene, where: str) -> QA | None:
    """ "Is the circle red?" """
    attribute = rng.choice(("colour", "shape", "size"))
    kind, things = asked_about(rng, scene, attribute)
    if len(things) != 1:
        return None
    real = {"colour": things[0].colour, "shape": things[0].shape, "size": things[0].size}[attribute]
    values = {"colour": tuple(COLOURS), "shape": SHAPES, "size": SIZES}[attribute]
    said = real if rng.random() < 0.5 else rng.choice(values)
    words = f"a {said}" if attribute == "shape" else said
    return f"Is the {kind.words(rng)}{where} {words}?", yes_no(said == real)


def compare_counts(rng: Random, scene: Scene, where: str) -> QA | None:
    one, other = random_kind(rng, scene), random_kind(rng, scene)
    attribute = rng.choice(("shape", "colour"))
    one, other = (Kind(shape=k.shape) if attribute == "shape" else Kind(colour=k.colour) for k in (one, other))
    if one == other or Kind() in (one, other):
        return None
    more = len(one.among(scene)) - len(other.among(scene))
    noun = nouns(rng)
    first, second = ((k.shape and k.words(plural=True)) or f"{k.colour} {noun}" for k in (one, other))
    word = rng.choice(("more", "more", "fewer"))
    if rng.random() < 0.6 or more == 0:
        return f"Are there {word} {first} than {second}{where}?", yes_no(more > 0 if word == "more" else more < 0)
    picked = one if (more > 0) == (word == "more") else other
    return f"Are there {word} {first} or {word} {second}{where}?", sentence(f"{word} {picked.words(plural=True)}")


def background(rng: Random, scene: Scene, where: str) -> QA | None:
    question = rng.choice(
        (
            f"What colour is the background{where}?",
            f"What is the colour of the background{where}?",
            f"Which colour does the background{where} have?",
        )
    )
    return question, sentence(scene.background)


def describe(rng: Random, scene: Scene, where: str) -> QA | None:
    picture = where.removeprefix(" in ") or "the picture"
    question = rng.choice(
        (
            f"Describe {picture}.",
            f"Describe {picture}.",
            f"Describe {picture} in one sentence.",
            f"What is in {picture}?",
            f"What do you see in {picture}?",
            f"What does {picture} show?",
            f"What can you see in {picture}?",
            f"What is shown in {picture}?",
            f"What is on {picture}?",
            f"Give a description of {picture}.",
            f"Describe {picture} in detail.",
            f"Can you describe {picture}?",
            f"Please describe {picture}.",
            f"Tell me about {picture}.",
            f"Caption {picture}.",
            f"Write a caption for {picture}.",
            f"List the {nouns(rng)}{where or ' in the picture'}.",
            f"What {nouns(rng)} are there{where}?",
            f"What {nouns(rng)} do you see{where}?",
            f"Which {nouns(rng)} does {picture} show?",
            f"What is in {picture}? Use one sentence.",
            rng.choice(_SHORT) if where in ("", " in the picture") else f"What is on {picture}?",
            "What do you see?" if where in ("", " in the picture") else f"Tell me what {picture} shows.",
        )
    )
    return question, sentence(description(scene))


def colours(rng: Random, scene: Scene, where: str) -> QA | None:
    """Which colours the things have, from left to right."""
    if not scene.things:
        return None
    seen = list(dict.fromkeys(thing.colour for thing in sorted(scene.things, key=lambda thing: thing.x)))
    question = rng.choice(
        (
            f"What colours do you see{where}?",
            f"Which colours do the {nouns(rng)}{where} have?",
            f"What colours are the {nouns(rng)}{where}?",
            f"What colour are the {nouns(rng)}{where}?",
            f"List the colours of the {nouns(rng)}{where}.",
            f"What colours are there{where}?",
        )
    )
    return question, sentence(listed(seen))


def description(scene: Scene) -> str:
    """Every thing, from left to right, equal ones together."""
    place = f"{article(scene.background)} {scene.background} background"
    if not scene.things:
        return f"nothing but {place}"
    groups: dict[Kind, int] = {}
    for thing in sorted(scene.things, key=lambda thing: thing.x):
        kind = Kind(thing.shape, thing.colour, thing.size)
        groups[kind] = groups.get(kind, 0) + 1
    parts = [kind.with_article() if count == 1 else counted(kind, count) for kind, count in groups.items()]
    return f"{listed(parts)} on {place}"
