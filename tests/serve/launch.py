"""Runs a command so that it dies with the process that started it, and hears Ctrl-C even where a shell started the
tests in the background, which makes programs deaf to it.

    python launch.py PROGRAM ARGUMENT...
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.execv(sys.argv[1], sys.argv[1:])
