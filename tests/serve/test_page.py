"""The page at `/` in a real browser: the shipped model behind a key, and two encoders whose cluster it shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from click.testing import CliRunner
from playwright.sync_api import Browser, FilePayload, Locator, Page, Route, expect

from deployments.cli.ask import ask
from deployments.common.api_error import ApiError, error_head_and_body
from tests.serve import browser as browsers
from tests.serve.asking import KEY, post
from tests.serve.browser import TIMEOUT_MS, VIEWPORT, Watched
from tests.serve.conversations import about
from tests.serve.pictures import circle_and_square, encoded, picture, three_triangles, url
from tests.threaded import serving
from tests.video_files import Clip

pytestmark = pytest.mark.slow

LONG = {"max_tokens": 7000, "ignore_eos": True}
CHAT = "**/v1/chat/completions"
HOSTILE = "<img src=x onerror=alert(1)><b>bold</b>.png"
AXE = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]}


@pytest.fixture(scope="module", autouse=True)
def options() -> None:
    expect.set_options(timeout=TIMEOUT_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsers.started() as browser:
        yield browser


@pytest.fixture
def watched(browser: Browser) -> Iterator[Watched]:
    context = browser.new_context(viewport=VIEWPORT, color_scheme="light")
    yield Watched(context)
    context.close()


def file(name: str, data: bytes, media_type: str = "image/png") -> FilePayload:
    return {"name": name, "mimeType": media_type, "buffer": data}


def opened(watched: Watched, url: str, *, key: str | None = None) -> Page:
    watched.page.goto(f"{url}/")
    if key is not None:
        watched.page.get_by_label("API key of this server").fill(key)
        watched.page.get_by_role("button", name="Use it").click()
    expect(watched.page.locator("#model")).not_to_have_text(re.compile("…|not known"))
    return watched.page


def asked(page: Page, question: str) -> str:
    """The answer, once it is whole."""
    page.get_by_label("Question").fill(question)
    page.get_by_role("button", name="Ask").click()
    expect(page.locator("#status")).to_have_text(re.compile("^(Answered|Not answered)"))
    return page.locator("#answer").inner_text()


def stage_ms(page: Page) -> dict[str, float]:
    rows = page.locator("#stages tr").all()
    return {str(row.get_attribute("data-stage")): float(row.locator("td.number").inner_text()) for row in rows}


def rows_of(table: Locator) -> list[list[str]]:
    return [row.locator("th, td").all_inner_texts() for row in table.locator("tbody tr").all()]


def violations(page: Page) -> list[str]:
    found = Axe().run(page, options=AXE).response["violations"]
    return [f"{one['id']}: {node['html']}" for one in found for node in one["nodes"]]


def test_pictures_with_the_shipped_model(watched: Watched, tight: str, tmp_path: Path) -> None:
    """A key, two pictures, a streamed answer that depends on them, where the time went; then all from the cache; and
    `vitray ask` answers alike."""
    assert post(tight, "/v1/chat/completions", about(url(600))).status_code == 200  # an encoder is up
    page = watched.page
    page.goto(f"{tight}/")
    expect(page.get_by_role("alert")).to_contain_text("no valid API key")
    expect(page.get_by_label("API key of this server")).to_be_focused()
    page.keyboard.type("not-the-key")
    with page.expect_request_finished(lambda request: request.url.endswith("/v1/models")):
        page.keyboard.press("Enter")
    expect(page.locator("#model")).to_have_text("not known yet")
    opened(watched, tight, key=KEY)
    expect(page.get_by_role("alert")).to_be_hidden()

    files = {"one.png": encoded(circle_and_square()), "two.png": encoded(three_triangles())}
    page.locator("#files").set_input_files([file(name, data) for name, data in files.items()])
    answer = asked(page, "Which picture has more shapes?")
    assert answer == "The second."
    times = stage_ms(page)
    worked = ("fetch", "preprocess", "encode", "transfer", "first-token")
    assert {stage: times[stage] for stage in worked if times[stage] <= 0} == {}
    assert set(times) == {"page", "fetch", "admission", "preprocess", "queue", "encode"} | {
        "transfer",
        "first-token",
        "decode",
    }
    grown = {
        part.get_attribute("class"): part.evaluate("it => it.clientWidth") for part in page.locator("#bar > *").all()
    }
    assert grown["encode"] > 0
    assert grown["first-token"] > 0
    one, two = rows_of(page.locator("#images-table"))
    assert (one[0], one[1], one[4]) == ("1. one.png", "140", "miss")
    assert (two[0], two[1], two[4]) == ("2. two.png", "100", "miss")
    assert re.fullmatch(r"\w{8}", one[2])
    assert one[3].startswith("eager: no GPU")

    assert asked(page, "Which picture has more shapes?") == answer
    assert [row[4] for row in rows_of(page.locator("#images-table"))] == ["hit", "hit"]
    assert stage_ms(page)["encode"] == 0
    page.reload()
    expect(page.locator("#model")).to_have_text("tiny")
    asked(page, "Hello!")
    # What is around the stages; those of several pictures run side by side, and may add up to more than they took.
    assert stage_ms(page)["page"] > 0

    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    command = ["Which picture has more shapes?", *(str(tmp_path / name) for name in files), "--url", tight]
    told = CliRunner().invoke(ask, [*command, "--key", KEY, "--timing"])
    assert told.exit_code == 0, told.output
    assert told.stdout.strip() == answer
    assert "image-2" in told.stderr
    assert [line for line in watched.complaints if "status of 401" not in line and "status of 404" not in line] == []
    assert all(url.startswith((tight, "blob:")) for url in watched.asked)
    assert [url for url in watched.failed if not url.endswith("/cluster")] == [], (
        "that one may be under way at a reload"
    )


def test_dropped_pasted_and_drawn(watched: Watched, qwen3: str) -> None:
    page = opened(watched, qwen3)
    give = """([kind, name]) => {
        const carried = new DataTransfer();
        carried.items.add(new File([new Uint8Array([137, 80, 78, 71])], name, {type: 'image/png'}));
        const carries = {clipboardData: carried, dataTransfer: carried, bubbles: true, cancelable: true};
        const event = kind === 'paste' ? new ClipboardEvent(kind, carries) : new DragEvent(kind, carries);
        return document.getElementById('question').dispatchEvent(event);
    }"""
    assert page.evaluate(give, ["dragover", "x"]) is False, "else the browser would open the file"
    expect(page.locator("#drop")).to_have_class("drop over")
    assert page.evaluate(give, ["drop", "dropped.png"]) is False
    expect(page.locator("#drop")).to_have_class("drop")
    page.evaluate(give, ["paste", "pasted.png"])
    page.get_by_role("button", name="Draw shapes").click()
    expect(page.locator("#pictures .name")).to_have_text(["dropped.png", "pasted.png", "drawn-1.png"])
    expect(page.get_by_role("img", name="Picture 3: drawn-1.png")).to_be_visible()
    assert page.locator("#pictures img").last.evaluate("it => it.naturalWidth") == 320


def test_a_video_and_the_chunks_of_its_frames(watched: Watched, qwen3: str) -> None:
    """Twelve seconds at the model's two frames a second: three chunks, each with its stages; and a picture."""
    page = opened(watched, qwen3)
    clip = Clip(96, Fraction(8), width=224, height=224, seed=5).encode()
    files = [file("clip.mp4", clip, "video/mp4"), file("one.png", encoded(picture(3, 64, 64)))]
    page.locator("#files").set_input_files(files)
    expect(page.get_by_role("status")).to_have_text("2 files to ask about.")
    expect(page.locator("#pictures video")).to_have_attribute("aria-label", "Video 1: clip.mp4")
    expect(page.get_by_role("button", name="Remove video 1: clip.mp4")).to_be_visible()
    assert asked(page, "What happens?"), page.get_by_role("alert").inner_text()
    rows = rows_of(page.locator("#images-table"))
    names = [f"1. clip.mp4, frames {frames}" for frames in ("1–8", "9–16", "17–24")]
    assert [row[0] for row in rows] == [*names, "2. one.png"]
    assert [row[4] for row in rows] == ["miss"] * 4
    assert {row[1] for row in rows[:3]} == {rows[0][1]}, "tokens"
    assert stage_ms(page)["preprocess"] > 0
    assert violations(page) == []
    asked(page, "Once more: what happens?")
    assert [row[4] for row in rows_of(page.locator("#images-table"))] == ["hit"] * 4


def test_by_keyboard_alone(watched: Watched, qwen3: str) -> None:
    """Choose, remove, ask, see a long answer come, stop it."""
    page = opened(watched, qwen3)

    def at_length(route: Route) -> None:
        route.continue_(post_data=json.dumps({**json.loads(route.request.post_data or ""), **LONG}))

    page.route(CHAT, at_length)
    page.on("filechooser", lambda _: None)  # from here on the browser tells of them; asked at the press it may be late
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the question")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.locator("#key-box summary")).to_be_focused()
    page.keyboard.press("Tab")
    choose = page.get_by_role("button", name="Choose files")
    expect(choose).to_be_focused()
    assert choose.evaluate("it => getComputedStyle(it).outlineStyle") == "solid"
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Enter")
    chooser.value.set_files([file("a.png", encoded(picture(1, 64, 64))), file("b.png", b"")])
    expect(page.locator("#pictures li")).to_have_count(2)
    page.get_by_role("button", name="Remove picture 2: b.png").focus()
    page.keyboard.press("Space")
    expect(page.locator("#pictures li")).to_have_count(1)
    expect(page.get_by_role("button", name="Remove picture 1: a.png")).to_be_focused()
    page.get_by_label("Question").focus()
    page.keyboard.press("Shift+Enter")
    page.keyboard.press("Enter")
    answer = page.locator("#answer")
    expect(answer).to_have_attribute("aria-busy", "true")
    expect(answer).to_have_attribute("aria-live", "polite")
    expect(answer).not_to_be_empty()
    page.get_by_role("button", name="Stop").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("status")).to_have_text("Stopped.")
    expect(answer).to_have_attribute("aria-busy", "false")
    expect(page.get_by_role("button", name="Ask")).to_be_enabled()


def test_what_goes_wrong_is_told(watched: Watched, qwen3: str) -> None:
    page = opened(watched, qwen3)
    alert = page.get_by_role("alert")
    page.locator("#files").set_input_files([file("notes.txt", b"text", "text/plain")])
    expect(page.get_by_role("status")).to_have_text("That is no picture, video or sound.")
    page.locator("#files").set_input_files([file("broken.png", encoded(picture(2, 64, 64))[:90])])
    asked(page, "What is it?")
    expect(alert).to_contain_text(re.compile(r"image 1 of 1 \(messages\[0\]\.content\[\d\]\): "))
    head, body = error_head_and_body(ApiError(503, "the server is at its limit; try again", retry_after_s=7))
    headers = {name.decode(): value.decode() for name, value in head.headers}
    page.route(CHAT, lambda route: route.fulfill(status=503, headers=headers, body=body))
    asked(page, "What is it?")
    expect(alert).to_have_text("the server is at its limit; try again Ask again in 7 s.")
    page.unroute(CHAT)
    page.route(CHAT, lambda route: route.fulfill(status=200, content_type="text/event-stream", body=event("Half")))
    asked(page, "What is it?")
    expect(alert).to_have_text("The answer broke off.")
    expect(page.locator("#answer")).to_have_text("Half")
    page.unroute(CHAT)
    page.route(CHAT, lambda route: route.abort())
    asked(page, "What is it?")
    expect(alert).to_have_text("The server cannot be reached.")


def event(text: str) -> str:
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n"


def test_names_and_answers_are_text(watched: Watched, qwen3: str) -> None:
    """Of a picture, a model, a replica and an answer, which anybody may have chosen."""

    def hostile(route: Route) -> None:
        timing = f'image-1;desc="tokens=4 replica={HOSTILE.replace(" ", "_")} graph=<i>8</i> batch=4/1"'
        body = event(HOSTILE) + event("</div><script>alert(2)</script>") + "data: [DONE]\n\n"
        route.fulfill(status=200, headers={"content-type": "text/event-stream", "server-timing": timing}, body=body)

    def named(route: Route) -> None:
        route.fulfill(status=200, content_type="application/json", body=json.dumps({"data": [{"id": HOSTILE}]}))

    def cluster(route: Route) -> None:
        found = route.fetch().json()
        found["deployments"][1] |= {"message": HOSTILE, "target": HOSTILE}
        found["deployments"][1]["replicas"][0] |= {"name": HOSTILE, "state": HOSTILE}
        route.fulfill(status=200, content_type="application/json", body=json.dumps(found))

    page = watched.page
    page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
    page.route("**/v1/models", named)
    page.route("**/cluster", cluster)
    page.route(CHAT, hostile)
    opened(watched, qwen3)
    page.locator("#files").set_input_files([file(HOSTILE, encoded(picture(3, 64, 64)))])
    assert asked(page, HOSTILE) == HOSTILE + "</div><script>alert(2)</script>"
    expect(page.locator("#model")).to_have_text(HOSTILE)
    expect(page.locator("#pictures .name")).to_have_text(HOSTILE)
    expect(page.locator("#images-table tbody th")).to_have_text(f"1. {HOSTILE}")
    expect(page.locator("#deployments code").nth(1)).to_have_text(HOSTILE)
    assert page.locator("main :is(b, i, script), main img:not(#pictures img)").count() == 0
    assert [line for line in watched.complaints if "Content Security" in line or "Trusted" in line] == []


def test_the_cluster_is_shown(watched: Watched, qwen3: str) -> None:
    page = opened(watched, qwen3)
    expect(page.locator("#cluster-state")).to_have_text("live")
    encoders = page.locator("[data-deployment=Encoder]")
    expect(encoders.get_by_role("heading")).to_have_text("Encoders: 2 of 2 running")
    expect(encoders.locator("li")).to_have_count(2)
    expect(encoders.locator("li").first).to_contain_text("tokens wait")
    expect(encoders).to_contain_text("No autoscaling: num_replicas is 2")
    expect(page.locator("[data-deployment=LLM] li")).to_contain_text("KV cache")
    figures = page.locator("#figures")
    expect(figures).to_contain_text("Packing efficiency")
    expect(figures).to_contain_text("eager: no GPU")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessible_in_both_schemes(browser: Browser, qwen3: str, scheme: str) -> None:
    """By axe-core, contrast among its rules: with an answer, a picture's facts, an error and the cluster's replicas."""
    context = browser.new_context(viewport=VIEWPORT, color_scheme=scheme)  # type: ignore[arg-type]
    watched = Watched(context)
    page = opened(watched, qwen3)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (min(map(int, re.findall(r"\d+", ground))) > 128) == (scheme == "light")
    timing = 'fetch;dur=3.0, encode;dur=9.0, image-1;desc="tokens=4 replica=a graph=8 batch=4/1 cached"'
    headers = {"content-type": "text/event-stream", "server-timing": timing}
    page.route(CHAT, lambda route: route.fulfill(status=200, headers=headers, body=event("A star.")))
    page.locator("#files").set_input_files([file("a.png", encoded(picture(4, 64, 64)))])
    asked(page, "What is it?")
    assert rows_of(page.locator("#images-table")) == [["1. a.png", "4", "a", "graph, budget 8 (50 % used)", "hit"]]
    page.locator("#key-box summary").click()
    expect(page.locator("#deployments li").first).to_be_visible()
    assert violations(page) == []
    page.set_viewport_size({"width": 360, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360, "nothing sticks out on a phone"
    context.close()


def test_axe_finds_something(watched: Watched) -> None:
    """The check above would notice."""
    faint = "<html><body><img src='data:,'><p style='color:#ccc;background:#fff'>faint</p></body></html>"
    watched.page.set_content(faint)
    found = {line.partition(":")[0] for line in violations(watched.page)}
    assert found >= {"image-alt", "color-contrast", "html-has-lang"}


def test_without_a_browser_these_tests_are_skipped_or_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browsers, "chromium", lambda: None)
    monkeypatch.delenv(browsers.REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium"), browsers.started():
        pass
    monkeypatch.setenv(browsers.REQUIRED, "required")
    with pytest.raises(pytest.fail.Exception, match="apt-get install chromium"), browsers.started():
        pass


class Elsewhere(BaseHTTPRequestHandler):
    """A page of another site."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>elsewhere</title>")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def elsewhere() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
    with serving(server):
        yield server.server_port


def test_a_page_of_another_site_gets_nothing(watched: Watched, qwen3: str, elsewhere: int) -> None:
    """Neither by asking from there, nor by a name of its own for this machine, nor by a frame."""
    page, port = watched.page, re.findall(r":(\d+)/", qwen3)[0]
    page.goto(f"http://evil.example:{elsewhere}/")
    tried = """([url, body]) => fetch(url, body ? {method: 'POST', body} : {})
        .then(answer => answer.text(), () => 'refused')"""
    for path in ("/", "/cluster", "/v1/models", "/health"):
        assert page.evaluate(tried, [qwen3 + path, None]) == "refused"
    assert page.evaluate(tried, [qwen3 + "/v1/chat/completions", "{}"]) == "refused"
    framed = """url => new Promise(done => {
        const frame = document.body.appendChild(document.createElement('iframe'));
        frame.addEventListener('load', () => { try { done(String(frame.contentDocument)); } catch { done('other'); } });
        frame.src = url;
    })"""
    page.evaluate(framed, qwen3 + "/")
    assert "frame-ancestors" in " ".join(watched.complaints) or "X-Frame-Options" in " ".join(watched.complaints)
    answer = page.goto(f"http://evil.example:{port}/qwen3/")
    assert answer is not None
    assert answer.status == 403


def test_the_bare_prefix_leads_to_the_page(watched: Watched, qwen3: str) -> None:
    watched.page.goto(qwen3)
    expect(watched.page.locator("#model")).to_have_text("tiny")
    assert watched.page.url == qwen3 + "/"
