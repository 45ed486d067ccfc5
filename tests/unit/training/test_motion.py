"""Clips: the same from the same seed, and answers that follow from what happens in them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from encoder.checkpoint.image_rules import ImageRules
from encoder.checkpoint.video_rules import VideoRules
from encoder.video.header import VideoHeader
from encoder.video.sampling import sample
from training.clips import _RATES, DIRECTIONS, SAMPLED_FPS, Clip, Course, sample_clip
from training.conversations import clip_conversation, messages, mixed_conversation
from training.motion import CLIP_FAMILIES
from training.scenes import COLOURS, Scene, Thing


def thing(shape: str, colour: str, x: float) -> Thing:
    return Thing(shape, colour, "small", x, 60.0, 18.0, COLOURS[colour][0], 0.0)


SCENE = Scene(
    128,
    128,
    "white",
    (255, 255, 255),
    (thing("circle", "red", 20), thing("star", "blue", 60), thing("cross", "green", 100)),
)
CLIP = Clip(
    SCENE,
    (
        Course("down", 40.0, (True,) * 6),
        Course(shown=(False, True, False, True, False, True)),
        Course(shown=(False, False, True, True, True, True)),
    ),
    2,
    6,
)


def answers_of(family: str, clip: Clip = CLIP) -> dict[str, str]:
    return dict(made for seed in range(200) if (made := CLIP_FAMILIES[family][0](Random(seed), clip, "")))


def test_a_seed_decides_everything() -> None:
    for seed in range(3):
        assert clip_conversation(seed) == clip_conversation(seed)
        first, second = (sample_clip(Random(seed)) for _ in range(2))
        assert first == second
        assert first.frame(1).tobytes() == second.frame(1).tobytes()
    assert len({clip_conversation(seed) for seed in range(50)}) == 50


def test_clips_keep_their_bounds() -> None:
    for seed in range(300):
        clip = sample_clip(Random(seed))
        assert 2 - 0.5 / clip.fps <= clip.num_frames / clip.fps <= 4 + 0.5 / clip.fps
        assert 4 <= len(clip.sampled) <= 4 * SAMPLED_FPS
        for one, course in zip(clip.scene.things, clip.courses, strict=True):
            assert len(course.shown) == len(clip.sampled)
            dx, dy = DIRECTIONS[course.direction] if course.direction else (0, 0)
            assert 0 < one.x + dx * course.travel < clip.scene.width
            assert 0 < one.y + dy * course.travel < clip.scene.height
            assert course.direction is None or (course.is_steady and course.travel >= 0.3 * 64)


def test_a_frame_shows_what_is_there_then() -> None:
    """Of a file with ten times as many frames too: its sampled frames are those of the courses."""
    for clip in (CLIP, Clip(SCENE, CLIP.courses, 20, 60)):
        for place, index in enumerate(clip.sampled):
            frame = clip.frame(index)
            blue, green = frame.getpixel((60, 60)), frame.getpixel((100, 60))
            assert (blue == COLOURS["blue"][0]) == CLIP.courses[1].shown[place]
            assert (green == COLOURS["green"][0]) == CLIP.courses[2].shown[place]
            assert frame.getpixel((20, round(60 + 40 * index / (clip.num_frames - 1)))) == COLOURS["red"][0]
    assert CLIP.timestamps == [0.25, 1.25, 2.25]


@pytest.mark.parametrize("fps", sorted(set(_RATES)))
def test_frames_and_timestamps_are_those_that_the_encoder_samples(fps: int) -> None:
    """Timestamps were once divided in another order, and 7 of the 278 lengths had another text in training."""
    for count in range(round(2.0 * fps), round(4.0 * fps) + 1):
        clip = Clip(SCENE, (), fps, count)
        header = VideoHeader("mp4", "h264", 128, 128, count, count, float(fps), count / fps)
        frames = sample(header, VideoRules("qwen3_vl", ImageRules()))
        assert (frames.indices, frames.timestamps(2)) == (clip.sampled, clip.timestamps)


def backwards(clip: Clip) -> Clip:
    opposite = {"left": "right", "right": "left", "up": "down", "down": "up", None: None}
    moves = [(DIRECTIONS[one.direction] if one.direction else (0, 0), one.travel) for one in clip.courses]
    things = tuple(
        replace(one, x=one.x + dx * travel, y=one.y + dy * travel)
        for one, ((dx, dy), travel) in zip(clip.scene.things, moves, strict=True)
    )
    courses = tuple(Course(opposite[one.direction], one.travel, one.shown[::-1]) for one in clip.courses)
    return replace(clip, scene=replace(clip.scene, things=things), courses=courses)


def test_answers_about_random_clips_turn_round_with_the_frames() -> None:
    turned = {"To the left.": "To the right.", "To the right.": "To the left.", "Up.": "Down.", "Down.": "Up."}
    asked = 0
    for seed in range(300):
        clip = sample_clip(Random(seed))
        back = backwards(clip)
        answers = [CLIP_FAMILIES["direction"][0](Random(seed), one, "") for one in (clip, back)]
        if answers[0] and answers[1] and len(clip.scene.things) == 1:
            asked += answers[0][1] in turned
            assert answers[0][0] == answers[1][0]
            assert answers[1][1] == turned.get(answers[0][1], answers[0][1])
        if all(course.times_shown == 1 for course in clip.courses):
            appears, disappears = (
                [set(answers_once(family, one).rstrip(".").lower().replace(" and ", ", ").split(", ")) for one in pair]
                for family, pair in (("what appears", (clip, back)), ("what disappears", (back, clip)))
            )
            assert appears == disappears
    assert asked > 20


def answers_once(family: str, clip: Clip) -> str:
    return (CLIP_FAMILIES[family][0](Random(0), clip, "") or ("", ""))[1]


@pytest.mark.parametrize(
    ("family", "words", "answer"),
    [
        ("direction", "Which way does the circle move?", "Down."),
        ("moves that way", "Does the circle move down?", "Yes."),
        ("moves that way", "Does the circle move to the left?", "No."),
        ("what moves", "What moves?", "The red circle."),
        ("what moves there", "What moves down?", "The red circle."),
        ("what moves there", "What moves up?", "Nothing."),
        ("what appears", "What appears?", "The blue star and the green cross."),
        ("what disappears", "What disappears?", "Nothing."),
        ("how often", "How often does the star appear?", "Three times."),
        ("how often", "How often does the green cross appear?", "Once."),
        ("which first", "Which appears first, the cross or the star?", "The blue star."),
        ("which first", "Which appears last, the star or the cross?", "The green cross."),
        ("is it there", "Is the star there at the beginning?", "No."),
        ("is it there", "Is the star there at the end?", "Yes."),
        (
            "what happens",
            "What happens?",
            "The red circle moves down, the blue star appears three times and the green cross appears once.",
        ),
    ],
)
def test_answers_follow_from_the_clip(family: str, words: str, answer: str) -> None:
    assert answers_of(family)[words] == answer


def test_a_clip_comes_before_its_questions() -> None:
    kinds = set()
    for seed in range(60):
        conversation = mixed_conversation(seed)
        clips = [turn.clip is not None for turn in conversation.turns]
        kinds.add((clips[0], len(clips) == 1))
        assert not any(clips[1:])
        if clips[0]:
            (first, *_) = [one for one in messages(conversation) if one["role"] == "user"]
            assert [part["type"] for part in first["content"]] == ["video", "text"]
    assert kinds == {(True, True), (True, False), (False, True), (False, False)}
