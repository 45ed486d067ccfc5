"""One process that decodes images, and its owner's handle on it.

What it answers is bytes and JSON and never a pickle: a file that takes over its decoder must not get further. It leaves
pixels in shared memory where it was given some, else sends them through the pipe. It ends by itself when its owner is
gone, however that died. It must not know of event loops, nor what becomes of the pixels.
"""

from __future__ import annotations

import io
import json
import logging
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from deployments.arena import ArenaHandle, Lease
from deployments.memory_bound import OutOfBoundError, memory_bound
from encoder.decoded import Decoded, decode
from encoder.image_size import ImageError, ImageRules, PixelBounds

if TYPE_CHECKING:
    from encoder.preprocess import Pixels

logger = logging.getLogger("ray.serve")

START_S = 120.0
"""For a process to start and import what it needs."""

GAVE_UP = "the decoder gave up on this image"

_READY, _STARTED = b"ready", b"started"


@dataclass(frozen=True)
class Task:
    """One image to decode."""

    data: bytes
    bounds: PixelBounds | None
    resize: bool
    """To the size that the rules give, `[3, H, W]`; else `[H, W, 3]` as it was decoded."""
    start: int
    """Where in the shared memory the pixels go."""
    num_bytes: int
    """How many bytes are free there; 0 for the pipe."""


def serve_tasks(
    connection: Connection, rules: ImageRules, max_pixels: int, memory_bytes: int, arena: ArenaHandle, resizes: bool
) -> None:
    """The process: answers tasks until its owner's end of the pipe closes. `resizes`: what it does as a rule."""
    memory = np.frombuffer(arena.open(), np.uint8)
    _values(Task(_warm_up_file(), None, resizes, 0, 0), rules, max_pixels)
    connection.send_bytes(_READY)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        if task.resize:
            _resizing()  # before the image's time begins
        connection.send_bytes(_STARTED)
        try:
            with memory_bound(memory_bytes):
                values = _values(task, rules, max_pixels)
        except (ImageError, OutOfBoundError) as error:
            over = f"decoding takes more than {memory_bytes} bytes of memory, the limit"
            told = over if isinstance(error, OutOfBoundError) else str(error)
            connection.send_bytes(json.dumps({"error": told}).encode())
            continue
        shared = values.nbytes <= task.num_bytes
        if shared:
            memory[task.start : task.start + values.nbytes].reshape(values.shape)[...] = values
        connection.send_bytes(json.dumps({"shape": values.shape, "shared": shared}).encode())
        if not shared:
            connection.send_bytes(values.reshape(-1).data)


def _warm_up_file() -> bytes:
    """A file whose decoding loads what is loaded once: Pillow's formats and, for resizing, torch."""
    Image.init()
    file = io.BytesIO()
    Image.new("RGB", (2, 2)).save(file, "PNG")
    return file.getvalue()


def _values(task: Task, rules: ImageRules, max_pixels: int) -> NDArray[np.uint8]:
    decoded = decode(task.data, rules, task.bounds, max_pixels_decoded=max_pixels)
    if not task.resize:
        return decoded.values
    return _resizing()(decoded, rules).values


def _resizing() -> Callable[[Decoded, ImageRules], Pixels]:
    """Loads torch, which a process that only decodes does without, on its first call."""
    import torch

    from encoder.preprocess import resize

    torch.set_num_threads(1)  # the processes are the parallelism
    return resize


class Decoder:
    """A process of its own, started anew whenever it is lost. Used by one thread at a time."""

    def __init__(
        self, rules: ImageRules, max_pixels: int, memory_bytes: int, arena: ArenaHandle, *, resizes: bool
    ) -> None:
        """`memory_bytes` bounds what one image may take."""
        self._settings = (rules, max_pixels, memory_bytes, arena, resizes)
        self._stopped = False
        self._ready = False
        self._start()

    def run(self, task: Task, lease: Lease | None, timeout_s: float) -> NDArray[np.uint8]:
        """The task's pixels, in the lease where they are there. `timeout_s` counts from when the process has the task.

        Raises:
            ImageError: the file cannot be decoded, took too long, or killed its decoder.
        """
        if not self._hand_over(task):
            raise ImageError(GAVE_UP)
        try:
            if not self._connection.poll(timeout_s):
                self._restart()
                raise ImageError(f"decoding took longer than {timeout_s:g} s")
            answer = json.loads(self._connection.recv_bytes())
            if "error" in answer:
                raise ImageError(str(answer["error"]))
            shape = tuple(int(side) for side in answer["shape"])
            if answer["shared"] and lease is not None:
                return lease.array(shape)
            return np.frombuffer(bytearray(self._connection.recv_bytes()), np.uint8).reshape(shape)
        except (EOFError, OSError) as error:
            self._restart()
            raise ImageError(GAVE_UP) from error

    def stop(self) -> None:
        """Ends the process, whatever it does."""
        self._stopped = True
        self._end()

    def _hand_over(self, task: Task) -> bool:
        """Gives the process the task; one that was lost before is no fault of this image, so a new one gets it."""
        for _ in range(2):
            try:
                if not self._ready:
                    self._expect(_READY)
                    self._ready = True
                self._connection.send(task)
                self._expect(_STARTED)
                return True
            except (EOFError, OSError):
                logger.warning("a decoder was lost and is started anew")
                self._restart()
        return False

    def _expect(self, word: bytes) -> None:
        """Waits for the process's word; raises EOFError where another comes or none."""
        if not self._connection.poll(START_S) or self._connection.recv_bytes() != word:
            raise EOFError

    def _start(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        # A fork of a process with CUDA or threads is not safe.
        self._process = multiprocessing.get_context("spawn").Process(
            target=serve_tasks, args=(theirs, *self._settings), name="decoder", daemon=True
        )
        self._ready = False
        self._process.start()
        theirs.close()  # so that its end shows when the process is gone

    def _restart(self) -> None:
        self._end()
        if not self._stopped:
            self._start()

    def _end(self) -> None:
        self._process.kill()
        self._process.join()  # from here on it writes to nobody's lease
        self._connection.close()
