"""Finds this system's Chromium and gives its arguments for running without a screen: for tests and screenshots."""

from __future__ import annotations

import shutil

PROGRAMS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
MISSING = "no Chromium on this machine (Debian: apt-get install chromium)"

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # Resolve the names of other sites to this machine, so that no request leaves it.
    "--host-resolver-rules=MAP *.example 127.0.0.1",
)


def chromium() -> str | None:
    """Returns the path of the program; None if it is not installed."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)
