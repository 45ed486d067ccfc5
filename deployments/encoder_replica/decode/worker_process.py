"""Worker process that decodes images and videos, and its parent's handle.

The worker answers with bytes and JSON, never a pickle: a file that takes over its decoder must not reach the parent.
It writes pixels to shared memory if the task has an allocation there, else to the pipe. It exits when its parent has
ended, even if the parent was killed.
"""

from __future__ import annotations

import io
import json
import logging
import math
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from deployments.common.child_process import spawn
from deployments.common.replica_errors import WorkerEndedError
from deployments.encoder_replica.decode.memory_bound import MemoryLimitError, limit_memory
from deployments.encoder_replica.decode.video_task import ChunkTask, FrameReader, HeaderTask
from deployments.transfer.shared_memory import Allocation
from encoder.images.decoded import Decoded, decode
from encoder.images.size import ImageError, ImageRules, PixelBounds

if TYPE_CHECKING:
    from encoder.pixels.preprocess import Pixels

logger = logging.getLogger("ray.serve")

T = TypeVar("T")
Receive = Callable[[int], bytes]
"""Receives another message; the argument limits its bytes."""

START_TIMEOUT_S = 120.0
"""Timeout for a process to start and finish its imports, and for it to take a task."""
WATCH_INTERVAL_S = 0.25
"""Most time by which a process outlives a timeout."""

MAX_ANSWER_BYTES = 65_536
"""Limit of the JSON part of an answer."""

NOT_PROCESSED = "the file could not be processed"
DECODER_FAILED = "the file could not be decoded: its decoder process ended"

_READY, _STARTED = b"ready", b"started"


@dataclass(frozen=True)
class Task:
    """One image to decode."""

    data: bytes
    bounds: PixelBounds | None
    resize: bool
    """Whether to resize to the size that the rules give, `[3, H, W]`; else the decoded `[H, W, 3]` is returned."""
    offset: int
    """Offset in shared memory at which the pixels are stored."""
    num_bytes: int
    """Bytes allocated there; 0 if the pixels are sent through the pipe."""


def serve_tasks(
    connection: Connection, rules: ImageRules, max_pixels: int, memory_bytes: int, arena: mmap.mmap, resizes: bool
) -> None:
    """Answers tasks until the parent's end of the pipe closes. `resizes`: whether to warm up for resizing."""
    memory, video = np.frombuffer(arena, np.uint8), FrameReader(rules)
    _decode(Task(_warm_up_file(), None, resizes, 0, 0), rules, max_pixels)

    def begin(task: Task | HeaderTask | ChunkTask) -> None:
        if isinstance(task, ChunkTask) or (isinstance(task, Task) and task.resize):
            _import_resize()  # imports torch before the image's timeout begins

    def decode_task(task: Task | HeaderTask | ChunkTask) -> list[bytes | memoryview]:
        if isinstance(task, HeaderTask):
            return task.run()
        values = video.run(task, _import_resize()) if isinstance(task, ChunkTask) else _decode(task, rules, max_pixels)
        shared = values.nbytes <= task.num_bytes
        if shared:
            memory[task.offset : task.offset + values.nbytes].reshape(values.shape)[...] = values
        head = json.dumps({"shape": values.shape, "shared": shared}).encode()
        return [head] if shared else [head, values.reshape(-1).data]

    answer_tasks(connection, memory_bytes, decode_task, begin)


def answer_tasks(
    connection: Connection,
    memory_bytes: int,
    work: Callable[[Any], Sequence[bytes | memoryview]],
    begin: Callable[[Any], None] = lambda _: None,
) -> None:
    """Sends the messages that `work` returns for each task, or one message with its error.

    `begin` is called before the task's timeout begins.
    """
    connection.send_bytes(_READY)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        begin(task)
        connection.send_bytes(_STARTED)
        try:
            with limit_memory(memory_bytes):
                messages = work(task)
        except (ImageError, MemoryLimitError) as error:
            over = f"decoding takes more than {memory_bytes} bytes of memory, the limit"
            message = over if isinstance(error, MemoryLimitError) else str(error)
            messages = [json.dumps({"error": message}).encode()]
        except Exception:
            logger.exception("a file could not be processed")
            messages = [json.dumps({"error": NOT_PROCESSED}).encode()]
        for sent in messages:
            connection.send_bytes(sent)


def _warm_up_file() -> bytes:
    """Returns a file whose decoding imports Pillow's formats and, if resized, torch."""
    Image.init()
    file = io.BytesIO()
    Image.new("RGB", (2, 2)).save(file, "PNG")
    return file.getvalue()


def _decode(task: Task, rules: ImageRules, max_pixels: int) -> NDArray[np.uint8]:
    decoded = decode(task.data, rules, task.bounds, max_pixels_decoded=max_pixels)
    if not task.resize:
        return decoded.values
    return _import_resize()(decoded, rules).values


def _import_resize() -> Callable[[Decoded, ImageRules], Pixels]:
    """Imports torch on the first call, so that a process that only decodes does without."""
    import torch

    from encoder.pixels.preprocess import resize

    torch.set_num_threads(1)  # images are decoded in parallel by processes, not by threads
    return resize


def parse_pixels(
    answer: bytes, receive: Receive, allocation: Allocation | None, memory_bytes: int, ndim: int = 3
) -> NDArray[np.uint8]:
    """Returns a task's pixels, in the allocation if they were stored there. `ndim`: 3, or 4 for a video."""
    fields = json.loads(answer)
    shape = tuple(int(side) for side in fields["shape"])
    if len(shape) != ndim or min(shape) < 1:
        raise ValueError(f"pixels have the shape {shape}")
    if fields["shared"] and allocation is not None:
        return allocation.array(shape)
    return np.frombuffer(bytearray(receive(memory_bytes)), np.uint8).reshape(shape)


class DecoderLostError(ImageError):
    """The process ended while it had the file, which may be why."""


class Decoder:
    """Handle on one worker process, which is restarted when it is lost. For one thread at a time."""

    def __init__(
        self,
        serve: Callable[..., None],
        *settings: object,
        start_timeout_s: float = START_TIMEOUT_S,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        """`serve` runs in the process with its end of the pipe and `settings`. `max_answer_bytes`: limit of the JSON
        part of an answer; the process is killed for a longer one."""
        self._serve, self._settings, self._start_timeout_s = serve, settings, start_timeout_s
        self._max_answer_bytes = max_answer_bytes
        self._stopped = threading.Event()
        self._deadline_s = math.inf
        self._ready = False
        self.video = ""
        """Name of the video whose file the process has."""
        self._start()
        threading.Thread(target=self._watch, name="decoder-watch", daemon=True).start()

    def run(self, task: object, parse: Callable[[bytes, Receive], T], timeout_s: float, *, stateless: bool = True) -> T:
        """Returns what `parse` makes of the answer's first message; it may receive another one, of limited bytes.
        `timeout_s` is from the time at which the process receives the task to the end of its last message. A
        `stateless` task is given to a new process if this one has ended since its last task; another task needs what
        that process had.

        Raises:
            DecoderLostError: the process has ended.
            ImageError: the file cannot be decoded, or took too long.
            WorkerEndedError: no decoder process can be started.
        """
        self._send_task(task, stateless)
        try:
            with self._limit(timeout_s):
                answer = self._connection.recv_bytes(self._max_answer_bytes)
                message = json.loads(answer).get("error")
                if message is None:
                    return parse(answer, self._connection.recv_bytes)
        except TimeoutError as error:
            self._restart()
            raise ImageError(f"decoding took longer than {timeout_s:g} s") from error
        except (EOFError, ConnectionError) as error:
            self._restart()
            raise DecoderLostError(DECODER_FAILED) from error
        except MemoryError:
            self._restart()
            raise
        except Exception as error:  # of any type: an answer can be anything, of a process that a file has taken over
            self._restart()
            raise ImageError(DECODER_FAILED) from error
        raise ImageError(str(message))

    def stop(self) -> None:
        """Kills the process for good. A thread that waits for it sees its end, and may still use the connection."""
        self._stopped.set()
        self._end_process()

    def _send_task(self, task: object, stateless: bool) -> None:
        """Sends the task to the process, or to a new one: an earlier loss of the process is not this image's fault."""
        for _ in range(2):
            try:
                if not self._ready:
                    with self._limit(self._start_timeout_s):
                        self._expect(_READY)
                    self._ready = True
                with self._limit(self._start_timeout_s):
                    self._connection.send(task)
                    self._expect(_STARTED)
                return
            except (EOFError, OSError):
                logger.warning("a decoder process ended and is restarted")
                self._restart()
                if not stateless:
                    raise DecoderLostError(DECODER_FAILED) from None
        raise WorkerEndedError("no decoder process can be started")

    def _expect(self, message: bytes) -> None:
        """Waits for `message`. Raises EOFError or OSError if another message or none arrives."""
        if self._connection.recv_bytes(len(message)) != message:
            raise EOFError

    @contextmanager
    def _limit(self, timeout_s: float) -> Iterator[None]:
        """Ends the process after `timeout_s`, and raises TimeoutError where its end ends a call of the connection: part
        of a message can block them, too, in both directions."""
        self._deadline_s = deadline_s = time.monotonic() + timeout_s
        try:
            yield
        except (EOFError, OSError) as error:
            if time.monotonic() >= deadline_s:
                raise TimeoutError from error
            raise
        finally:
            self._deadline_s = math.inf

    def _watch(self) -> None:
        while not self._stopped.wait(WATCH_INTERVAL_S):
            if time.monotonic() >= self._deadline_s:
                self._process.kill()

    def _start(self) -> None:
        """Raises OSError, with the handle unchanged, if the system has no process or file left."""
        self._connection, self._process = spawn(self._serve, *self._settings, name="decoder")
        self._ready, self.video = False, ""

    def _restart(self) -> None:
        """Kills the process and starts another one; if that fails, the next task tries again."""
        self._kill()
        if not self._stopped.is_set():
            try:
                self._start()
            except OSError as error:
                logger.warning("a decoder cannot be started: %s", error)

    def _kill(self) -> None:
        self._end_process()
        self._connection.close()

    def _end_process(self) -> None:
        self._process.kill()
        self._process.join()  # from here on it cannot write to an allocation that is reused
