"""Calls to replicas that are nobody's in particular. It must not know what is called."""

from __future__ import annotations

import contextvars
import uuid
from collections.abc import Callable
from typing import TypeVar

from ray.serve.context import _set_request_context

T = TypeVar("T")


def on_its_own(start: Callable[[], T]) -> T:
    """Starts a call that outlives the HTTP request it is started for: others may have come to share it.

    Serve cancels what was called on behalf of a request whose client has gone.
    """

    def alone() -> T:
        _set_request_context(_internal_request_id=uuid.uuid4().hex)
        return start()

    return contextvars.copy_context().run(alone)
