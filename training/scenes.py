"""Scenes: up to five shapes on a plain background, sampled from a seed and drawn with PIL.

A scene is what a picture shows, in words and in pixels; every question about it is answered from it. Seeds from
`HELD_OUT` on are never trained on. Must not know of questions, tokens or models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from io import BytesIO
from random import Random

from PIL import Image, ImageDraw

HELD_OUT = 1 << 40

SHAPES = ("circle", "square", "rectangle", "triangle", "star", "cross")
SIZES = ("small", "large")
MAX_THINGS = 5
MIN_SIDE, MAX_SIDE = 64, 512

Colour = tuple[int, int, int]

# Several shades each, those that PIL and CSS give the name among them; every scene moves them a little.
COLOURS: dict[str, tuple[Colour, ...]] = {
    "red": ((255, 0, 0), (220, 20, 50), (225, 35, 30), (200, 10, 10)),
    "green": ((0, 128, 0), (0, 200, 0), (0, 255, 0), (34, 139, 34), (50, 205, 50)),
    "blue": ((0, 0, 255), (30, 70, 220), (65, 105, 225), (20, 40, 160)),
    "yellow": ((255, 255, 0), (250, 220, 40), (255, 215, 0)),
    "orange": ((255, 165, 0), (255, 140, 0), (250, 120, 20)),
    "purple": ((128, 0, 128), (130, 45, 170), (148, 0, 211)),
    "pink": ((255, 192, 203), (255, 105, 180), (250, 150, 190)),
    "brown": ((139, 69, 19), (120, 70, 30), (101, 67, 33), (165, 42, 42)),
    "cyan": ((0, 255, 255), (0, 206, 209), (30, 215, 235)),
    "grey": ((128, 128, 128), (110, 110, 110), (150, 150, 150)),
    "black": ((0, 0, 0), (20, 20, 20)),
    "white": ((255, 255, 255), (248, 248, 248)),
}
BACKGROUNDS: dict[str, tuple[Colour, ...]] = {
    "white": ((255, 255, 255), (255, 255, 255), (248, 248, 248)),
    "grey": ((128, 128, 128), (160, 160, 160), (200, 200, 200), (211, 211, 211)),
    "black": ((0, 0, 0), (16, 16, 16)),
    "light blue": ((173, 216, 230), (190, 215, 245)),
    "beige": ((245, 245, 220), (240, 225, 195)),
}
# On these backgrounds, colours that can hardly be told from them beside the one of the same name.
_ALIKE = {"beige": "white", "light blue": "cyan"}
# Diameters as a part of the picture's shorter side, and their least in pixels. Nothing is drawn between the two ranges;
# a thing that is alone, or one of two, may be larger still.
_DIAMETERS = {"small": (0.12, 0.19), "large": (0.29, 0.38), "huge": (0.38, 0.85)}
_MIN_DIAMETERS = {"small": 14.0, "large": 23.0}
_SQUARES = (64, 96, 128, 160, 192, 224, 256, 300, 320, 384, 448, 512)


@dataclass(frozen=True)
class Thing:
    """One drawn shape. Lengths in pixels, `angle` in degrees."""

    shape: str
    colour: str
    size: str
    x: float
    y: float
    diameter: float
    rgb: Colour
    angle: float


@dataclass(frozen=True)
class Scene:
    """A picture's content. `smooth` draws edges with antialiasing; `noise` is the grain's standard deviation; `jpeg` is
    the quality that the picture was once stored with, or 0."""

    width: int
    height: int
    background: str
    background_rgb: Colour
    things: tuple[Thing, ...]
    smooth: bool = False
    noise: int = 0
    jpeg: int = 0
    seed: int = 0


def sample_scene(
    rng: Random, *, max_things: int = MAX_THINGS, like: Scene | None = None, sides: tuple[int, int] | None = None
) -> Scene:
    """Draws a scene's content at random; `like` borrows kinds of things from another scene, for comparing the two.
    `sides`: width and height in pixels, by default random."""
    width, height = sides or _sample_sides(rng)
    background = rng.choices(tuple(BACKGROUNDS), (5, 2, 2, 1, 1))[0]
    grounds = BACKGROUNDS
    if rng.random() < 0.1:
        background, grounds = rng.choice(tuple(COLOURS)), COLOURS
    count = min(max_things, rng.choices(range(MAX_THINGS + 1), (2, 18, 23, 22, 18, 17))[0])
    unseen = {background, _ALIKE.get(background)}
    colours = [name for name in COLOURS if name not in unseen]
    shapes = list(SHAPES)
    if rng.random() < 0.5:  # few kinds, so that several things have something in common
        colours = rng.sample(colours, rng.randint(1, 3))
        shapes = rng.sample(shapes, rng.randint(1, 2))
    borrowed = list(like.things) if like is not None and rng.random() < 0.7 else []
    things: list[Thing] = []
    for _ in range(count):
        shape, colour = rng.choice(shapes), rng.choice(colours)
        if borrowed and rng.random() < 0.7:
            model = rng.choice(borrowed)
            shape = model.shape if rng.random() < 0.8 else shape
            colour = model.colour if rng.random() < 0.8 and model.colour not in unseen else colour
        size = rng.choice(SIZES)
        if size == "large" and sum(thing.size == "large" for thing in things) >= 3:
            size = "small"
        reach = "huge" if size == "large" and count <= 2 and rng.random() < 0.4 else size
        thing = _place(rng, shape, colour, size, _DIAMETERS[reach], width, height, things)
        if thing is None and size == "large":
            thing = _place(rng, shape, colour, "small", _DIAMETERS["small"], width, height, things)
        if thing is not None:
            things.append(thing)
    return Scene(
        width,
        height,
        background,
        _shade(rng, grounds[background], 4),
        tuple(things),
        smooth=width * height < 150_000 and rng.random() < 0.3,
        noise=rng.choice((3, 6, 9)) if rng.random() < 0.2 else 0,
        jpeg=rng.randint(60, 95) if rng.random() < 0.1 else 0,
        seed=rng.getrandbits(32),
    )


def draw(scene: Scene) -> Image.Image:
    """The scene as an RGB picture."""
    scale = 2 if scene.smooth else 1
    image = Image.new("RGB", (scene.width * scale, scene.height * scale), scene.background_rgb)
    canvas = ImageDraw.Draw(image)
    for thing in scene.things:
        outline = [((thing.x + dx) * scale, (thing.y + dy) * scale) for dx, dy in _outline(thing)]
        if thing.shape == "circle":
            canvas.ellipse(outline, fill=thing.rgb)
        else:
            canvas.polygon(outline, fill=thing.rgb)
    if scene.smooth:
        image = image.reduce(2)
    if scene.noise:
        image = _with_grain(image, scene)
    if scene.jpeg:
        stored = BytesIO()
        image.save(stored, "JPEG", quality=scene.jpeg)
        image = Image.open(stored).convert("RGB")
    return image


def _sample_sides(rng: Random) -> tuple[int, int]:
    if rng.random() < 0.3:
        side = rng.choice(_SQUARES)
        return side, side
    area_side = MIN_SIDE * (MAX_SIDE / MIN_SIDE) ** (rng.random() ** 1.2)
    stretch = math.exp(rng.uniform(-0.7, 0.7) if rng.random() < 0.9 else rng.uniform(-1.4, 1.4))
    sides = [round(min(MAX_SIDE, max(MIN_SIDE, area_side * factor))) for factor in (stretch, 1 / stretch)]
    if rng.random() < 0.65:
        sides = [round(side / 32) * 32 for side in sides]
    return sides[0], sides[1]


def _place(
    rng: Random,
    shape: str,
    colour: str,
    size: str,
    diameters: tuple[float, float],
    width: int,
    height: int,
    others: list[Thing],
) -> Thing | None:
    """A thing of that kind where it touches no other and no edge, or None if no such place was found."""
    shorter = min(width, height)
    diameter = min(0.8 * shorter, max(_MIN_DIAMETERS[size], rng.uniform(*diameters) * shorter))
    reach = 0.6 * diameter
    for _ in range(30):
        x, y = rng.uniform(reach, width - reach), rng.uniform(reach, height - reach)
        if all(math.hypot(x - o.x, y - o.y) > reach + 0.6 * o.diameter + 1.5 for o in others):
            angle = rng.uniform(-15, 15) if rng.random() < 0.4 else 0.0
            if shape == "rectangle" and rng.random() < 0.5:
                angle += 90
            return Thing(shape, colour, size, x, y, diameter, _shade(rng, COLOURS[colour], 10), angle)
    return None


def _shade(rng: Random, shades: tuple[Colour, ...], spread: int) -> Colour:
    red, green, blue = rng.choice(shades)
    if rng.random() < 0.3:  # the pure shade is what most drawings hold
        return red, green, blue
    moved = [min(255, max(0, channel + rng.randint(-spread, spread))) for channel in (red, green, blue)]
    return moved[0], moved[1], moved[2]


def _outline(thing: Thing) -> list[tuple[float, float]]:
    """Corners around the centre; for a circle, the two corners of its box."""
    radius = thing.diameter / 2
    if thing.shape == "circle":
        return [(-radius, -radius), (radius, radius)]
    if thing.shape == "square":
        half = 0.88 * radius
        corners = [(-half, -half), (half, -half), (half, half), (-half, half)]
    elif thing.shape == "rectangle":
        long, short = 1.1 * radius, 0.6 * radius
        corners = [(-long, -short), (long, -short), (long, short), (-long, short)]
    elif thing.shape == "triangle":
        corners = [(0.0, -radius), (radius, 0.8 * radius), (-radius, 0.8 * radius)]
    elif thing.shape == "star":
        spokes = [(radius * (1.12 if index % 2 == 0 else 0.45), math.pi * index / 5) for index in range(10)]
        corners = [(length * math.sin(turn), -length * math.cos(turn)) for length, turn in spokes]
    else:
        arm = radius / 3
        quarter = [(-arm, -radius), (arm, -radius), (arm, -arm)]
        corners = []
        for _ in range(4):
            corners += quarter
            quarter = [(-y, x) for x, y in quarter]
    cos, sin = math.cos(math.radians(thing.angle)), math.sin(math.radians(thing.angle))
    return [(x * cos - y * sin, x * sin + y * cos) for x, y in corners]


def _with_grain(image: Image.Image, scene: Scene) -> Image.Image:
    import numpy as np

    # One tile of grain, repeated: drawing a number for every pixel would take longer than all the rest.
    tile = np.random.default_rng(scene.seed).normal(0.0, scene.noise, (64, 64, 1)).astype(np.int16)
    grain = np.tile(tile, (-(-image.height // 64), -(-image.width // 64), 1))[: image.height, : image.width]
    return Image.fromarray((np.asarray(image) + grain).clip(0, 255).astype(np.uint8))
