"""A headless Chromium of the system, and what a test wants of a page in it.

Where there is no Chromium, tests that want one are skipped, unless the environment says that there has to be one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, ViewportSize, sync_playwright

from scripts.chromium import ARGUMENTS, MISSING, chromium

REQUIRED = "VITRAY_BROWSER_TESTS"
"""The environment variable that, set to "required", makes a missing Chromium a failure."""
TIMEOUT_MS = 60_000
VIEWPORT: ViewportSize = {"width": 1240, "height": 900}


@contextmanager
def started() -> Iterator[Browser]:
    """Skips or fails the test where there is no Chromium."""
    program = chromium()
    if program is None:
        if os.environ.get(REQUIRED) == "required":
            pytest.fail(MISSING)
        pytest.skip(MISSING)
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
