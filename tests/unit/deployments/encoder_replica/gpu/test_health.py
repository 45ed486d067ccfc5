"""A device that fails for good: what says so, what does not, and that nothing is encoded on it any more."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import cast

import pytest
import torch

from deployments.common.replica_errors import DeviceFailedError, DeviceMemoryError
from deployments.encoder_replica.gpu.completion import Completion
from deployments.encoder_replica.gpu.health import MAX_OUT_OF_MEMORY_IN_A_ROW, Fault
from deployments.encoder_replica.gpu.jobs import Job, WorkerEvents
from deployments.ingress.failures import MAX_ATTEMPTS
from encoder.interface import LaunchedBatch
from tests.unit.deployments.encoder_replica.gpu.fake_encoder import WAIT_S, FakeEncoder, Owned, image, value_of

ILLEGAL = "CUDA error: an illegal memory access was encountered"
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the machine's: after an error, the device is asked whether it is lost."""

    def lost(device: torch.device) -> None:
        raise torch.AcceleratorError(ILLEGAL)

    monkeypatch.setattr("torch.cuda.synchronize", lost)


@pytest.fixture
def faults() -> list[Fault]:
    """Those that were told."""
    return []


@pytest.fixture
def completion(faults: list[Fault]) -> Completion:
    return Completion(WorkerEvents(on_gpu_failure=faults.append), retry=lambda _: None, allocate=None)


def encode_one(completion: Completion) -> None:
    encoder = FakeEncoder()
    (launched,) = encoder.launch_batches([image(1)])
    completion.complete_batch(cast(LaunchedBatch, launched), [Job(image(1), 1, 0.0, 0.0)], 0.0)


@pytest.mark.parametrize("error", [torch.AcceleratorError(ILLEGAL), RuntimeError(ILLEGAL)])
def test_one_cuda_error_is_enough(completion: Completion, faults: list[Fault], error: Exception) -> None:
    completion.diagnose(error, alone=False)
    assert completion.fault is Fault.CUDA_ERROR
    completion.diagnose(error, alone=True)
    encode_one(completion)
    assert completion.fault is Fault.CUDA_ERROR
    assert faults == [Fault.CUDA_ERROR], "told once"


def test_a_cuda_error_after_which_the_device_works_is_no_fault(
    completion: Completion, faults: list[Fault], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One image for which a kernel is missing would fail one encoder after another."""
    missing = torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device")
    with monkeypatch.context() as works:
        works.setattr("torch.cuda.synchronize", lambda device: None)
        completion.diagnose(missing, alone=True)
    assert (completion.fault, faults) == (None, [])
    completion.diagnose(missing, alone=True)
    assert faults == [Fault.CUDA_ERROR]


@pytest.mark.parametrize("error", [NO_MEMORY, torch.AcceleratorError("CUDA error: out of memory")])
def test_memory_has_to_run_out_again_and_again(completion: Completion, faults: list[Fault], error: Exception) -> None:
    """Whole batches do not count, they are tried image by image; and what is encoded between is a sign of health."""
    for _ in range(3):
        encode_one(completion)
        for _ in range(MAX_OUT_OF_MEMORY_IN_A_ROW - 1):
            completion.diagnose(error, alone=True)
            completion.diagnose(error, alone=False)
    assert completion.fault is None
    completion.diagnose(error, alone=True)
    assert faults == [completion.fault] == [Fault.OUT_OF_MEMORY]


def test_one_request_cannot_make_a_device_sick_by_its_size() -> None:
    assert MAX_OUT_OF_MEMORY_IN_A_ROW > MAX_ATTEMPTS


def test_other_errors_say_nothing_about_the_device(completion: Completion, faults: list[Fault]) -> None:
    for error in (ValueError("a grid that cannot be"), RuntimeError("shape mismatch"), MemoryError()):
        for _ in range(20):
            completion.diagnose(error, alone=True)
    assert completion.fault is None
    assert faults == []


@pytest.fixture
def owned(faults: list[Fault]) -> Iterator[Owned]:
    owned = Owned(events=WorkerEvents(on_gpu_failure=faults.append))
    yield owned
    owned.encoder.gate.set()
    owned.worker.stop()
    owned.join()


@pytest.mark.parametrize("at", ["bad", "lost"])
def test_after_a_cuda_error_nothing_is_encoded_any_more(owned: Owned, faults: list[Fault], at: str) -> None:
    """Neither the batch's other images, which are tried alone otherwise, nor what waits, nor what comes later."""
    first = owned.occupy()
    getattr(owned.encoder, at)[2] = torch.AcceleratorError(ILLEGAL)
    batch = [owned.worker.submit(image(value)) for value in (1, 2, 3)]
    owned.encoder.gate.set()
    assert value_of(first) == 0
    for future in batch:
        with pytest.raises(DeviceFailedError):
            future.result(WAIT_S)
    with pytest.raises(DeviceFailedError, match="cuda_error"):
        owned.worker.submit(image(4))
    assert owned.encoder.calls == [[0], [1, 2, 3]]
    assert faults == [owned.worker.fault] == [Fault.CUDA_ERROR]
    assert owned.worker.is_alive
    assert owned.worker._queued_tokens == 0


def test_a_cuda_error_in_the_wait_for_room_counts(owned: Owned, faults: list[Fault]) -> None:
    first = owned.occupy()
    owned.encoder.room_error = torch.AcceleratorError(ILLEGAL)
    waiting = owned.worker.submit(image(1))
    owned.encoder.gate.set()
    assert value_of(first) == 0
    with pytest.raises(DeviceFailedError):
        waiting.result(WAIT_S)
    assert owned.encoder.calls == [[0]]
    assert faults == [Fault.CUDA_ERROR]
    assert owned.worker.is_alive


def test_a_cuda_error_in_an_idle_moment_counts() -> None:
    told: queue.SimpleQueue[Fault] = queue.SimpleQueue()
    owned = Owned(events=WorkerEvents(on_gpu_failure=told.put))
    owned.encoder.idle_error = torch.AcceleratorError(ILLEGAL)
    assert value_of(owned.worker.submit(image(1))) == 1  # after it comes an idle moment
    assert told.get(timeout=WAIT_S) is Fault.CUDA_ERROR
    owned.worker.stop()
    owned.join()


def test_an_image_too_large_for_the_memory_fails_alone(owned: Owned, faults: list[Fault]) -> None:
    first = owned.occupy()
    owned.encoder.bad[2] = NO_MEMORY
    batch = [owned.worker.submit(image(value)) for value in (1, 2, 3)]
    owned.encoder.gate.set()
    assert [value_of(first), value_of(batch[0]), value_of(batch[2])] == [0, 1, 3]
    with pytest.raises(DeviceMemoryError):
        batch[1].result(WAIT_S)
    assert owned.worker.fault is None
    assert faults == []


def test_memory_that_never_comes_back_is_a_fault(owned: Owned, faults: list[Fault]) -> None:
    for value in range(MAX_OUT_OF_MEMORY_IN_A_ROW):
        owned.encoder.bad[value] = NO_MEMORY
    errors = [owned.worker.submit(image(value)).exception(WAIT_S) for value in range(MAX_OUT_OF_MEMORY_IN_A_ROW)]
    assert [type(error) for error in errors] == [DeviceMemoryError] * (len(errors) - 1) + [DeviceFailedError]
    assert faults == [Fault.OUT_OF_MEMORY]
