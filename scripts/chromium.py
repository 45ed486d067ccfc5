"""The Chromium of this system, and how it is started without a screen: for tests of the page and its screenshots."""

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
    # Names of other sites: this machine, so that nothing is asked outside of it.
    "--host-resolver-rules=MAP *.example 127.0.0.1",
)


def chromium() -> str | None:
    """The path of the program; None where there is none."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)
