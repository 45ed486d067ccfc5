"""Whole conversations about scenes and clips: what the model is trained on, and single questions to test it with.

Everything follows from a seed; seeds from `scenes.HELD_OUT` on are for testing. Must not know of tokens or models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from training.clips import Clip, sample_clip
from training.families import FAMILIES
from training.kinds import QA
from training.motion import CLIP_FAMILIES
from training.pairs import PAIR_FAMILIES
from training.scenes import Scene, sample_scene
from training.talk import NO_PICTURE, ONE_PICTURE, SYSTEM_PROMPTS, reworded, small_talk

CLIPS, DESCRIPTIONS = 0.35, 0.15
"""Shares of conversations about a clip, and of those with nothing but a description: elsewhere it comes last."""
_ABOUT_CLIPS = ("count all", "exists", "colour", "shape")
"""Families of questions about a scene that are asked about clips too."""
_Families = Mapping[str, tuple[Callable[..., QA | None], float]]
_ORDINALS = ("first", "second")


@dataclass(frozen=True)
class Turn:
    """A question with the scenes that are shown with it, `before` its text or after, and the answer."""

    family: str
    question: str
    answer: str
    scenes: tuple[Scene, ...] = ()
    before: bool = True
    clip: Clip | None = None
    """A video that is shown before the text."""


@dataclass(frozen=True)
class Conversation:
    system: str
    turns: tuple[Turn, ...]


def training_conversation(seed: int) -> Conversation:
    """Several questions about one picture or two, some of them with small talk, some without a picture."""
    rng = Random(seed)
    kind = rng.random()
    if kind < 0.04:
        turns = [_without_picture(rng) for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.5:
            turns += _about_one(rng, rng.randint(2, 5))
    elif kind < 0.68:
        turns = _about_one(rng, rng.randint(6, 12))
    elif kind < 0.95:
        turns = _about_two(rng, rng.randint(6, 12))
    else:  # the second picture comes later
        first = sample_scene(rng)
        turns = _shown(rng, (first,), [_single(rng, first, "") for _ in range(rng.randint(1, 3))])
        turns += _about_two(rng, rng.randint(3, 7), first)
    return Conversation(rng.choice(SYSTEM_PROMPTS), tuple(turns))


def clip_conversation(seed: int) -> Conversation:
    """Several questions about a clip."""
    rng = Random(f"clip {seed}")
    clip = sample_clip(rng)
    made = []
    for _ in range(rng.randint(6, 10)):
        where = rng.choice(("", " in the video", " in the clip"))
        if rng.random() < 0.15:
            made.append(_pick(rng, {name: FAMILIES[name] for name in _ABOUT_CLIPS}, clip.scene, " in the video"))
        else:
            made.append(_pick(rng, CLIP_FAMILIES, clip, where))
    turns = _shown(rng, (), made)
    turns[0] = dataclasses.replace(turns[0], clip=clip)
    return Conversation(rng.choice(SYSTEM_PROMPTS), tuple(turns))


def mixed_conversation(seed: int) -> Conversation:
    """A conversation about pictures, or about a clip."""
    rng = Random(f"mixed {seed}")
    chance = rng.random()
    if chance < DESCRIPTIONS:
        return single_question(seed, rng.choice(("describe", "describe both", "what happens")))
    return clip_conversation(seed) if chance < DESCRIPTIONS + CLIPS else training_conversation(seed)


def single_question(seed: int, family: str) -> Conversation:
    """One question of the family about a fresh picture, or two, or a clip, that has an answer."""
    rng = Random(f"{seed}/{family}")
    while family in CLIP_FAMILIES:
        clip = sample_clip(rng)
        if made := CLIP_FAMILIES[family][0](rng, clip, rng.choice(("", " in the video"))):
            turn = Turn(family, reworded(rng, made[0]), made[1], clip=clip)
            return Conversation(SYSTEM_PROMPTS[0], (turn,))
    while True:
        first = sample_scene(rng)
        if family == "no picture":
            return Conversation(SYSTEM_PROMPTS[0], (_without_picture(rng),))
        if family in FAMILIES:
            made = FAMILIES[family][0](rng, first, rng.choice(("", "", " in the picture")))
            scenes: tuple[Scene, ...] = (first,)
        else:
            scenes = (first, _second(rng, first, 0.5 if family == "same picture" else 0.0))
            made = PAIR_FAMILIES[family][0](rng, *scenes)
        if made is not None:
            turn = Turn(family, reworded(rng, made[0]), made[1], scenes, before=rng.random() < 0.75)
            return Conversation(SYSTEM_PROMPTS[0], (turn,))


PICTURE_FAMILIES = (*FAMILIES, *PAIR_FAMILIES, "no picture")
TEST_FAMILIES = (*PICTURE_FAMILIES, *CLIP_FAMILIES)


def messages(conversation: Conversation) -> list[dict[str, Any]]:
    """For a chat template, without the last answer; `{"type": "image"}` stands for each picture, "video" for a clip."""
    listed: list[dict[str, Any]] = [{"role": "system", "content": conversation.system}]
    for turn in conversation.turns:
        pictures: list[dict[str, Any]] = [{"type": "image"} for _ in turn.scenes]
        pictures += [{"type": "video"}] if turn.clip else []
        text: list[dict[str, Any]] = [{"type": "text", "text": turn.question}]
        listed.append({"role": "user", "content": pictures + text if turn.before else text + pictures})
        listed.append({"role": "assistant", "content": turn.answer})
    return listed[:-1]


def _about_one(rng: Random, count: int) -> list[Turn]:
    scene = sample_scene(rng)
    where = rng.choice(("", " in the picture"))
    made = [_single(rng, scene, where) for _ in range(count)]
    if rng.random() < 0.06:
        made.insert(rng.randrange(count), ("one picture", _about_a_second(rng, scene), ONE_PICTURE))
    return _shown(rng, (scene,), made)


def _about_a_second(rng: Random, scene: Scene) -> str:
    """A question that only makes sense with two pictures."""
    if rng.random() < 0.5:
        return _pick(rng, PAIR_FAMILIES, scene, sample_scene(rng, like=scene))[1]
    return _pick(rng, FAMILIES, sample_scene(rng, like=scene), " in the second picture")[1]


def _about_two(rng: Random, count: int, first: Scene | None = None) -> list[Turn]:
    """Both pictures are shown, or the second alone where the first was shown already."""
    one = first or sample_scene(rng)
    scenes = (one, _second(rng, one, 0.08))
    made = []
    for _ in range(count):
        if rng.random() < 0.6:
            made.append(_pick(rng, PAIR_FAMILIES, *scenes))
        else:
            index = rng.randrange(2)
            made.append(_single(rng, scenes[index], f" in the {_ORDINALS[index]} picture"))
    return _shown(rng, scenes[1:] if first else scenes, made)


def _second(rng: Random, first: Scene, same: float) -> Scene:
    """A picture to compare with the first: that one again with the chance `same`."""
    return first if rng.random() < same else sample_scene(rng, like=first)


def _shown(rng: Random, scenes: tuple[Scene, ...], made: Sequence[tuple[str, str, str]]) -> list[Turn]:
    """The pictures come with the first question; long answers come last, since they give the others away."""
    ordered = sorted(made, key=lambda item: item[0].startswith(("describe", "what happens")))
    turns = [Turn(family, reworded(rng, question), answer) for family, question, answer in ordered]
    turns[0] = Turn(turns[0].family, turns[0].question, turns[0].answer, scenes, not scenes or rng.random() < 0.75)
    if rng.random() < 0.04:
        question, answer = small_talk(rng)
        turns.insert(rng.randint(1, len(turns)), Turn("talk", question, answer))
    return turns


def _single(rng: Random, scene: Scene, where: str) -> tuple[str, str, str]:
    if "first" not in where and "second" not in where and rng.random() < 0.2:
        where = "" if where else " in the picture"
    return _pick(rng, FAMILIES, scene, where)


def _pick(rng: Random, families: _Families, *scenes: Scene | Clip | str) -> tuple[str, str, str]:
    names, weights = list(families), [weight for _, weight in families.values()]
    while True:
        name = rng.choices(names, weights)[0]
        made = families[name][0](rng, *scenes)
        if made is not None:
            return name, *made


def _without_picture(rng: Random) -> Turn:
    if rng.random() < 0.5:
        return Turn("no picture", *small_talk(rng))
    scene = sample_scene(rng)
    question = _pick(rng, FAMILIES, scene, rng.choice(("", " in the picture", " in the second picture")))[1]
    return Turn("no picture", reworded(rng, question), NO_PICTURE)
