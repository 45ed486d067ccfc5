"""What a worker process answers when its work fails."""

from __future__ import annotations

import json
import multiprocessing
from multiprocessing.connection import Connection
from threading import Thread

from deployments.encoder_replica.decode.worker_process import NOT_PROCESSED, answer_tasks
from encoder.images.size import ImageError


def work(task: str) -> list[bytes]:
    if task == "bad":
        raise ImageError("not an image")
    if task == "bug":
        raise KeyError("/a/path/of/this/machine")
    return [b"{}", task.encode()]


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
