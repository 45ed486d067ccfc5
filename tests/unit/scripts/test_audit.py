"""`scripts/audit.py` with pip-audit itself, against a source of advisories on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from scripts import audit
from tests.programs import free_port
from tests.threaded import serving

pytest.importorskip("pip_audit", reason="pip-audit comes with the extra `dev`")

KNOWN = {"jinja2": "2.4.1"}
"""By package, the version that has an advisory: that of audit.KNOWN_FLAW."""


@contextmanager
def advisories(flawed: dict[str, str], *, breaks_at: str | None = None) -> Iterator[tuple[str, list[str]]]:
    """The address of a source that knows one flaw of each of these packages, and what it is asked about."""
    asked: list[str] = []

    class Source(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 65_536  # an answer in one piece, or each waits for an acknowledgement

        def do_POST(self) -> None:
            question = json.loads(self.rfile.read(int(self.headers["content-length"])))
            name, version = question["package"]["name"], question["version"]
            asked.append(f"{name}=={version}")
            known = (
                [{"id": f"PYSEC-{name}", "summary": "a flaw", "affected": []}] if flawed.get(name) == version else []
            )
            answer = json.dumps({"vulns": known} if known else {}).encode()
            self.send_response(500 if name == breaks_at else 200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Source)
    with serving(server):
        yield f"http://127.0.0.1:{server.server_port}/v1/query", asked


def locked() -> set[str]:
    return set().union(*(audit.pins(lock.read_text()) for lock in audit.LOCKS))


def test_every_locked_package_is_looked_up_and_a_flaw_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """The two locks have versions of their own of some packages, and pip-audit takes no package twice."""
    (pillow,) = (pin for pin in locked() if pin.startswith("pillow=="))
    with advisories(KNOWN | {"pillow": pillow.partition("==")[2]}) as (url, asked):
        assert audit.main(["--osv-url", url]) == 1
    assert asked[0] == audit.KNOWN_FLAW
    assert {name.lower() for name in asked[1:]} == {name.lower() for name in locked()}
    told = capsys.readouterr().out.splitlines()
    assert told == [
        f"audit: {pillow} has PYSEC-pillow",
        f"audit: {len(locked())} of {len(locked())} locked packages were looked up",
    ]


def test_nobody_there_is_no_clean_bill(capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main(["--osv-url", f"http://127.0.0.1:{free_port()}/"]) == 0
    assert capsys.readouterr().out.startswith("audit: NOTHING WAS LOOKED UP")


def test_a_source_that_breaks_off_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """It answered about what everybody knows, so that it can be reached; then nothing is to be passed over."""
    with advisories(KNOWN, breaks_at="pillow") as (url, _):
        assert audit.main(["--osv-url", url]) == 1
    assert "answer, but not about the locks" in capsys.readouterr().out


def test_a_source_that_knows_nothing_is_no_clean_bill(capsys: pytest.CaptureFixture[str]) -> None:
    """It answers, but not even about what everybody knows: an empty mirror, a portal's page."""
    with advisories({}) as (url, asked):
        assert audit.main(["--osv-url", url]) == 0
    assert asked == [audit.KNOWN_FLAW]
    assert "NOTHING WAS LOOKED UP" in capsys.readouterr().out


def test_make_check_audits() -> None:
    check = (audit.ROOT / "Makefile").read_text().partition("\ncheck:")[2].partition("\n\n")[0]
    assert "scripts/audit.py" in check
