"""The thread that owns the GPU: what is packed together, what is refused, who is told when it fails.

One file, since each test holds the same encoder at its gate and looks at what the thread does meanwhile.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path

import pytest
import torch

from configs.encoder_config import EncoderConfig
from deployments.common.replica_errors import QueueFullError, WorkerEndedError
from deployments.encoder_replica.gpu.jobs import Encoded, WorkerEvents
from deployments.encoder_replica.gpu.worker import GpuWorker
from encoder.encoder import Encoder
from encoder.images.decoded import Decoded, decode
from encoder.packing.run_counts import RunCounts, RunRecord
from encoder.pixels.preprocess import Pixels
from encoder.staging.pipeline import Launched
from encoder.staging.staging import HostAllocator
from tests.unit.deployments.encoder_replica.gpu import fake_encoder
from tests.unit.deployments.encoder_replica.gpu.fake_encoder import (
    WAIT_S,
    FakeLaunched,
    Owned,
    image,
    value_of,
)
from tests.unit.deployments.samples import png


@pytest.fixture
def owned() -> Iterator[Owned]:
    owned = Owned()
    yield owned
    owned.encoder.gate.set()
    owned.worker.stop()
    owned.join()


def test_an_image_is_encoded_on_the_workers_thread(owned: Owned) -> None:
    encoded = owned.worker.submit(image(7)).result(WAIT_S)
    assert torch.equal(encoded.tokens, torch.full((1, 2), 7.0))
    assert encoded.queue_ms >= 0
    assert encoded.encode_ms >= 0
    assert owned.encoder.threads == {owned.worker._thread.ident}


def test_what_waits_while_the_gpu_is_busy_is_encoded_together(owned: Owned) -> None:
    first = owned.occupy()
    others = [owned.worker.submit(image(value)) for value in range(1, 6)]
    owned.encoder.gate.set()
    assert [value_of(future) for future in (first, *others)] == [0, 1, 2, 3, 4, 5]
    assert owned.encoder.calls == [[0], [1, 2, 3, 4, 5]]


@pytest.mark.parametrize("batch", [1, 3])
def test_a_small_image_waits_for_one_batch_of_a_large_request(batch: int) -> None:
    """What the device has been given stays; of the rest whoever is first in line is in the next batch."""
    owned = Owned()
    owned.encoder.at_once = batch
    now = time.perf_counter()
    owned.encoder.gate.clear()
    large = [owned.worker.submit(image(value), now + value) for value in range(1, 41)]
    assert owned.encoder.entered.acquire(timeout=WAIT_S)
    small = owned.worker.submit(image(99), now)
    owned.encoder.gate.set()
    assert value_of(small) == 99
    assert [value_of(future) for future in large] == list(range(1, 41))
    ran = [value for one in owned.encoder.ran for value in one]
    assert ran.index(99) in range(1, batch + 1), "the first may have been taken by itself"
    assert [value for value in ran if value != 99] == list(range(1, 41)), "each once, and by age"
    owned.worker.stop()
    owned.join()


def test_an_image_that_comes_in_the_wait_for_room_is_in_the_next_batch(owned: Owned) -> None:
    owned.encoder.at_once = 2
    first = owned.occupy()
    late: list[Future[Encoded]] = []

    def arrive() -> None:
        if len(owned.encoder.ran) == 2 and not late:
            late.append(owned.worker.submit(image(99), 0.0))

    owned.encoder.in_room = arrive
    others = [owned.worker.submit(image(value), 1.0 + value) for value in range(1, 6)]
    owned.encoder.gate.set()
    assert [value_of(future) for future in (first, *others)] == [0, 1, 2, 3, 4, 5]
    assert value_of(late[0]) == 99
    assert owned.encoder.ran == [[0], [1, 2], [99, 3], [4, 5]]


def test_what_is_not_worth_the_wait_is_launched_after_what_is_before_it(owned: Owned) -> None:
    owned.encoder.worth = 5
    first = owned.occupy()
    others = [owned.worker.submit(image(value, num_tokens=2)) for value in range(1, 5)]
    others += [owned.worker.submit(image(5, num_tokens=50)), owned.worker.submit(image(6))]
    owned.encoder.gate.set()
    assert [value_of(future) for future in (first, *others)] == list(range(7))
    assert owned.encoder.calls == [[0], [1, 2], [3, 4], [5], [6]]
    assert owned.encoder.waiting[:2] == [1, 60], "with what is under way"


def test_speed_is_measured_from_what_was_encoded(owned: Owned) -> None:
    owned.encoder.bad = {1: RuntimeError("broken")}
    assert owned.worker.tokens_per_s == 0
    wait([owned.worker.submit(image(1, num_tokens=500))], WAIT_S)
    assert owned.worker.tokens_per_s == 0
    assert value_of(owned.worker.submit(image(2, num_tokens=500))) == 2
    assert owned.worker.tokens_per_s > 0


def test_tokens_over_the_bound_are_refused_until_some_are_done() -> None:
    owned = Owned(max_queued_tokens=10)
    first = owned.occupy()
    second = owned.worker.submit(image(1, num_tokens=9))
    with pytest.raises(QueueFullError, match="holds 10 visual tokens; 1 more would exceed its limit of 10"):
        owned.worker.submit(image(2))
    owned.encoder.gate.set()
    wait([first, second], WAIT_S)
    assert owned.worker._queued_tokens == 0
    assert value_of(owned.worker.submit(image(3, num_tokens=10))) == 3
    owned.worker.stop()
    owned.join()


def test_an_image_over_the_bound_is_taken_when_nothing_waits() -> None:
    """Else it could never be encoded."""
    owned = Owned(max_queued_tokens=10)
    owned.encoder.gate.clear()
    large = owned.worker.submit(image(1, num_tokens=50))
    with pytest.raises(QueueFullError, match="holds 50 visual tokens"):
        owned.worker.submit(image(2, num_tokens=50))
    owned.encoder.gate.set()
    assert value_of(large) == 1
    owned.worker.stop()
    owned.join()


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), ValueError("odd grid"), MemoryError()])
def test_a_failing_image_fails_alone(error: Exception) -> None:
    retried: list[int] = []
    owned = Owned(events=WorkerEvents(on_retry=retried.append))
    owned.encoder.bad[3] = error
    first = owned.occupy()
    others = {value: owned.worker.submit(image(value)) for value in range(1, 6)}
    owned.encoder.gate.set()
    assert others[3].exception(WAIT_S) is error
    assert [value_of(future) for value, future in others.items() if value != 3] == [1, 2, 4, 5]
    assert value_of(first) == 0
    assert retried == [1]
    assert owned.worker.is_alive
    assert value_of(owned.worker.submit(image(9))) == 9
    owned.worker.stop()
    owned.join()


def test_a_cancelled_job_is_dropped_before_it_costs_anything(owned: Owned) -> None:
    owned.occupy()
    kept, dropped = owned.worker.submit(image(1)), owned.worker.submit(image(2, num_tokens=500))
    assert owned.worker._queued_tokens == 502
    assert dropped.cancel()
    assert owned.worker._queued_tokens == 2, "its place is free at once"
    owned.encoder.gate.set()
    assert value_of(kept) == 1
    assert owned.encoder.calls == [[0], [1]]


def test_what_is_being_encoded_cannot_be_cancelled(owned: Owned) -> None:
    running = owned.occupy()
    assert not running.cancel()
    owned.encoder.gate.set()
    assert value_of(running) == 0


def test_an_encoder_that_cannot_be_made_is_told_to_whoever_makes_the_worker() -> None:
    def broken() -> Encoder:
        raise FileNotFoundError("no checkpoint")

    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        GpuWorker(broken, max_queued_tokens=1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_nobody_hangs_when_the_thread_dies(error: BaseException) -> None:
    """Those who were being encoded, those who waited and those who come later are all told."""
    owned = Owned()
    owned.encoder.bad[0] = error
    encoding = owned.occupy()
    waiting = [owned.worker.submit(image(value)) for value in (1, 2)]
    waiting[0].cancel()
    owned.encoder.gate.set()
    assert isinstance(encoding.exception(WAIT_S), WorkerEndedError)
    assert isinstance(waiting[1].exception(WAIT_S), WorkerEndedError)
    owned.join()
    with pytest.raises(WorkerEndedError):
        owned.worker.submit(image(3))
    assert owned.worker._queued_tokens == 0


def test_stop_drains_what_is_queued_and_refuses_what_comes_later() -> None:
    owned = Owned()
    first = owned.occupy()
    before = owned.worker.submit(image(1))
    owned.worker.stop()
    after = owned.worker.submit(image(2))
    owned.encoder.gate.set()
    assert [value_of(first), value_of(before)] == [0, 1]
    assert isinstance(after.exception(WAIT_S), WorkerEndedError)
    owned.join()
    with pytest.raises(WorkerEndedError):
        owned.worker.submit(image(3))


def test_the_level_of_the_queue_is_told_at_every_change() -> None:
    levels: list[int] = []
    owned = Owned(events=WorkerEvents(on_queued_tokens=levels.append))
    first = owned.occupy()
    second = owned.worker.submit(image(1, num_tokens=4))
    owned.encoder.gate.set()
    wait([first, second], WAIT_S)
    owned.worker.stop()
    owned.join()
    assert levels == [1, 5, 4, 0]


def test_an_idle_worker_holds_no_embeddings(owned: Owned) -> None:
    """They are tens of megabytes each, and the thread may wait for the next image for hours."""
    tokens = weakref.ref(owned.worker.submit(image(1)).result(WAIT_S).tokens)
    deadline = time.monotonic() + WAIT_S
    while tokens() is not None and time.monotonic() < deadline:  # until the thread waits again
        time.sleep(0.01)
    assert tokens() is None


def test_idle_moments_are_the_encoders_on_its_own_thread() -> None:
    """One step at a time for as long as nothing waits, and none while something does."""
    told: list[RunCounts] = []
    owned = Owned(events=WorkerEvents(on_run=told.append))
    first = owned.occupy()
    owned.encoder.idle_steps = 3
    second = owned.worker.submit(image(1))
    assert owned.encoder.idle_steps == 3
    owned.encoder.gate.set()
    wait([first, second], WAIT_S)
    deadline = time.monotonic() + WAIT_S
    while owned.encoder.idle_steps > -1 and time.monotonic() < deadline:
        time.sleep(0.01)
    owned.worker.stop()
    owned.join()
    assert owned.encoder.idle_steps == -1, "three steps, and one that found nothing to do"
    assert owned.encoder.idle_threads == {owned.worker._thread.ident}
    assert [counts.replays for counts in told][-1] == 2


def test_runs_are_told_while_the_queue_never_empties() -> None:
    told: list[int] = []
    owned = Owned(events=WorkerEvents(on_run=lambda counts: told.append(counts.replays)))
    owned.encoder.at_once = 1
    first = owned.occupy()
    others = [owned.worker.submit(image(value)) for value in range(1, 4)]
    later: list[Future[Encoded]] = []

    def arrive() -> None:
        if len(later) < 5:
            later.append(owned.worker.submit(image(9)))

    owned.encoder.in_room = arrive
    owned.encoder.gate.set()
    wait([first, *others], WAIT_S)
    owned.worker.stop()
    owned.join()
    assert told == sorted(told)
    assert len(set(told)) > 3, "not only at the start and when all is done"


def test_no_moment_is_idle_while_a_batch_is_fetched(owned: Owned) -> None:
    """A graph is captured then, and nobody else may give the device work meanwhile."""
    deadline = time.monotonic() + WAIT_S
    while not owned.encoder.idle_threads and time.monotonic() < deadline:
        time.sleep(0.01)  # what it finds at its start
    owned.encoder.fetch_gate.clear()
    futures = [owned.worker.submit(image(1))]
    assert owned.encoder.entered.acquire(timeout=WAIT_S)
    owned.encoder.idle_steps = 1
    futures.append(owned.worker.submit(image(2)))
    assert owned.encoder.entered.acquire(timeout=WAIT_S)
    time.sleep(0.1)
    assert owned.encoder.idle_steps == 1
    owned.encoder.fetch_gate.set()
    wait(futures, WAIT_S)
    while owned.encoder.idle_steps > -1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert owned.encoder.idle_steps == -1, "it is looked for when the last one is answered"


def test_a_failure_in_an_idle_moment_ends_no_thread(owned: Owned) -> None:
    owned.encoder.idle_error = RuntimeError("no graph")
    assert value_of(owned.worker.submit(image(1))) == 1
    assert value_of(owned.worker.submit(image(2))) == 2
    assert owned.worker.is_alive
    deadline = time.monotonic() + WAIT_S
    while owned.worker._can_idle and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not owned.worker._can_idle


def test_the_next_batch_is_launched_while_the_last_is_fetched(owned: Owned) -> None:
    """Two may wait to be fetched and answered; the thread that owns the GPU stops at the third."""
    owned.encoder.fetch_gate.clear()
    futures = []
    for value in range(1, 4):
        futures.append(owned.worker.submit(image(value)))
        assert owned.encoder.entered.acquire(timeout=WAIT_S)
    assert owned.encoder.calls == [[1], [2], [3]]
    assert not any(future.done() for future in futures)
    waiting = [owned.worker.submit(image(value)) for value in (4, 5)]
    assert not owned.encoder.entered.acquire(timeout=0.2), "two are waiting already"
    owned.encoder.fetch_gate.set()
    assert [value_of(future) for future in (*futures, *waiting)] == [1, 2, 3, 4, 5]
    assert owned.encoder.calls[3:] == [[4, 5]]
    assert owned.encoder.fetch_threads.isdisjoint(owned.encoder.threads)
    assert owned.encoder.rooms == 8, "asked before each batch is collected, and before the next of its images"


def test_images_whose_embeddings_were_lost_are_encoded_again_one_by_one() -> None:
    retried: list[int] = []
    owned = Owned(events=WorkerEvents(on_retry=retried.append))
    error = RuntimeError("a device lost them")
    owned.encoder.lost[3] = error
    first = owned.occupy()
    others = {value: owned.worker.submit(image(value)) for value in range(1, 5)}
    owned.encoder.gate.set()
    assert others[3].exception(WAIT_S) is error
    assert [value_of(future) for value, future in others.items() if value != 3] == [1, 2, 4]
    assert value_of(first) == 0
    assert owned.encoder.calls == [[0], [1, 2, 3, 4], [1], [2], [3], [4]]
    assert retried == [1]
    owned.worker.stop()
    owned.join()


@pytest.mark.parametrize("fetching", [False, True])
def test_nothing_is_tried_again_after_the_stop(fetching: bool) -> None:
    """Who waits is told: another replica may encode the image."""
    owned = Owned()
    failing = owned.encoder.lost if fetching else owned.encoder.bad
    failing[2] = RuntimeError("odd")
    first = owned.occupy()
    others = [owned.worker.submit(image(value)) for value in (1, 2, 3)]
    owned.worker.stop()
    late = owned.worker.submit(image(4))
    owned.encoder.gate.set()
    assert value_of(first) == 0
    assert [type(future.exception(WAIT_S)) for future in (*others, late)] == [WorkerEndedError] * 4
    assert owned.encoder.calls == [[0], [1, 2, 3]]
    owned.join()


def test_a_fetch_that_ends_its_thread_is_told_to_those_who_wait() -> None:
    owned = Owned()
    owned.encoder.lost[1] = SystemExit(2)
    future = owned.worker.submit(image(1))
    assert isinstance(future.exception(WAIT_S), SystemExit)
    assert value_of(owned.worker.submit(image(2))) == 2
    owned.worker.stop()
    owned.join()


class Short(FakeLaunched):
    """Gives too few embeddings."""

    def fetch(self, allocate: HostAllocator | None = None) -> list[torch.Tensor]:
        return super().fetch(allocate)[1:]


class Untold(FakeLaunched):
    """Cannot tell how it ran."""

    @property
    def run_record(self) -> RunRecord | None:
        raise AttributeError("ran")

    @run_record.setter
    def run_record(self, _: RunRecord | None) -> None: ...


@pytest.mark.parametrize(("made", "error"), [(Untold, "ran"), (Short, "a batch of 1 images gave 0 embeddings")])
def test_a_batch_that_cannot_be_answered_is_told_to_those_who_wait(
    owned: Owned, monkeypatch: pytest.MonkeyPatch, made: type[FakeLaunched], error: str
) -> None:
    """What failed after the embeddings had come was logged alone, and who waited hung."""
    monkeypatch.setattr(fake_encoder, "FakeLaunched", made)
    futures = [owned.occupy(), *(owned.worker.submit(image(value)) for value in (1, 2))]
    owned.encoder.gate.set()
    assert [str(future.exception(WAIT_S)) for future in futures] == [error] * 3


@pytest.mark.parametrize("arch", ["qwen3_vl", "qwen2_5_vl"])
def test_images_that_were_packed_have_their_own_embeddings(checkpoints: dict[str, Path], arch: str) -> None:
    """The real encoder: images of several sizes, more than a batch takes, queued while one is being encoded."""
    config = EncoderConfig(encoder_cudagraph_token_budgets=(64, 128), encoder_cudagraph_max_images_per_batch=3)
    encoder, alone = (Encoder.from_checkpoint(checkpoints[arch], config, device="cpu") for _ in range(2))
    launch_batches, gate = encoder.launch_batches, threading.Event()
    calls: list[int] = []

    def gated(pixels: Sequence[Pixels | Decoded]) -> Iterator[Launched]:
        assert gate.wait(WAIT_S)
        calls.append(len(pixels))
        return launch_batches(pixels)

    encoder.launch_batches = gated  # type: ignore[method-assign]
    files = [png(64 + 16 * number, 48, (number * 20, 80, 160)) for number in range(10)]
    worker = GpuWorker(lambda: encoder, max_queued_tokens=10**6)
    # Resized by who decoded it, or left to the encoder.
    rules = encoder.identity.rules
    ways: list[Callable[[bytes], Pixels | Decoded]] = [encoder.prepare, lambda file: decode(file, rules)]
    futures = [worker.submit(ways[number % 2](file)) for number, file in enumerate(files)]
    gate.set()
    found = [future.result(WAIT_S).tokens for future in futures]
    worker.stop()
    worker._thread.join(WAIT_S)
    assert len(calls) <= 2, "the first may have been taken alone"
    for file, tokens in zip(files, found, strict=True):
        (expected,) = alone.encode([file])
        assert tokens.shape == expected.tokens.shape
        # Products of other shapes are summed in another order: float32 rounding, relative to the embedding's norm.
        assert torch.dist(tokens, expected.tokens) <= 1e-5 * torch.linalg.norm(expected.tokens)
