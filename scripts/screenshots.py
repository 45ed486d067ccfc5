"""Makes docs/page-light.png and docs/page-dark.png: screenshots of the web page of an application.

    python scripts/screenshots.py [--url http://127.0.0.1:8000]

Needs Chromium. The application is started and stopped here, unless `--url` names a running server.
"""

from __future__ import annotations

import argparse
import importlib
import io
import sys
from contextlib import nullcontext
from pathlib import Path

import yaml
from PIL import Image, ImageOps
from playwright.sync_api import Browser, FilePayload, expect, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from scripts.chromium import ARGUMENTS, MISSING, chromium  # noqa: E402

DOCS = ROOT / "docs"
QUESTION = "Describe the two pictures."
NAMES = ("circle-and-square.png", "triangles.png")
START_S = 600.0
ANSWER_MS = 120_000
SEEN_MS = 12_000
"""Duration for which the page shows the cluster's line before the screenshot."""


def pictures(scheme: str) -> list[FilePayload]:
    """Returns other pictures for each scheme, because repeated ones would be served from the cache."""
    made: list[FilePayload] = []
    for name, image in zip(NAMES, importlib.import_module("demo").pictures(), strict=True):
        file = io.BytesIO()
        (image if scheme == "light" else ImageOps.mirror(image)).save(file, "PNG")
        made.append({"name": name, "mimeType": "image/png", "buffer": file.getvalue()})
    return made


def shot(browser: Browser, url: str, scheme: str) -> Image.Image:
    """Returns the page with an answer to the second of two questions, so that the server is warm."""
    context = browser.new_context(
        color_scheme="dark" if scheme == "dark" else "light", viewport={"width": 1180, "height": 900}
    )
    page = context.new_page()
    page.set_default_timeout(ANSWER_MS)
    page.goto(url)
    page.get_by_label("Question").fill(QUESTION)
    for picture in pictures(scheme):
        page.locator("#files").set_input_files([picture])
        page.get_by_role("button", name="Ask").click()
        expect(page.locator("#answer")).to_have_attribute("aria-busy", "false", timeout=ANSWER_MS)
        expect(page.locator("#status")).to_contain_text("Answered", timeout=ANSWER_MS)
    page.wait_for_timeout(SEEN_MS)
    taken = page.screenshot(full_page=True)
    context.close()
    return Image.open(io.BytesIO(taken))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="URL of a running server; default: start one")
    url = parser.parse_args().url
    program = chromium()
    if program is None:
        print(MISSING, file=sys.stderr)
        return 1
    local_app = importlib.import_module("local_app")
    app = None if url else local_app.LocalApp(yaml.safe_load((ROOT / "serve_config.yaml").read_text()))
    with app or nullcontext(), sync_playwright() as playwright:
        if app is not None:
            app.start()
            app.wait(START_S, lambda name: print(f"{name} is up"), lambda _: None)
            url = app.base_url.removesuffix("/v1")
        browser = playwright.chromium.launch(executable_path=program, args=[*ARGUMENTS])
        for scheme in ("light", "dark"):
            file = DOCS / f"page-{scheme}.png"
            shot(browser, f"{url}/", scheme).convert("RGB").save(file, optimize=True)
            print(f"{file.relative_to(ROOT)}: {file.stat().st_size} bytes")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
