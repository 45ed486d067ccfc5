"""The shipped model: small, whole, as its card says, and it sees what is in a picture."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from training.card import MODEL, RESULTS, card
from training.clips import Clip, Course
from training.conversations import TEST_FAMILIES, Conversation, Turn
from training.evaluate import answers
from training.held_out import is_right, questions
from training.motion import CLIP_FAMILIES
from training.scenes import COLOURS, SHAPES, Scene, Thing
from training.scenes_model import save_scenes_model, scenes_tokenizer


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Any]:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model, report = AutoModelForImageTextToText.from_pretrained(MODEL, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval(), AutoProcessor.from_pretrained(MODEL)


def ask(loaded: tuple[Any, Any], question: str, *scenes: Scene) -> str:
    conversation = Conversation("You are a helpful assistant.", (Turn("", question, "", scenes),))
    return answers(*loaded, [conversation], 1)[0]


def scene(*things: tuple[str, str, str, float, float], sides: tuple[int, int] = (192, 160)) -> Scene:
    drawn = [
        Thing(shape, colour, size, x, y, 60.0 if size == "large" else 26.0, COLOURS[colour][0], 0.0)
        for shape, colour, size, x, y in things
    ]
    return Scene(*sides, "white", (255, 255, 255), tuple(drawn))


def test_it_is_small_and_holds_what_the_records_are_about() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 16_000_000
    for name in ("train_h200", "train_clips_h100"):
        assert json.loads((RESULTS / f"{name}.json").read_text())["parameters"] <= 8_000_000
    digest = hashlib.sha256((MODEL / "model.safetensors").read_bytes()).hexdigest()
    for name in ("accuracy_gpu", "accuracy_cpu"):
        record = json.loads((RESULTS / f"{name}.json").read_text())
        assert record["weights_sha256"] == digest
        assert record["accuracy"] >= 0.95
        assert sum(record["families"][name] for name in CLIP_FAMILIES) >= 0.95 * len(CLIP_FAMILIES)
        assert set(record["families"]) == set(TEST_FAMILIES)


def test_the_card_is_made_from_the_records() -> None:
    assert (MODEL / "README.md").read_text() == card(), "run python -m training.card"


def test_the_scripts_write_the_files_beside_the_weights(tmp_path: Path) -> None:
    """A changed generator would train another tokenizer than the one that the weights were trained with."""
    save_scenes_model(tmp_path, scenes_tokenizer(), {"lm_head.weight": torch.zeros(1)})
    for path in tmp_path.iterdir():
        if path.name != "model.safetensors":
            assert path.read_bytes() == (MODEL / path.name).read_bytes(), path.name


def test_it_names_the_colour_and_the_shape_that_it_is_shown(loaded: tuple[Any, Any]) -> None:
    for colour in ("red", "green", "blue", "yellow"):
        assert ask(loaded, "What colour is the circle?", scene(("circle", colour, "large", 60, 80))) == (
            f"{colour.capitalize()}."
        )
    for shape in SHAPES:
        assert ask(loaded, "What shape is the red thing?", scene((shape, "red", "large", 90, 70))) == f"A {shape}."


def test_it_looks_at_both_pictures_in_their_order(loaded: tuple[Any, Any]) -> None:
    one = scene(("circle", "red", "large", 60, 80))
    two = scene(("circle", "blue", "small", 40, 40), ("circle", "green", "large", 130, 90), sides=(256, 128))
    assert ask(loaded, "Which picture has more circles?", one, two) == "The second."
    assert ask(loaded, "Which picture has more circles?", two, one) == "The first."
    assert ask(loaded, "How many circles are there in both pictures together?", one, two) == "Three."


@pytest.mark.parametrize("sides", [(64, 64), (64, 512), (512, 64), (333, 97), (512, 512)])
def test_pictures_of_any_size_from_64_to_512_pixels(loaded: tuple[Any, Any], sides: tuple[int, int]) -> None:
    """One thing in the middle; in two pictures of that size too."""
    middle = (sides[0] / 2, sides[1] / 2)
    one, two = (
        Scene(
            *sides,
            "white",
            (255, 255, 255),
            (Thing(shape, colour, "large", *middle, 30.0 * min(sides) / 64, rgb, 0.0),),
        )
        for shape, colour, rgb in (("circle", "red", (255, 0, 0)), ("square", "blue", (0, 0, 255)))
    )
    assert ask(loaded, "What colour is the circle?", one) == "Red."
    assert ask(loaded, "Describe the picture.", two) == "A large blue square on a white background."
    assert ask(loaded, "Which picture has a square?", one, two) == "The second."


def test_it_describes_greets_and_misses_a_picture(loaded: tuple[Any, Any]) -> None:
    shown = scene(("circle", "red", "large", 50, 80), ("square", "blue", "small", 150, 60))
    expected = "A large red circle and a small blue square on a white background."
    for question in ("Describe the picture.", "What's in this image?"):
        assert ask(loaded, question, shown) == expected
    assert ask(loaded, "Hello!").startswith("Hello!")
    assert ask(loaded, "What colour is the circle?") == "I see no picture."


def test_the_answer_depends_on_the_order_of_the_frames(loaded: tuple[Any, Any]) -> None:
    """A clip and the same one backwards."""
    there = scene(("circle", "red", "large", 50, 80))
    moving = Clip(there, (Course("right", 90.0, (True,) * 6),), 2, 6)
    back = Clip(scene(("circle", "red", "large", 140, 80)), (Course("left", 90.0, (True,) * 6),), 2, 6)
    assert [moving.frame(n).tobytes() for n in range(6)] == [back.frame(5 - n).tobytes() for n in range(6)]
    coming, going = (
        Clip(there, (Course(shown=shown),), 2, 6) for shown in ((False,) * 3 + (True,) * 3, (True,) * 3 + (False,) * 3)
    )

    def told(question: str, clip: Clip) -> str:
        turn = Turn("", question, "", clip=clip)
        return answers(*loaded, [Conversation("You are a helpful assistant.", (turn,))], 1)[0]

    which_way = "Which way does the circle move?"
    assert [told(which_way, clip) for clip in (moving, back)] == ["To the right.", "To the left."]
    assert [told("What appears?", clip) for clip in (coming, going)] == ["The red circle.", "Nothing."]


def test_held_out_questions_of_every_family(loaded: tuple[Any, Any]) -> None:
    """Of 37 questions, far below the recorded accuracy and far above what guessing reaches."""
    asked = questions(1, 5000)
    given = answers(*loaded, asked, 9)
    wrong = [
        (one.turns[-1].question, answer, one.turns[-1].answer)
        for one, answer in zip(asked, given, strict=True)
        if not is_right(answer, one.turns[-1].answer)
    ]
    assert len(wrong) <= 2, wrong
