"""Small servers of the standard library, each on a thread, for as long as a test needs them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import BaseServer

LOOK_S = 0.01
"""How long the end of a server takes: it looks so often whether it is to end, by default twice a second."""


@contextmanager
def serving(server: BaseServer) -> Iterator[None]:
    """It listens already; it is closed at the end."""
    thread = threading.Thread(target=server.serve_forever, args=(LOOK_S,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
