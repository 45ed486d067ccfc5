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
    """Guards the descendants of this process that are there when `stop_looking` is called, and until then those that
    the guard has seen, POLL_S after their start at the latest. They live no longer than the returned process object."""
    # In its own session: signals to the replica's process group must not end the guard first.
    command = [sys.executable, __file__, str(grace_s), str(os.getpid())]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, bufsize=0)
    assert guard.stdin is not None
    os.register_at_fork(after_in_child=guard.stdin.close)  # a fork that had it open would outlive the replica unseen
    return guard


def stop_looking(guard: subprocess.Popen[bytes]) -> None:
    """Tells the guard all current descendants, after which it looks for no others: looking takes CPU on a busy host."""
    assert guard.stdin is not None
    children = psutil.Process().children(recursive=True)
    names = [f"{child.pid}:{child.create_time()}" for child in children if child.pid != guard.pid]
    with contextlib.suppress(BrokenPipeError):  # the guard was killed
        guard.stdin.write(" ".join(names).encode() + b"\n")


def main(grace_s: float, replica: int) -> None:
    """Ends the descendants of process `replica` once standard input closes. A line on standard input lists the final
    ones, `pid:create_time` each, and ends the search for others."""
    guarded: set[psutil.Process] = set()
    while not select.select([sys.stdin], [], [], POLL_S)[0]:
        with contextlib.suppress(psutil.NoSuchProcess):
            guarded.update(psutil.Process(replica).children(recursive=True))
    for name in sys.stdin.buffer.readline().decode().split():
        pid, _, created = name.partition(":")
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(pid))
            if process.create_time() == float(created):
                guarded.add(process)
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
