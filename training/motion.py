"""Questions about clips and their answers, by family: what moves where, what comes and goes, how often, what first.

A family is a function (rng, clip, where) -> (question, answer), or None where the clip has no clear answer. `where` is
what names the clip: "", " in the video", " in the clip". Only what the order of the frames tells is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from training.clips import DIRECTIONS, Clip, Course
from training.kinds import QA, Kind, listed, sentence, unique_kind, yes_no
from training.scenes import Thing

ClipFamily = Callable[[Random, Clip, str], QA | None]
Seen = tuple[Thing, Course]

_TO = {"left": "to the left", "right": "to the right", "up": "up", "down": "down"}
_TIMES = ("Never.", "Once.", "Twice.", "Three times.", "Four times.")


def direction(rng: Random, clip: Clip, where: str) -> QA | None:
    found = _one(rng, [one for one in _seen(clip) if one[1].is_steady], lambda one: one[1].direction is not None)
    the = found and _the(rng, clip, found[0])
    if found is None or the is None:
        return None
    question = rng.choice(
        (
            f"Which way does {the} move{where}?",
            f"In which direction does {the} move{where}?",
            f"Where does {the} move{where}?",
            f"How does {the} move{where}?",
            f"What is the direction of {the}{where}?",
        )
    )
    way = found[1].direction
    return question, "It does not move." if way is None else sentence(_TO[way])


def moves_that_way(rng: Random, clip: Clip, where: str) -> QA | None:
    found = _one(rng, [one for one in _seen(clip) if one[1].is_steady], lambda one: one[1].direction is not None)
    the = found and _the(rng, clip, found[0])
    if found is None or the is None:
        return None
    way = found[1].direction if found[1].direction and rng.random() < 0.5 else rng.choice(tuple(DIRECTIONS))
    return f"Does {the} move {_TO[way]}{where}?", yes_no(found[1].direction == way)


def what_moves(rng: Random, clip: Clip, where: str) -> QA | None:
    moving = [thing for thing, course in _seen(clip) if course.direction]
    noun = rng.choice(("What", "What", f"Which {Kind().words(rng)}"))
    if noun != "What" and len(moving) != 1:
        return None
    return f"{noun} {rng.choice(('moves', 'is moving'))}{where}?", _names(moving)


def what_moves_there(rng: Random, clip: Clip, where: str) -> QA | None:
    moving = [(thing, course.direction) for thing, course in _seen(clip) if course.direction]
    if not moving:
        return None
    way = rng.choice(moving)[1] if rng.random() < 0.8 else rng.choice(tuple(DIRECTIONS))
    assert way is not None
    return f"What moves {_TO[way]}{where}?", _names([thing for thing, its in moving if its == way])


def what_appears(rng: Random, clip: Clip, where: str) -> QA | None:
    found = [thing for thing, course in _seen(clip) if course.appears]
    words = rng.choice(("appears", "appears", "shows up", "comes into view"))
    return f"What {words}{where}?", _names(found)


def what_disappears(rng: Random, clip: Clip, where: str) -> QA | None:
    found = [thing for thing, course in _seen(clip) if course.disappears]
    return f"What {rng.choice(('disappears', 'disappears', 'goes away', 'vanishes'))}{where}?", _names(found)


def how_often(rng: Random, clip: Clip, where: str) -> QA | None:
    found = _one(rng, [one for one in _seen(clip) if one[1].appears], lambda one: one[1].times_shown > 1)
    the = found and _the(rng, clip, found[0])
    if found is None or the is None:
        return None
    question = rng.choice(
        (
            f"How many times does {the} appear{where}?",
            f"How often does {the} appear{where}?",
            f"How many times do you see {the} appear{where}?",
        )
    )
    return question, _TIMES[found[1].times_shown]


def which_first(rng: Random, clip: Clip, where: str) -> QA | None:
    coming = [one for one in _seen(clip) if one[1].appears]
    if len(coming) < 2:
        return None
    pair = rng.sample(coming, 2)
    names = [_the(rng, clip, thing) for thing, _ in pair]
    first, second = (course.shown.index(True) for _, course in pair)
    if first == second or None in names:
        return None
    last = rng.random() < 0.3
    thing = pair[(first > second) != last][0]
    return f"Which appears {'last' if last else 'first'}{where}, {names[0]} or {names[1]}?", _names([thing])


def is_there(rng: Random, clip: Clip, where: str) -> QA | None:
    """At the beginning or at the end; mostly of a thing that is not always there."""
    found = _one(rng, _seen(clip), lambda one: not one[1].is_steady)
    the = found and _the(rng, clip, found[0])
    if found is None or the is None:
        return None
    at = rng.choice((0, -1))
    when = rng.choice(("at the beginning", "at the start") if at == 0 else ("at the end",))
    of = where.replace(" in ", " of ")
    return f"Is {the} there {when}{of}?", yes_no(found[1].shown[at])


def what_happens(rng: Random, clip: Clip, where: str) -> QA | None:
    """Tells what each thing does, from left to right."""
    video = where.removeprefix(" in ") or "the video"
    question = rng.choice(
        (
            f"What happens{where}?",
            f"What happens in {video}?",
            f"Describe {video}.",
            f"Describe what happens{where}.",
            f"What can you see in {video}?",
            f"Tell me what happens{where}.",
        )
    )
    return question, sentence(listed([f"the {_name(thing)} {_does(course)}" for thing, course in _seen(clip)]))


def _seen(clip: Clip) -> list[Seen]:
    """The things and what they do, from left to right as they begin."""
    return sorted(zip(clip.scene.things, clip.courses, strict=True), key=lambda one: one[0].x)


def _one(rng: Random, found: Sequence[Seen], is_of_interest: Callable[[Seen], bool]) -> Seen | None:
    """One of `found`, mostly one that is of interest."""
    wanted = [one for one in found if is_of_interest(one)]
    choice = wanted if wanted and rng.random() < 0.75 else found
    return rng.choice(choice) if choice else None


def _the(rng: Random, clip: Clip, thing: Thing) -> str | None:
    """A phrase that singles the thing out, None if there is none. Sizes change when things are partly hidden."""
    kind = unique_kind(rng, clip.scene, thing, frozenset({"size"}))
    return f"the {kind.words(rng)}" if kind else None


def _name(thing: Thing) -> str:
    return Kind(thing.shape, thing.colour).words()


def _names(things: Sequence[Thing]) -> str:
    return sentence(listed([f"the {_name(thing)}" for thing in things])) if things else "Nothing."


def _does(course: Course) -> str:
    if course.direction:
        return f"moves {_TO[course.direction]}"
    if course.is_steady:
        return "does not move"
    if course.disappears:
        return "disappears"
    return f"appears {_TIMES[course.times_shown].lower().removesuffix('.')}"


CLIP_FAMILIES: dict[str, tuple[ClipFamily, float]] = {
    "direction": (direction, 2.5),
    "moves that way": (moves_that_way, 1.0),
    "what moves": (what_moves, 1.5),
    "what moves there": (what_moves_there, 1.0),
    "what appears": (what_appears, 1.0),
    "what disappears": (what_disappears, 1.0),
    "how often": (how_often, 2.5),
    "which first": (which_first, 2.0),
    "is it there": (is_there, 1.0),
    "what happens": (what_happens, 1.0),
}
