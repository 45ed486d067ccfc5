"""When an encoder is too busy for an image: by the work that would be done before it."""

from __future__ import annotations

import pytest

from deployments.common.throughput import InFlightTokens
from deployments.encoder_replica.busy import is_too_busy
from deployments.routing.affinity import Call

SPEED = 1000.0


@pytest.mark.parametrize(
    ("cost", "bound_s", "expected"),
    [
        (600, 0.5, True),  # behind both jobs, 700 tokens
        (600, 0.7, False),
        (250, 0.5, False),  # before the second job
        (250, 0.2, True),
        (50, 0.0, False),  # before all
    ],
)
def test_the_images_own_place_counts(cost: int, bound_s: float, expected: bool) -> None:
    """A small image overtakes the later images of a large request, so these do not delay it."""
    now_s = 10.0
    work = InFlightTokens(lambda: now_s)
    with work.job(300, now_s + 0.1), work.job(400, now_s + 0.5):
        call = Call("ab" * 32, 50, cost=cost)
        assert is_too_busy(call, work, tokens_per_s=SPEED, max_backlog_s=bound_s, now_s=now_s) is expected


def test_a_large_image_waits_for_as_long_as_it_takes_itself() -> None:
    """Elsewhere it would at best begin earlier by the time that it needs anyway."""
    work = InFlightTokens(lambda: 0.0)
    with work.job(300, 0.0):
        for tokens, expected in ((299, True), (300, False)):
            call = Call("ab" * 32, tokens, cost=tokens)
            assert is_too_busy(call, work, tokens_per_s=SPEED, max_backlog_s=0.06, now_s=0.0) is expected


def test_an_encoder_of_unknown_speed_takes_everything() -> None:
    work = InFlightTokens(lambda: 0.0)
    with work.job(10**9, 0.0):
        assert not is_too_busy(Call("ab" * 32, 50, cost=50), work, tokens_per_s=0.0, max_backlog_s=0.0, now_s=1.0)
