"""Words for things: which things a phrase such as "the large red circle" means in a scene, and how a thing is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from training.scenes import COLOURS, SHAPES, SIZES, Scene, Thing

QA = tuple[str, str]
Family = Callable[[Random, Scene, str], QA | None]

NUMBERS = ("zero", "one", "two", "three", "four", "five")

_NOUNS = ("shape", "shape", "object", "thing", "figure")
_SIZE_WORDS = {"small": ("small", "small", "little", "tiny"), "large": ("large", "large", "big")}


@dataclass(frozen=True)
class Kind:
    """A description that leaves open what is None."""

    shape: str | None = None
    colour: str | None = None
    size: str | None = None

    def fits(self, thing: Thing) -> bool:
        return (
            self.shape in (None, thing.shape)
            and self.colour in (None, thing.colour)
            and self.size in (None, thing.size)
        )

    def among(self, scene: Scene) -> list[Thing]:
        return [thing for thing in scene.things if self.fits(thing)]

    def words(self, rng: Random | None = None, *, plural: bool = False) -> str:
        """Without an article. `rng` varies the words; without it they are the ones that answers use."""
        size = self.size and (rng.choice(_SIZE_WORDS[self.size]) if rng else self.size)
        noun = self.shape or (rng.choice(_NOUNS) if rng else "shape")
        return " ".join(word for word in (size, self.colour, _plural(noun) if plural else noun) if word)

    def with_article(self, rng: Random | None = None) -> str:
        words = self.words(rng)
        return f"{article(words)} {words}"


def _plural(noun: str) -> str:
    return noun + ("es" if noun.endswith("s") else "s")


def nouns(rng: Random) -> str:
    """A word for shapes of any kind, in the plural."""
    return _plural(rng.choice(_NOUNS))


def kinds_of(thing: Thing, hidden: frozenset[str] = frozenset()) -> list[Kind]:
    """Every description of the thing that says something, but nothing about the hidden attributes."""
    options = []
    for shape in (thing.shape, None):
        for colour in (thing.colour, None):
            for size in (None, thing.size):
                said = {name for name, value in (("shape", shape), ("colour", colour), ("size", size)) if value}
                if said and not said & hidden:
                    options.append(Kind(shape, colour, size))
    return options


def unique_kind(rng: Random, scene: Scene, thing: Thing, hidden: frozenset[str] = frozenset()) -> Kind | None:
    """A description that fits this thing alone, or None if there is none."""
    options = [kind for kind in kinds_of(thing, hidden) if len(kind.among(scene)) == 1]
    return rng.choice(options) if options else None


def name_of(scene: Scene, thing: Thing) -> str | None:
    """The name that answers use: colour and shape, the size only where it is needed; None if that fits two things."""
    for kind in (Kind(thing.shape, thing.colour), Kind(thing.shape, thing.colour, thing.size)):
        if len(kind.among(scene)) == 1:
            return kind.words()
    return None


def random_kind(rng: Random, *scenes: Scene, hidden: frozenset[str] = frozenset()) -> Kind:
    """A description worth asking about: mostly of something in the scenes, or nearly so, else of anything."""
    things = [thing for scene in scenes for thing in scene.things]
    chance = rng.random()
    if things and chance < 0.6:
        return rng.choice(kinds_of(rng.choice(things), hidden))
    if things and chance < 0.85:  # attributes that are there, perhaps not on one thing
        shape, colour, size = (rng.choice(things) for _ in range(3))
        mixed = Thing(shape.shape, colour.colour, size.size, 0, 0, 0, (0, 0, 0), 0)
        return rng.choice(kinds_of(mixed, hidden))
    anything = Thing(rng.choice(SHAPES), rng.choice(tuple(COLOURS)), rng.choice(SIZES), 0, 0, 0, (0, 0, 0), 0)
    return rng.choice(kinds_of(anything, hidden))


def until(draw: Callable[[], Kind], fits: Callable[[Kind], bool]) -> Kind:
    """Draws again while the description does not fit, a few times at most."""
    kind = draw()
    for _ in range(8):
        if fits(kind):
            break
        kind = draw()
    return kind


def counted(kind: Kind, count: int) -> str:
    """ "one red circle", "two circles"; "no circle"."""
    if count == 0:
        return f"no {kind.words()}"
    return f"{NUMBERS[count]} {kind.words(plural=count > 1)}"


def article(words: str) -> str:
    return "an" if words[0] in "aeiou" else "a"


def listed(parts: list[str]) -> str:
    """ "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def sentence(words: str) -> str:
    """With a capital and a full stop."""
    return words[0].upper() + words[1:] + "."


def yes_no(truth: bool) -> str:
    return "Yes." if truth else "No."


def asked_about(rng: Random, scene: Scene, attribute: str) -> tuple[Kind, list[Thing]]:
    """Mostly one thing that a description without `attribute` singles out; sometimes none or several."""
    hidden = frozenset({attribute})
    if scene.things and rng.random() < 0.85:
        kind = unique_kind(rng, scene, rng.choice(scene.things), hidden)
        if kind is not None:
            return kind, kind.among(scene)
    kind = random_kind(rng, scene, hidden=hidden)
    return kind, kind.among(scene)


def not_one(kind: Kind, things: list[Thing]) -> str:
    """The answer to a question about one thing where there is none, or where there are several."""
    return sentence(f"there {'are' if len(things) > 1 else 'is'} {counted(kind, len(things))}")
