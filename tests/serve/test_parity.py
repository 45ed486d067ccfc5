"""The application answers as vLLM alone does, which has its own vision tower and sees the images themselves.

In float32 both towers compute the same function, so whatever is greedy or seeded must come out token by token, and
log-probabilities within TOLERANCE: a hundred times what rounding was seen to do, and a hundredth of what another image
does.
"""

from __future__ import annotations

import pytest

from tests.serve import pictures
from tests.serve.application import ARCHITECTURES
from tests.serve.asking import OTHER_ROUTES, Answers, ask
from tests.serve.comparison import difference, first_token_shift
from tests.serve.conversations import (
    CONVERSATIONS,
    Conversation,
    about,
    chat,
    image,
    text,
    user,
)
from tests.serve.vllm_alone import Reference

TOLERANCE = 1e-3

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=str)
def test_a_whole_answer(
    reference: Reference,
    answers: dict[str, Answers],
    arch: str,
    conversation: Conversation,
    measured: dict[str, float],
) -> None:
    theirs = reference.answers[arch].whole[conversation.name].result()
    ours = answers[arch].whole[conversation.name].result()
    largest = difference(ours, theirs, tolerance=TOLERANCE)
    key = f"{arch}, float32, largest difference (tolerance {TOLERANCE:g})"
    measured[key] = max(measured.get(key, 0.0), largest)


@pytest.mark.parametrize("name", [c.name for c in CONVERSATIONS if "prompt_logprobs" not in c.body])
def test_a_streamed_answer(reference: Reference, answers: dict[str, Answers], arch: str, name: str) -> None:
    theirs = reference.answers[arch].streamed[name].result()
    assert theirs["usage"]["completion_tokens"] > 0
    difference(answers[arch].streamed[name].result(), theirs, tolerance=TOLERANCE)


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=str)
def test_tokens_of_a_chat(
    reference: Reference, answers: dict[str, Answers], arch: str, conversation: Conversation
) -> None:
    theirs = reference.answers[arch].tokenized[conversation.name].result()
    ours = answers[arch].tokenized[conversation.name].result()
    assert ours == theirs
    usage = answers[arch].whole[conversation.name].result()["usage"]
    if conversation.has_images and "n" not in conversation.body:
        assert ours["count"] == usage["prompt_tokens"]


@pytest.mark.parametrize("name", OTHER_ROUTES)
def test_other_routes(reference: Reference, answers: dict[str, Answers], arch: str, name: str) -> None:
    theirs = reference.answers[arch].other_routes[name].result()
    difference(answers[arch].other_routes[name].result(), theirs, tolerance=TOLERANCE)


def test_low_detail_is_a_bound_on_the_pixels(base_url: str) -> None:
    """vLLM alone ignores `detail`, so the same picture under the same bound in vLLM's own terms is what to compare."""
    large = pictures.url(70, 900, 700, "JPEG")
    low = ask(base_url, chat(user(image(large, detail="low"), text("What is it?"))))
    bounded = ask(base_url, about(large, "What is it?", mm_processor_kwargs={"max_pixels": 512 * 512}))
    high = ask(base_url, chat(user(image(large, detail="high"), text("What is it?"))))
    difference(low, bounded, tolerance=TOLERANCE)
    assert low["usage"]["prompt_tokens"] < high["usage"]["prompt_tokens"] / 2


def test_the_comparison_notices_another_image_and_none(base_url: str, arch: str, measured: dict[str, float]) -> None:
    shown, other = pictures.url(105, 97, 61), pictures.url(106, 97, 61)
    answer = ask(base_url, about(shown))
    _notices(answer, ask(base_url, about(other)), TOLERANCE, f"{arch}, float32, shift by another image", measured)
    none = ask(base_url, chat(user(text("What is in the picture?"))))
    _notices(answer, none, TOLERANCE, f"{arch}, float32, shift by no image", measured)


def test_the_comparison_notices_the_order_of_images(base_url: str, arch: str, measured: dict[str, float]) -> None:
    first, second = image(pictures.url(107, 97, 61)), image(pictures.url(108, 97, 61))
    answer = ask(base_url, chat(user(first, second, text("Compare."))))
    swapped = ask(base_url, chat(user(second, first, text("Compare."))))
    _notices(answer, swapped, TOLERANCE, f"{arch}, float32, shift by the images' order", measured)


def _notices(answer: object, other: object, tolerance: float, what: str, measured: dict[str, float]) -> None:
    measured[what] = first_token_shift(answer, other)
    assert measured[what] >= 10 * tolerance
    with pytest.raises(AssertionError):
        difference(other, answer, tolerance=tolerance)


def test_every_architecture_is_compared() -> None:
    assert set(ARCHITECTURES.values()) == {"qwen2_5_vl", "qwen3_vl"}
