"""Scenes and questions: the same from the same seed, answers that follow from the scene, no question without one."""

from __future__ import annotations

from random import Random

import pytest

from training.conversations import TEST_FAMILIES, messages, single_question, training_conversation
from training.families import FAMILIES
from training.held_out import is_right
from training.kinds import Kind, kinds_of, name_of
from training.motion import CLIP_FAMILIES
from training.pairs import PAIR_FAMILIES
from training.positions import relation
from training.questions import compare_counts, count_all, count_some, describe, description, exists
from training.scenes import (
    BACKGROUNDS,
    COLOURS,
    HELD_OUT,
    MAX_SIDE,
    MAX_THINGS,
    MIN_SIDE,
    SHAPES,
    Scene,
    Thing,
    draw,
    sample_scene,
)


def thing(shape: str, colour: str, size: str, x: float, y: float) -> Thing:
    return Thing(shape, colour, size, x, y, 40.0 if size == "large" else 18.0, COLOURS[colour][0], 0.0)


SCENE = Scene(
    128,
    128,
    "white",
    (255, 255, 255),
    (
        thing("circle", "red", "large", 30, 40),
        thing("square", "blue", "small", 100, 30),
        thing("circle", "blue", "small", 90, 100),
    ),
)


def test_a_seed_decides_everything() -> None:
    for seed in (0, 5, HELD_OUT):
        assert training_conversation(seed) == training_conversation(seed)
        first, second = (sample_scene(Random(seed)) for _ in range(2))
        assert first == second
        assert draw(first).tobytes() == draw(second).tobytes()
    assert len({training_conversation(seed) for seed in range(50)}) == 50


def test_scenes_keep_their_bounds() -> None:
    for seed in range(300):
        scene = sample_scene(Random(seed))
        assert MIN_SIDE <= scene.width <= MAX_SIDE
        assert MIN_SIDE <= scene.height <= MAX_SIDE
        assert len(scene.things) <= MAX_THINGS
        assert draw(scene).size == (scene.width, scene.height)
        for one in scene.things:
            assert one.colour != scene.background
            assert one.diameter / 2 <= one.x <= scene.width - one.diameter / 2
            assert one.diameter / 2 <= one.y <= scene.height - one.diameter / 2
        small = [one.diameter for one in scene.things if one.size == "small"]
        large = [one.diameter for one in scene.things if one.size == "large"]
        assert not small or not large or max(small) < min(large)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("smooth", [False, True])
def test_a_thing_is_drawn_where_it_is_said_to_be(shape: str, smooth: bool) -> None:
    one = thing(shape, "green", "large", 50, 70)
    picture = draw(Scene(96, 128, "white", BACKGROUNDS["white"][0], (one,), smooth=smooth))
    assert picture.getpixel((50, 70)) == COLOURS["green"][0]
    assert picture.getpixel((50, 10)) == (255, 255, 255)
    coloured = [(x, y) for x in range(96) for y in range(128) if picture.getpixel((x, y)) != (255, 255, 255)]
    assert 30 <= max(x for x, _ in coloured) - min(x for x, _ in coloured) <= 46


def test_answers_follow_from_the_scene() -> None:
    asked = 0
    for seed in range(400):
        rng = Random(seed)
        question, answer = count_all(rng, SCENE, "") or ("", "")
        assert answer == "Three."
        question, answer = exists(rng, SCENE, "") or ("", "")
        words = question.lower()
        if "green" in words or "star" in words:
            assert answer == "No.", question
        question, answer = relation(rng, SCENE, "") or ("", "")
        if question.startswith("Is the red circle to the left of the"):
            asked += 1
            assert answer == "Yes."
        question, answer = count_some(rng, SCENE, "") or ("", "")
        if "How many circles" in question or "the circles" in question:
            asked += 1
            assert answer == "Two.", question
    assert asked > 5


def test_descriptions_name_everything_from_left_to_right() -> None:
    assert description(SCENE) == "a large red circle, a small blue circle and a small blue square on a white background"
    twins = Scene(128, 128, "grey", (128, 128, 128), (SCENE.things[1], thing("square", "blue", "small", 20, 90)))
    assert description(twins) == "two small blue squares on a grey background"
    assert (describe(Random(0), Scene(64, 64, "black", (0, 0, 0), ()), "") or ("", ""))[1] == (
        "Nothing but a black background."
    )


def test_a_name_means_one_thing() -> None:
    assert name_of(SCENE, SCENE.things[0]) == "red circle"
    twins = Scene(128, 128, "grey", (128, 128, 128), (SCENE.things[1], thing("square", "blue", "small", 20, 90)))
    assert name_of(twins, twins.things[0]) is None
    assert Kind() not in kinds_of(SCENE.things[0])
    assert all(kind.fits(SCENE.things[0]) for kind in kinds_of(SCENE.things[0]))


def test_comparing_a_kind_with_itself_is_not_asked() -> None:
    for seed in range(200):
        made = compare_counts(Random(seed), SCENE, "")
        if made is not None:
            first, _, second = made[0].partition(" than ")
            assert not second or second.split()[0] not in first.split()


@pytest.mark.parametrize("family", TEST_FAMILIES)
def test_every_family_has_held_out_questions(family: str) -> None:
    for seed in range(HELD_OUT, HELD_OUT + 20):
        conversation = single_question(seed, family)
        turn = conversation.turns[-1]
        assert turn.family == family
        assert turn.question
        assert turn.answer.endswith(".")
        num_pictures = 1 if family in FAMILIES else 2 if family in PAIR_FAMILIES else 0
        assert (len(turn.scenes), turn.clip is not None) == (num_pictures, family in CLIP_FAMILIES)


def test_messages_hold_a_part_for_each_picture_and_end_with_the_question() -> None:
    for seed in range(50):
        conversation = training_conversation(seed)
        listed = messages(conversation)
        assert [one["role"] for one in listed[:2]] == ["system", "user"]
        assert listed[-1]["role"] == "user"
        parts = [part["type"] for one in listed[1:] if one["role"] == "user" for part in one["content"]]
        assert parts.count("image") == sum(len(turn.scenes) for turn in conversation.turns)


def test_an_answer_is_right_word_for_word_and_a_description_in_any_order() -> None:
    assert is_right("Two.", "Two.")
    assert not is_right("Two.", "Three.")
    assert not is_right("The first.", "The second.")
    given = "A small blue square and a large red circle on a white background."
    assert is_right(given, "A large red circle and a small blue square on a white background.")
    assert not is_right(given, "A large blue square and a small red circle on a white background.")
    assert not is_right(given, given.replace("white", "grey"))
    both = (
        "The first shows a red circle and a star on a white background. The second shows a star on a black background."
    )
    swapped = (
        "The first shows a star and a red circle on a white background. The second shows a star on a black background."
    )
    assert is_right(both, swapped)
    assert not is_right(both, both.replace("first", "x").replace("second", "first").replace("x", "second"))
