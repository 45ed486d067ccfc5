"""Transfer of an embedding through Ray's object store to an LLM replica, and from there in a message to its engine.

Three processes: the encoder, which copies the embedding to host memory as its replica does and returns it by reference;
the LLM replica; and the engine, for which a process with torch and pyzmq stands in. Ray actors stand in for Serve's
replicas.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.transfer.figures import Options, Took, change, device_here, sum_of_bits
from deployments.common.messages import EncodedImage, EncodeTimings
from encoder.checkpoint.image_rules import ImageRules
from encoder.staging.staging import Staging
from encoder.staging.streams import lanes_for

ROOT = Path(__file__).resolve().parents[2]
MERGE = 2
TIMINGS = EncodeTimings(0.0, 0.0, 0.0, 0.0, cached=False)


class Encoder:
    """The encoder, on its own GPU or the CPU."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._device = device_here()
        self._lanes = lanes_for(self._device)
        half = (0.5, 0.5, 0.5)
        self._staging = Staging(ImageRules(14, MERGE, 2, 56 * 56, 2**26, half, half), self._lanes)
        self._tokens = torch.zeros(0, width, dtype=torch.bfloat16, device=self._device)

    def encode(self, num_tokens: int) -> tuple[float, int, EncodedImage]:
        """Returns the time when the embedding was computed, the sum of its bits, and the embedding in host memory."""
        if len(self._tokens) != num_tokens:
            self._tokens = torch.randn(num_tokens, self._width, device=self._device).to(torch.bfloat16)
        change(self._tokens)
        bits = sum_of_bits(self._tokens)
        began = time.perf_counter()
        (fetched,) = self._staging.fetch(self._tokens, [num_tokens], self._lanes.compute.mark())
        return began, bits, EncodedImage.pack(fetched, "0" * 64, TIMINGS)


class LanguageModel:
    """The LLM replica: forwards embeddings to its engine process, as vLLM forwards requests."""

    def __init__(self) -> None:
        import zmq

        self._folder = tempfile.TemporaryDirectory(prefix="vitray-transfer-")
        context = zmq.Context()
        self._to, self._from = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        addresses = [f"ipc://{self._folder.name}/{name}" for name in ("to", "from")]
        self._to.bind(addresses[0])
        self._from.bind(addresses[1])
        self._from.setsockopt(zmq.RCVTIMEO, 120_000)
        self._engine = multiprocessing.get_context("spawn").Process(target=engine, args=addresses, daemon=True)
        self._engine.start()
        self._from.recv()  # waits for the engine's start

    def handle(self, came: tuple[float, int, EncodedImage]) -> float:
        """Returns the seconds from computation to arrival."""
        began, bits, image = came
        tokens = torch.from_numpy(image.bits).view(getattr(torch, image.dtype))
        shape = np.array(tokens.shape, dtype=np.int64)
        self._to.send_multipart([shape.tobytes(), image.bits.data], copy=False)
        ended, found = np.frombuffer(self._from.recv(), dtype=np.float64)
        if int(found) != bits:
            raise AssertionError(f"the received bits add up to {int(found)}, the sent ones to {bits}")
        return float(ended) - began


def engine(receives: str, sends: str) -> None:
    """Runs the engine: copies every received embedding to its device."""
    import zmq

    context = zmq.Context()
    came, told = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    came.connect(receives)
    told.connect(sends)
    device = device_here()
    torch.zeros(1, device=device)
    told.send(b"up")
    while True:
        shape, frame = came.recv_multipart(copy=False)
        size = tuple(np.frombuffer(shape.buffer, dtype=np.int64))
        bits = torch.from_numpy(np.frombuffer(frame.buffer, dtype=np.uint16).reshape(size))
        tokens = bits.view(torch.bfloat16).to(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ended = time.perf_counter()
        told.send(np.array([ended, sum_of_bits(tokens)], dtype=np.float64).tobytes())


def measure(asked: Options, *, num_gpus: int) -> dict[float, Took] | str:
    """Measures with two GPUs, or with one that both share; returns the reason if that fails."""
    try:
        import ray
        import zmq  # noqa: F401 - required by the processes started below
    except ImportError as error:
        return f"{error.name} is not installed"
    store = 6 * asked.most_bytes + 2**28
    environment = {"env_vars": {"PYTHONPATH": str(ROOT)}}
    ray.init(num_cpus=4, num_gpus=num_gpus, object_store_memory=store, include_dashboard=False, log_to_driver=False)
    try:
        share = min(num_gpus, 2) / 2
        options: dict[str, Any] = {"num_cpus": 1, "num_gpus": share, "runtime_env": environment}
        encoder: Any = ray.remote(Encoder).options(**options).remote(asked.width)
        model: Any = ray.remote(LanguageModel).options(**options).remote()
        found = {}
        for megabytes in asked.megabytes:
            count = asked.num_tokens(megabytes)
            seconds = [
                ray.get(model.handle.remote(encoder.encode.remote(count))) for _ in range(asked.warm_ups + asked.rounds)
            ]
            found[megabytes] = Took.of(seconds[asked.warm_ups :], 2 * asked.width * count)
        return found
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        ray.shutdown()
