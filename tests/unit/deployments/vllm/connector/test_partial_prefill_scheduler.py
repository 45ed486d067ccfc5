"""vLLM's scheduler with the connector asked before it: how far a prompt is read while embeddings are on their way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deployments.vllm import compat
from tests.unit.deployments.transfer.stored_embeddings import eventually
from tests.unit.deployments.vllm.connector.test_ec_connector import (
    FIRST,
    SECOND,
    THIRD,
    Engine,
    engine,
    feature,
    number_of,
    request,
    video,
)

__all__ = ["engine"]  # a fixture

LEAST = 8
MISSING = "f" * 64


class OwnScheduler:
    """As far as vLLM's goes: takes whatever it is told, and has the tower run for `to_encode`."""

    to_encode: tuple[int, ...] = ()

    def __init__(self, connector: Any) -> None:
        self.ec_connector = connector

    def _try_schedule_encoder_inputs(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int, budget: int, shift_computed_tokens: int = 0
    ) -> tuple[list[int], int, int, int]:
        return list(self.to_encode), num_new_tokens, budget, shift_computed_tokens


def reading(connector: Any) -> Any:
    from deployments.vllm.connector.partial_prefill_scheduler import with_partial_prefill

    return with_partial_prefill(OwnScheduler)(connector)


@pytest.mark.parametrize(
    ("least", "reach"), [(LEAST, 10), (10, 10), (11, 0), (None, 0)], ids=["more", "enough", "too few", "not at all"]
)
def test_a_prompt_is_prefill_limit_up_to_the_first_image_that_is_not_there(
    engine: Engine, least: int | None, reach: int
) -> None:
    (image,), arrived = engine.given(1)
    engine.scheduler._min_tokens = least
    asked = request(feature(image, 2), feature(MISSING, 10), feature(image, 20))
    assert engine.scheduler.prefill_limit(asked, 0) == reach
    assert engine.scheduler.ensure_cache_available(asked, 0) == (reach > 0)
    assert engine.scheduler.prefill_limit(request(feature(image, 2), feature(image, 20)), 0) is None
    assert engine.scheduler.prefill_limit(request(), 0) is None
    engine.receiver.close(arrived)


def test_nothing_is_prefill_limit_before_the_first_image_or_in_the_middle_of_one(engine: Engine) -> None:
    """Text alone is not worth a step of the engine; of an image in part there is nothing to be read."""
    (image,), arrived = engine.given(1)
    engine.scheduler._min_tokens = 1
    assert engine.scheduler.prefill_limit(request(feature(MISSING, 500), feature(image, 600)), 0) == 0
    assert engine.scheduler.prefill_limit(request(feature(MISSING, 4), feature(image, 60)), 6) == 0
    assert engine.scheduler.prefill_limit(request(feature(MISSING, 0), feature(image, 60)), 6) is None
    engine.receiver.close(arrived)


def test_a_step_reads_no_further_than_what_has_arrived(engine: Engine) -> None:
    (image, other), arrived = engine.given(1, 2)
    engine.scheduler._min_tokens = LEAST
    scheduler = reading(engine.scheduler)
    asked = request(feature(image, 0), feature(other, 10), feature(MISSING, 20))
    assert scheduler._try_schedule_encoder_inputs(asked, 0, 100, 7, shift_computed_tokens=0) == ([], 20, 7, 0)
    assert scheduler._try_schedule_encoder_inputs(asked, 0, 5, 7) == ([], 5, 7, 0), "a step's own bound"
    assert scheduler._try_schedule_encoder_inputs(asked, 15, 100, 7) == ([], 0, 7, 0), "too little to be worth it"
    assert scheduler._try_schedule_encoder_inputs(asked, 26, 1, 7) == ([], 1, 7, 0), "the answer's own tokens"
    engine.receiver.close(arrived)


def test_half_of_the_requests_may_be_read_in_parts(engine: Engine) -> None:
    """Four run at once here. Who waits for an encoder that is stuck holds up nobody whose images are there."""
    (image, other), arrived = engine.given(1, 2)
    engine.scheduler._min_tokens = 1
    in_parts = [request(feature(image, 0), feature(MISSING, 10), name=str(number)) for number in range(3)]
    assert [engine.scheduler.prefill_limit(each, 0) for each in in_parts] == [10, 10, 0]
    assert engine.scheduler.prefill_limit(in_parts[0], 0) == 10
    assert engine.scheduler.prefill_limit(request(feature(image, 0), feature(other, 10), name="whole"), 0) is None
    engine.scheduler.request_finished(in_parts[0])
    assert [engine.scheduler.prefill_limit(each, 0) for each in in_parts[1:]] == [10, 10]
    whole = request(feature(image, 0), feature(other, 10), name="1")
    assert engine.scheduler.prefill_limit(whole, 0) is None, "its second image has come"
    assert engine.scheduler.prefill_limit(in_parts[0], 0) == 10
    engine.receiver.close(arrived)


def test_what_a_prompt_was_begun_with_stays_until_it_ends(engine: Engine) -> None:
    (image,), arrived = engine.given(1)
    engine.scheduler._min_tokens = 1
    asked = request(feature(image, 0), feature(MISSING, 10))
    assert engine.scheduler.prefill_limit(asked, 0) == 10
    engine.receiver.close(arrived)
    eventually(lambda: bool(engine.scheduler._scheduler.table._entries[image.digest].released))
    assert engine.can_load(image.digest)
    engine.scheduler.request_finished(asked)
    assert not engine.can_load(image.digest)


def test_an_item_is_never_encoded_in_the_engine(engine: Engine) -> None:
    """It could only come to that by a fault; then the engine ends rather than answer without the image."""
    (image,), arrived = engine.given(1)
    scheduler = reading(engine.scheduler)
    scheduler.to_encode = (1,)
    with pytest.raises(RuntimeError, match="which has no weights"):
        scheduler._try_schedule_encoder_inputs(request(feature(image, 0), feature(image, 10)), 0, 9, 7)
    engine.receiver.close(arrived)


def test_with_another_connector_it_is_vllms_own() -> None:
    compat.lookup("ECConnectorBase")
    scheduler = reading(SimpleNamespace())
    assert scheduler._try_schedule_encoder_inputs(request(), 0, 9, 7) == ([], 9, 7, 0)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_it_is_the_scheduler_that_vllm_would_have_taken(asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compat.lookup("Scheduler")
    from vllm.config import SchedulerConfig

    from deployments.vllm.connector import partial_prefill_scheduler

    config = SchedulerConfig.default_factory(
        async_scheduling=asynchronous,
        scheduler_cls="deployments.vllm.connector.partial_prefill_scheduler.make_scheduler",
    )
    made: list[Any] = []
    monkeypatch.setattr(
        partial_prefill_scheduler,
        "with_partial_prefill",
        lambda base: lambda *args, **kwargs: made.append((base, args, kwargs)),
    )
    vllm_config = SimpleNamespace(scheduler_config=config)
    config.get_scheduler_cls()(vllm_config, log_stats=True)
    ((base, args, kwargs),) = made
    assert base.__name__ == ("AsyncScheduler" if asynchronous else "Scheduler")
    assert (args, kwargs) == ((vllm_config,), {"log_stats": True})
    assert config.scheduler_cls == "deployments.vllm.connector.partial_prefill_scheduler.make_scheduler"


def test_a_video_is_read_up_to_the_first_chunk_that_is_not_there(engine: Engine) -> None:
    """The text before a chunk's rows, such as its time, is read with the chunk before."""
    engine.scheduler._min_tokens = 1
    asked, arrived = request(video(3), feature(MISSING, 40)), []
    assert engine.scheduler.prefill_limit(asked, 0) == 0
    for chunk, limit in ((FIRST, 3 + 10), (SECOND, 3 + 18), (THIRD, 40)):
        arrived.append(engine.given(number_of(chunk))[1])
        assert engine.scheduler.prefill_limit(asked, 0) == limit
    assert engine.scheduler.prefill_limit(asked, 13) == 27
    for each in arrived:
        engine.receiver.close(each)
