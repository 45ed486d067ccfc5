"""In bfloat16 two towers round differently, and logits as large as a trained model's come in steps of 1/16: the
first token's log-probability is compared with that of vLLM alone, under a tolerance of less than two such steps. What
counts is compared too: the answers to held-out questions are vLLM's own, to the letter, and right.
"""

from __future__ import annotations

import pytest

from tests.serve.application import MAX_ANSWERING
from tests.serve.asking import KEY, ask
from tests.serve.comparison import first_token_shift
from tests.serve.conversations import GREEDY, MODEL, SMALL_CONVERSATIONS, Body, Conversation, held_out_questions
from tests.serve.vllm_alone import Reference
from training import evaluate_served
from training.conversations import Conversation as SceneConversation
from training.conversations import Turn
from training.held_out import chat_body, differences, score
from training.scenes import COLOURS, Scene, Thing

TOLERANCE = 1e-1
WANTED = 0.95

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("conversation", SMALL_CONVERSATIONS, ids=str)
def test_the_first_token_in_bfloat16(
    reference: Reference, tight: str, conversation: Conversation, measured: dict[str, float]
) -> None:
    shift = first_token_shift(reference.bfloat16[conversation.name], ask(tight, conversation.body))
    key = f"qwen3, bfloat16, first token, largest difference (tolerance {TOLERANCE:g})"
    measured[key] = max(measured.get(key, 0.0), shift)
    assert shift <= TOLERANCE


def circle(*colours: str) -> Body:
    """Asks for the colour of one circle in each of the pictures given, one or none."""
    drawn = [Thing("circle", colour, "large", 48, 40, 40.0, COLOURS[colour][0], 0.0) for colour in colours]
    scenes = tuple(Scene(96, 80, "white", (255, 255, 255), (thing,)) for thing in drawn)
    turn = Turn("colour", "What colour is the circle?", "", scenes)
    return {**chat_body(SceneConversation("You are a helpful assistant.", (turn,)), MODEL), **GREEDY}


def test_the_comparison_in_bfloat16_notices_another_image_and_none(tight: str, measured: dict[str, float]) -> None:
    answer = ask(tight, circle("red"))
    assert answer["choices"][0]["message"]["content"] == "Red."
    for name, body in {"another image": circle("blue"), "no image": circle()}.items():
        what = f"qwen3, bfloat16, shift by {name}"
        measured[what] = first_token_shift(answer, ask(tight, body))
        assert measured[what] >= 10 * TOLERANCE, name


def test_held_out_questions_are_answered_rightly_and_as_by_vllm_alone(reference: Reference, tight: str) -> None:
    """One of every family; more of them by `python -m training.evaluate_served`, with training/results for a record."""
    asked = held_out_questions()
    ours = evaluate_served.answers(tight, asked, at_once=MAX_ANSWERING, key=KEY)
    assert differences(asked, {"ours": ours, "vLLM alone": reference.scenes}) == []
    found = score(asked, ours)
    assert found["accuracy"] >= WANTED, found["wrong"]
