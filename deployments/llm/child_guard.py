"""Ends the child processes of a replica when the replica itself has ended, even if it was killed.

vLLM's engine runs in its own processes. A replica killed by SIGKILL cannot end them; they would keep the GPU's memory,
and the replica that Serve starts instead could not load its model. `guard_children` starts a small process that waits
for the replica's end of a pipe to close.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

import psutil

GRACE_S = 10.0
"""Time between SIGTERM and SIGKILL for the orphans."""


def guard_children(grace_s: float = GRACE_S) -> subprocess.Popen[bytes]:
    """Guards all current descendants of this process, which live no longer than the returned process object."""
    children = psutil.Process().children(recursive=True)
    process_names = [f"{child.pid}:{child.create_time()}" for child in children]
    # In its own session: signals to the replica's process group must not end the guard first.
    command = [sys.executable, __file__, str(grace_s), *process_names]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def main(grace_s: float, process_names: list[str]) -> None:
    """Ends the processes of `process_names`, `pid:create_time` each, once standard input closes."""
    guarded = []
    for name in process_names:
        pid, _, created = name.partition(":")
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(pid))
            if process.create_time() == float(created):
                guarded.append(process)
    sys.stdin.buffer.read()  # returns when no process has the other end open
    running = [process for process in guarded if process.is_running()]
    for process in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, surviving = psutil.wait_procs(running, timeout=grace_s)
    for process in surviving:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
