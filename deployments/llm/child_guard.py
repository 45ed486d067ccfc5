"""Ends the child processes of a replica when the replica itself has ended, even if it was killed.

vLLM's engine runs in its own processes. A replica killed by SIGKILL cannot end them; they would keep the GPU's memory,
and the replica that Serve starts instead could not load its model. `guard_children` starts a small process that waits
for the replica's end of a pipe to close.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys

import psutil

GRACE_S = 10.0
"""Time between SIGTERM and SIGKILL for the orphans."""
POLL_S = 1.0
"""Interval at which the guard looks for new children while the engine starts."""


def guard_children(grace_s: float = GRACE_S) -> subprocess.Popen[bytes]:
    """Guards the descendants of this process, also those that start before `stop_looking`. They live no longer than the
    returned process object."""
    # In its own session: signals to the replica's process group must not end the guard first.
    command = [sys.executable, __file__, str(grace_s), str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, bufsize=0)


def stop_looking(guard: subprocess.Popen[bytes]) -> None:
    """Tells the guard all current descendants, after which it looks for no others: that takes CPU on a busy host."""
    assert guard.stdin is not None
    pids = [str(child.pid) for child in psutil.Process().children(recursive=True)]
    with contextlib.suppress(BrokenPipeError):  # the guard was killed
        guard.stdin.write(" ".join(pids).encode() + b"\n")


def main(grace_s: float, replica: int) -> None:
    """Ends the descendants of process `replica` once standard input closes, of which a line tells the last ones."""
    guarded: set[psutil.Process] = set()
    while not select.select([sys.stdin], [], [], POLL_S)[0]:
        with contextlib.suppress(psutil.NoSuchProcess):
            guarded.update(psutil.Process(replica).children(recursive=True))
    for pid in sys.stdin.buffer.readline().split():
        with contextlib.suppress(psutil.NoSuchProcess):
            guarded.add(psutil.Process(int(pid)))
    sys.stdin.buffer.read()  # returns when no process has the other end open
    guarded.discard(psutil.Process())
    for process in guarded:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, surviving = psutil.wait_procs(guarded, timeout=grace_s)
    for process in surviving:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
