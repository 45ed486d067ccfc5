"""In bfloat16 two towers round differently and logits come in steps of 1/128, so only the first token's log-probability
is compared with that of vLLM alone, under a tolerance of a few such steps.
"""

from __future__ import annotations

import pytest

from tests.serve import pictures
from tests.serve.asking import ask
from tests.serve.comparison import first_token_shift
from tests.serve.conversations import SMALL_CONVERSATIONS, Conversation, about, chat, text, user
from tests.serve.vllm_alone import Reference

TOLERANCE = 2e-2

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("conversation", SMALL_CONVERSATIONS, ids=str)
def test_the_first_token_in_bfloat16(
    reference: Reference, tight: str, conversation: Conversation, measured: dict[str, float]
) -> None:
    shift = first_token_shift(reference.bfloat16[conversation.name], ask(tight, conversation.body))
    key = f"qwen3, bfloat16, first token, largest difference (tolerance {TOLERANCE:g})"
    measured[key] = max(measured.get(key, 0.0), shift)
    assert shift <= TOLERANCE


def test_the_comparison_in_bfloat16_notices_another_image_and_none(tight: str, measured: dict[str, float]) -> None:
    answer = ask(tight, about(pictures.url(100, 97, 61)))
    others = {
        "another image": about(pictures.url(101, 97, 61)),
        "no image": chat(user(text("What is in the picture?"))),
    }
    for name, body in others.items():
        what = f"qwen3, bfloat16, shift by {name}"
        measured[what] = first_token_shift(answer, ask(tight, body))
        assert measured[what] >= 10 * TOLERANCE, name
