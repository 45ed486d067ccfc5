"""Questions about where things are and which is larger, and their answers, by family; as in questions.py.

Only asked where the picture leaves no doubt.
"""

from __future__ import annotations

from random import Random

from training.kinds import QA, Kind, asked_about, name_of, sentence, unique_kind, yes_no
from training.scenes import Scene, Thing

# As a part of the picture's side, and in pixels: what two centres must differ by before their order is asked for.
_MARGIN, _MIN_MARGIN = 0.1, 7.0
_SIDES = {
    "left": ("left of", "to the left of", "on the left side of"),
    "right": ("right of", "to the right of", "on the right side of"),
    "above": ("above", "over", "higher than"),
    "below": ("below", "under", "lower than"),
}
_SIDE_ANSWERS = {"left": "to the left of", "right": "to the right of", "above": "above", "below": "below"}
_FURTHEST = {
    "left": ("furthest left", "furthest to the left", "leftmost"),
    "right": ("furthest right", "furthest to the right", "rightmost"),
    "above": ("at the top", "highest", "topmost"),
    "below": ("at the bottom", "lowest", "bottommost"),
}
_FURTHER = {
    "left": ("further left", "more to the left"),
    "right": ("further right", "more to the right"),
    "above": ("higher", "higher up", "further up"),
    "below": ("lower", "lower down", "further down"),
}


def relation(rng: Random, scene: Scene, where: str) -> QA | None:
    """ "Is the circle left of the square?" """
    pair = _pair(rng, scene)
    if pair is None:
        return None
    (first, one), (second, other) = pair
    side = rng.choice(tuple(_SIDES))
    if _gap(scene, first, second, side) is None:
        return None
    question = f"Is {one}{where} {rng.choice(_SIDES[side])} {other}?"
    return question, yes_no((_gap(scene, first, second, side) or 0) > 0)


def which_side(rng: Random, scene: Scene, where: str) -> QA | None:
    """ "Where is the circle, seen from the square?", of pairs that are apart in one direction above all."""
    pair = _pair(rng, scene)
    if pair is None:
        return None
    (first, one), (second, other) = pair
    dx, dy = abs(first.x - second.x), abs(first.y - second.y)
    if max(dx, dy) < 1.5 * min(dx, dy):
        return None
    sides = ("left", "right") if dx > dy else ("above", "below")
    side = next((side for side in sides if (_gap(scene, first, second, side) or 0) > 0), None)
    names = name_of(scene, first), name_of(scene, second)
    if side is None or None in names:
        return None
    question = rng.choice(
        (
            f"Where is {one} relative to {other}{where}?",
            f"Where is {one} compared to {other}{where}?",
            f"Where is {one} in relation to {other}{where}?",
            f"On which side of {other} is {one}{where}?",
            f"What is the position of {one} relative to {other}{where}?",
        )
    )
    return question, sentence(f"the {names[0]} is {_SIDE_ANSWERS[side]} the {names[1]}")


def further(rng: Random, scene: Scene, where: str) -> QA | None:
    """ "Which is higher, the circle or the square?" """
    pair = _pair(rng, scene)
    if pair is None:
        return None
    (first, one), (second, other) = pair
    side = rng.choice(tuple(_FURTHER))
    gap = _gap(scene, first, second, side)
    name = name_of(scene, first if (gap or 0) > 0 else second)
    if gap is None or name is None:
        return None
    start = rng.choice(("Which is", "What is", "Which one is"))
    return f"{start} {rng.choice(_FURTHER[side])}{where}, {one} or {other}?", sentence(f"the {name}")


def extreme(rng: Random, scene: Scene, where: str) -> QA | None:
    """ "Which shape is furthest left?", where nothing else comes near."""
    if len(scene.things) < 2:
        return None
    side = rng.choice(tuple(_FURTHEST))
    thing = max(scene.things, key=lambda thing: _along(thing, side))
    name = name_of(scene, thing)
    gaps = [_gap(scene, thing, other, side) for other in scene.things if other is not thing]
    if name is None or None in gaps:
        return None
    words = rng.choice(_FURTHEST[side])
    noun = Kind().words(rng)
    if words.endswith("most") or words in ("highest", "lowest"):
        start = rng.choice((f"What is the {words} {noun}", f"Which {noun} is the {words}", f"Name the {words} {noun}"))
    else:
        start = rng.choice((f"Which {noun} is {words}", f"What is {words}", f"Which {noun} is {words}"))
    return f"{start}{where}{'.' if start.startswith('Name') else '?'}", sentence(f"the {name}")


def beside(rng: Random, scene: Scene, where: str) -> QA | None:
    """ "What is left of the circle?", where that is one thing or nothing, and no other thing is in doubt."""
    if not scene.things:
        return None
    thing, side = rng.choice(scene.things), rng.choice(tuple(_SIDES))
    kind = unique_kind(rng, scene, thing)
    gaps = [(_gap(scene, other, thing, side), other) for other in scene.things if other is not thing]
    there = [other for gap, other in gaps if gap is not None and gap > 0]
    if kind is None or any(gap is None for gap, _ in gaps) or len(there) > 1:
        return None
    name = name_of(scene, there[0]) if there else None
    if (there and name is None) or (not there and rng.random() < 0.75):  # else the answer would mostly be nothing
        return None
    noun = rng.choice(("What", "What", f"Which {Kind().words(rng)}"))
    question = f"{noun} is {rng.choice(_SIDES[side])} the {kind.words(rng)}{where}?"
    return question, sentence(f"the {name}") if name else "Nothing."


def half(rng: Random, scene: Scene, where: str) -> QA | None:
    kind, things = asked_about(rng, scene, "")
    if len(things) != 1:
        return None
    x, y = things[0].x / scene.width - 0.5, things[0].y / scene.height - 0.5
    across = rng.random() < 0.5
    if abs(x if across else y) < 0.1:
        return None
    first, second = ("left", "right") if across else ("top", "bottom")
    answer = sentence(first if (x if across else y) < 0 else second)
    if rng.random() < 0.5:
        first, second = second, first
    the, of = f"the {kind.words(rng)}", where.replace(" in ", " of ") or " of the picture"
    start = rng.choice(
        (f"Is {the} in the {first} or the {second} half", f"In which half is {the}, {first} or {second},")
    )
    return f"{start}{of}?", answer


def zone(rng: Random, scene: Scene, where: str) -> QA | None:
    """ "Where is the circle?", of things that are clearly in a corner, at an edge or in the middle."""
    kind, things = asked_about(rng, scene, "")
    if len(things) != 1:
        return None
    x, y = things[0].x / scene.width, things[0].y / scene.height
    if any(0.38 < part < 0.44 or 0.56 < part < 0.62 for part in (x, y)):
        return None
    column = "left" if x < 0.4 else "right" if x > 0.6 else ""
    row = "top" if y < 0.4 else "bottom" if y > 0.6 else ""
    answer = " ".join(word for word in (row, column) if word)
    question = rng.choice(
        (f"Where is the {kind.words(rng)}{where}?", f"Where{where} is the {kind.words(rng)}?")
        if where
        else (f"Where is the {kind.words(rng)}?", f"Where do you see the {kind.words(rng)}?")
    )
    return question, sentence(f"at the {answer}" if row else f"on the {answer}" if column else "in the middle")


def compare_sizes(rng: Random, scene: Scene, where: str) -> QA | None:
    pair = _pair(rng, scene, hidden=frozenset({"size"}))
    if pair is None:
        return None
    (first, one), (second, other) = pair
    if rng.random() < 0.3:
        return f"Are {one} and {other}{where} of the same size?", yes_no(first.size == second.size)
    if first.size == second.size:
        return None
    word = rng.choice(("larger", "bigger", "smaller"))
    picked, rest = (first, second) if (first.size == "small") == (word == "smaller") else (second, first)
    if rng.random() < 0.4:
        return f"Is {one}{where} {word} than {other}?", yes_no(picked is first)
    name = name_of(scene, picked)
    if name is None or rest is picked:
        return None
    return f"{rng.choice(('Which is', 'What is', 'Which one is'))} {word}{where}, {one} or {other}?", sentence(
        f"the {name}"
    )


def _pair(
    rng: Random, scene: Scene, hidden: frozenset[str] = frozenset()
) -> tuple[tuple[Thing, str], tuple[Thing, str]] | None:
    """Two things, each with a phrase that singles it out."""
    if len(scene.things) < 2:
        return None
    first, second = rng.sample(scene.things, 2)
    one, other = unique_kind(rng, scene, first, hidden), unique_kind(rng, scene, second, hidden)
    if one is None or other is None:
        return None
    return (first, f"the {one.words(rng)}"), (second, f"the {other.words(rng)}")


def _along(thing: Thing, side: str) -> float:
    """How far the thing lies to that side."""
    return {"left": -thing.x, "right": thing.x, "above": -thing.y, "below": thing.y}[side]


def _gap(scene: Scene, first: Thing, second: Thing, side: str) -> float | None:
    """How much further to that side the first lies, or None if the two are too near to tell."""
    length = scene.width if side in ("left", "right") else scene.height
    gap = _along(first, side) - _along(second, side)
    return gap if abs(gap) >= max(_MIN_MARGIN, _MARGIN * length) else None
