"""Ends the processes that a replica started when the replica itself is gone, however it died.

vLLM's engine runs in processes of its own. A replica that is killed with -9 cannot end them, and they would go on
holding the GPU's memory, so that the replica which Serve starts instead could not load its model. `guard_children`
starts a small process that waits for the replica's end of a pipe to close. It must not know what the processes are.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

import psutil

GRACE_S = 10.0
"""Between asking the orphans to stop and killing them."""


def guard_children(grace_s: float = GRACE_S) -> subprocess.Popen[bytes]:
    """Guards every process that descends from this one now. Keep what is returned for as long as they are to live."""
    children = psutil.Process().children(recursive=True)
    named = [f"{child.pid}:{child.create_time()}" for child in children]
    # A session of its own: signals to the replica's process group must not end the guard first.
    command = [sys.executable, __file__, str(grace_s), *named]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def main(grace_s: float, named: list[str]) -> None:
    """`named`: `pid:create_time` of the processes to end once standard input closes."""
    guarded = []
    for name in named:
        pid, _, created = name.partition(":")
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(pid))
            if process.create_time() == float(created):
                guarded.append(process)
    sys.stdin.buffer.read()  # returns when no process holds the other end any more
    left = [process for process in guarded if process.is_running()]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, stubborn = psutil.wait_procs(left, timeout=grace_s)
    for process in stubborn:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
