"""Clips: scenes of two to four seconds in which shapes move, appear and disappear, sampled from a seed.

What happens can be told from the frames that Qwen3-VL's video processor samples, and only from their order. Must not
know of questions, tokens or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from random import Random

import numpy as np
from PIL import Image

from training.scenes import Scene, Thing, draw, sample_scene

SAMPLED_FPS = 2.0
"""Frames per second that the processor of the checkpoint samples."""
MIN_FRAMES = 4
FRAMES_PER_PATCH = 2
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
MAX_THINGS = 3

_RATES = (2, 2, 3, 5, 8, 10, 12, 15, 24, 25, 30)
_SIDES = (64, 96, 128, 160)
_TRAVEL = (0.3, 0.7)
"""How far a thing moves, as a part of the picture's side."""


@dataclass(frozen=True)
class Course:
    """What a thing does in a clip."""

    direction: str | None = None
    """One of DIRECTIONS, None if it stays."""
    travel: float = 0.0
    """Pixels that it moves in the whole clip."""
    shown: tuple[bool, ...] = ()
    """Whether it is there, for each sampled frame."""

    @property
    def times_shown(self) -> int:
        """How many times it is there, with pauses between."""
        return sum(there for there, _ in groupby(self.shown))

    @property
    def is_steady(self) -> bool:
        return all(self.shown)

    @property
    def appears(self) -> bool:
        """Whether it comes once or more; it is not there at first."""
        return not self.shown[0] and any(self.shown)

    @property
    def disappears(self) -> bool:
        """Whether it is there from the beginning, and not at the end."""
        return self.shown[0] and not self.shown[-1] and self.times_shown == 1


@dataclass(frozen=True)
class Clip:
    """A video of `num_frames` frames at `fps`. The things of `scene` are where they begin."""

    scene: Scene
    courses: tuple[Course, ...]
    """Of each thing."""
    fps: int
    num_frames: int

    @cached_property
    def sampled(self) -> tuple[int, ...]:
        """Indices of the frames that the processor samples, ascending."""
        wanted = min(max(int(self.num_frames / self.fps * SAMPLED_FPS), MIN_FRAMES), self.num_frames)
        return tuple(int(index) for index in np.linspace(0, self.num_frames - 1, wanted).round())

    @property
    def timestamps(self) -> list[float]:
        """Seconds of each pair of sampled frames; the last frame fills the last pair."""
        # The order of float operations is the processor's: another order would round some texts differently.
        seconds = [index / self.fps for index in self.padded]
        return [(first + last) / 2 for first, last in zip(seconds[::2], seconds[1::2], strict=True)]

    @property
    def padded(self) -> tuple[int, ...]:
        """The sampled frames, the last one twice if their number is odd."""
        return self.sampled + self.sampled[-1:] * (len(self.sampled) % FRAMES_PER_PATCH)

    def frame(self, index: int) -> Image.Image:
        """Draws frame `index` of the file, RGB."""
        part = index / (self.num_frames - 1)
        slot = round(part * (len(self.sampled) - 1))
        things = tuple(
            _moved(thing, course, part)
            for thing, course in zip(self.scene.things, self.courses, strict=True)
            if course.shown[slot]
        )
        return draw(replace(self.scene, things=things))


def sample_clip(rng: Random) -> Clip:
    """Draws a clip's content at random."""
    fps = rng.choice(_RATES)
    num_frames = round(rng.uniform(2.0, 4.0) * fps)
    while True:
        scene = sample_scene(rng, max_things=MAX_THINGS, sides=(rng.choice(_SIDES), rng.choice(_SIDES)))
        names = {(thing.shape, thing.colour) for thing in scene.things}
        if scene.things and len(names) == len(scene.things):
            break
    slots = len(Clip(scene, (), fps, num_frames).sampled)
    courses = [Course(shown=(True,) * slots) for _ in scene.things]
    movers = rng.choices((0, 1, 2), (2, 6, 2))[0]
    for at in rng.sample(range(len(courses)), len(courses)):
        if movers and (moving := _moving(rng, scene, courses, at)):
            courses[at], movers = moving, movers - 1
        elif rng.random() < 0.5:
            courses[at] = Course(shown=_shown(rng, slots))
    return Clip(scene, tuple(courses), fps, num_frames)


def _moving(rng: Random, scene: Scene, courses: Sequence[Course], at: int) -> Course | None:
    """A course on which the thing meets no other and no edge, None if none was found."""
    thing, shown = scene.things[at], courses[at].shown
    others = [_swept(*pair) for number, pair in enumerate(zip(scene.things, courses, strict=True)) if number != at]
    for direction in rng.sample(tuple(DIRECTIONS), len(DIRECTIONS)):
        side = scene.width if direction in ("left", "right") else scene.height
        course = Course(direction, rng.uniform(*_TRAVEL) * side, shown)
        left, top, right, bottom = _swept(thing, course)
        if min(left, top) < 0 or right > scene.width or bottom > scene.height:
            continue
        if all(left > other[2] or right < other[0] or top > other[3] or bottom < other[1] for other in others):
            return course
    return None


def _swept(thing: Thing, course: Course) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of all that the thing covers on its course."""
    end, reach = _moved(thing, course, 1.0), 0.6 * thing.diameter
    return (
        min(thing.x, end.x) - reach,
        min(thing.y, end.y) - reach,
        max(thing.x, end.x) + reach,
        max(thing.y, end.y) + reach,
    )


def _moved(thing: Thing, course: Course, part: float) -> Thing:
    if course.direction is None:
        return thing
    dx, dy = DIRECTIONS[course.direction]
    return replace(thing, x=thing.x + dx * course.travel * part, y=thing.y + dy * course.travel * part)


def _shown(rng: Random, slots: int) -> tuple[bool, ...]:
    """When a thing is there that comes, goes, or comes several times."""
    kind = rng.choice(("comes", "goes", "several", "several"))
    times = rng.randint(2, slots // 2) if kind == "several" else 1
    edges = sorted(rng.sample(range(1, slots), 2 * times - 1 if kind == "several" else 1))
    there = [sum(edge <= slot for edge in edges) % 2 == 1 for slot in range(slots)]
    return tuple(not one for one in there) if kind == "goes" else tuple(there)
