"""An agent adds a screenshot in each turn and sends all earlier ones again: each is encoded once, and what vLLM's
prefix cache has is neither encoded nor transferred again."""

from __future__ import annotations

import random
import re

import pytest

from deployments.telemetry.metrics import Counter
from tests.serve.application import ServedApplication
from tests.serve.asking import Json, ask, post, settled_together
from tests.serve.comparison import difference
from tests.serve.conversations import AGENT, AGENT_TURNS, Body, chat, screenshots
from tests.serve.test_embedding_cache import CHAT, timing
from tests.serve.test_parity import TOLERANCE
from tests.serve.vllm_alone import MAX_MODEL_LEN, NUM_BLOCKS, Reference
from tests.waiting import until

pytestmark = pytest.mark.slow

BLOCK_TOKENS = 128
FILLER_WORDS = 1500
"""Of a text that fills a part of the KV cache, each of two tokens or more."""
FILLERS = 1 + NUM_BLOCKS * BLOCK_TOKENS // (2 * FILLER_WORDS)


def ask_counted(base_url: str, body: Body) -> tuple[Json, int, int]:
    """The answer, how many embeddings the engine was given for it, and how many of these were encoded for it."""
    response = post(base_url, CHAT, body)
    stages = timing(response)
    cached, received = re.fullmatch(r'desc="(\d+)/(\d+)"', stages["cache"]).groups()  # type: ignore[union-attr]
    return response.json(), int(received), int(received) - int(cached)


def test_each_screenshot_is_encoded_once_and_transferred_once(
    application: ServedApplication, reference: Reference, base_url: str, arch: str
) -> None:
    """The first test that shows these pictures. `qwen25`'s encoder has room for a few of the embeddings."""

    def encoded() -> float:
        return application.exported(arch, "Encoder", Counter.IMAGES_ENCODED)

    def skipped() -> float:
        return application.exported(arch, "LLM", Counter.EMBEDDINGS_SKIPPED)

    encoded_before, skipped_before = settled_together(encoded, skipped)
    for turn in range(1, AGENT_TURNS + 1):
        answer, num_received, num_encoded = ask_counted(base_url, screenshots(turn))
        assert (num_received, num_encoded) == (1, 1), f"turn {turn}"
        if f"turn {turn}" in AGENT:
            difference(answer, reference.agent[arch][f"turn {turn}"], tolerance=TOLERANCE)
    until(lambda: encoded() == encoded_before + AGENT_TURNS)
    all_earlier = AGENT_TURNS * (AGENT_TURNS - 1) // 2
    until(lambda: skipped() == skipped_before + all_earlier)


def test_after_an_edited_turn_the_later_screenshots_are_sent_again(
    reference: Reference, base_url: str, arch: str
) -> None:
    """The prefix cache has the ten before it."""
    ask(base_url, screenshots(AGENT_TURNS))
    answer, num_received, _ = ask_counted(base_url, AGENT["edited"])
    assert num_received == 10
    difference(answer, reference.agent[arch]["edited"], tolerance=TOLERANCE)


def test_what_the_prefix_cache_has_lost_is_encoded_or_sent_again(
    application: ServedApplication, reference: Reference, base_url: str, arch: str
) -> None:
    """Other prompts have filled the KV cache. What the encoders' caches still have is not encoded again.

    Twice is encoded what a full memory evicted before a busy engine asked for it, and what was asked for in a call that
    a busy replica did not accept in time. Both are counted.
    """

    def exported(deployment: str, *counters: Counter) -> float:
        return sum(application.exported(arch, deployment, counter) for counter in counters)

    def encoded() -> float:
        return exported("Encoder", Counter.IMAGES_ENCODED)

    def skipped() -> float:
        return exported("LLM", Counter.EMBEDDINGS_SKIPPED)

    def encoded_twice() -> float:
        return exported("Encoder", Counter.EMBEDDINGS_EVICTED_UNREAD) + AGENT_TURNS * exported(
            "Ingress", Counter.CALL_ACCEPT_TIMEOUTS, Counter.REQUEST_RETRIES
        )

    body = screenshots(AGENT_TURNS)
    ask(base_url, body)
    chance = random.Random(0)
    for number in range(FILLERS):
        filler = " ".join(f"{number}.{chance.randrange(10)}" for _ in range(FILLER_WORDS))
        usage = ask(base_url, chat({"role": "user", "content": filler}))["usage"]
        assert 2 * FILLER_WORDS <= usage["prompt_tokens"] <= MAX_MODEL_LEN
    before, twice_before = settled_together(encoded, encoded_twice)
    answer, num_received, num_encoded = ask_counted(base_url, body)
    assert num_received == AGENT_TURNS
    assert num_encoded == 0 if arch == "qwen3" else num_encoded > 0
    difference(answer, reference.agent[arch][f"turn {AGENT_TURNS}"], tolerance=TOLERANCE)
    until(lambda: encoded() >= before + num_encoded)
    after, twice_after, skipped_before = settled_together(encoded, encoded_twice, skipped)
    assert after <= before + num_encoded + twice_after - twice_before
    num_received = ask_counted(base_url, body)[1]
    # The last one too may be left to the prefix cache, if the smaller cache of the encoder has evicted it.
    assert num_received in ([1] if arch == "qwen3" else [0, 1])
    until(lambda: skipped() == skipped_before + AGENT_TURNS - num_received)  # the prefix cache has the others again
