"""What a worker process answers when its work fails."""

from __future__ import annotations

import json
import multiprocessing
from multiprocessing.connection import Connection
from threading import Thread

import pytest

from deployments.encoder_replica.decode.worker_process import MAX_ANSWER_BYTES, NOT_PROCESSED, Decoder, answer_tasks
from encoder.images.size import ImageError
from encoder.item_header import MAX_HEADER_BYTES


def work(task: str) -> list[bytes]:
    if task == "bad":
        raise ImageError("not an image")
    if task == "bug":
        raise KeyError("/a/path/of/this/machine")
    return [b"{}", task.encode()]


def echo(task: str) -> list[bytes]:
    return [task.encode()]


def answers(ours: Connection, task: str) -> bytes:
    ours.send(task)
    assert ours.recv_bytes() == b"started"
    return ours.recv_bytes()


def test_a_worker_survives_what_its_work_raises() -> None:
    """Processors of a hundred models raise anything; a worker of vLLM's takes many seconds to start again."""
    ours, theirs = multiprocessing.Pipe()
    thread = Thread(target=answer_tasks, args=(theirs, 2**40, work))
    thread.start()
    try:
        assert ours.recv_bytes() == b"ready"
        assert json.loads(answers(ours, "bad")) == {"error": "not an image"}
        assert json.loads(answers(ours, "bug")) == {"error": NOT_PROCESSED}, "the error's text is not shown"
        assert answers(ours, "good") == b"{}"
        assert ours.recv_bytes() == b"good"
    finally:
        ours.close()
        thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("limit", [MAX_ANSWER_BYTES, 2 * MAX_HEADER_BYTES])
def test_the_json_of_an_answer_is_within_its_limit(limit: int) -> None:
    """A header of vLLM's processor may be longer than those of decoded images: such a file ended its worker, and each
    time that it was sent the next one."""
    decoder = Decoder(answer_tasks, 2**40, echo, max_answer_bytes=limit)
    try:
        worker = decoder._process.pid
        good, bad = (json.dumps({"runs": "x" * (limit - 12 + over)}) for over in (0, 1))
        assert decoder.run(good, lambda answer, _: len(answer), 60) == limit
        assert decoder._process.pid == worker
        with pytest.raises(ImageError, match="its decoder process ended"):
            decoder.run(bad, lambda answer, _: len(answer), 60)
    finally:
        decoder.stop()
