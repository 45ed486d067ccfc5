"""A headless Chromium of the system, and what a test wants of a page in it. It must not know the page.

Where there is no Chromium, tests that want one are skipped, unless the environment says that there has to be one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

PROGRAMS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
REQUIRED = "VITRAY_BROWSER_TESTS"
"""The environment variable that, set to "required", makes a missing Chromium a failure."""
TIMEOUT_MS = 60_000
VIEWPORT = {"width": 1240, "height": 900}

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
    """The path of a Chromium of the system."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


@contextmanager
def started() -> Iterator[Browser]:
    """Skips or fails the test where there is no Chromium."""
    program = chromium()
    if program is None:
        missing = "no Chromium on this machine (Debian: apt-get install chromium)"
        if os.environ.get(REQUIRED) == "required":
            pytest.fail(missing)
        pytest.skip(missing)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, headless=True, args=[*ARGUMENTS])
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """A page, what it asked for, and what it complained of."""

    def __init__(self, context: BrowserContext) -> None:
        self.page: Page = context.new_page()
        self.page.set_default_timeout(TIMEOUT_MS)
        self.asked: list[str] = []
        self.failed: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("requestfailed", lambda request: self.failed.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda line: self.complaints.append(line.text) if line.type == "error" else None)
