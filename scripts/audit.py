"""Looks up every locked package in PyPI's advisories with pip-audit; part of `make check`.

If the advisories cannot be reached, it prints that and exits with 0; otherwise an advisory or an error of pip-audit
fails it. A version with a known flaw is looked up first, to distinguish an empty result from a failed look-up.
`--osv-url` names another source with OSV's API, such as a mirror of https://api.osv.dev/v1/query.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCKS = (ROOT / "locks" / "cpu.txt", ROOT / "locks" / "gpu.txt")
KNOWN_FLAW = "jinja2==2.4.1"  # CVE-2014-1402 and several later ones
ACCEPTED: dict[str, str] = {}
"""Advisories that do not apply to this project, by id, each with the reason."""
TIMEOUT_S = 300

_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)


def pins(text: str) -> set[str]:
    """Returns `name==version` of every package in a lock, without build suffixes (`+cpu`), which no advisory has."""
    return {f"{name}=={version.partition('+')[0]}" for name, version in _PIN.findall(text)}


def rounds(requirements: Iterable[str]) -> list[list[str]]:
    """Splits requirements into the fewest groups with one version of each package, since pip-audit refuses two."""
    made: list[dict[str, str]] = []
    for requirement in sorted(requirements):
        name = requirement.partition("==")[0]
        first = next((group for group in made if name not in group), None)
        if first is None:
            made.append(first := {})
        first[name] = requirement
    return [list(group.values()) for group in made]


class AuditError(Exception):
    """pip-audit failed; the message is the last one that it printed."""


def audited(requirements: Iterable[str], source: Sequence[str] = ()) -> dict[str, list[str]]:
    """Returns advisory ids by package, for the packages that were found.

    `source`: pip-audit's options for the source of advisories.

    Raises:
        AuditError: pip-audit returned no result.
        subprocess.TimeoutExpired: it took longer than TIMEOUT_S.
    """
    found: dict[str, list[str]] = {}
    for group in rounds(requirements):
        for package in _asked(group, source):
            if "vulns" in package:
                found[f"{package['name']}=={package['version']}"] = [flaw["id"] for flaw in package["vulns"]]
    return found


def _asked(requirements: Sequence[str], source: Sequence[str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "requirements.txt"
        file.write_text("\n".join(requirements) + "\n")
        options = ["--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off"]
        told = subprocess.run(
            [sys.executable, "-m", "pip_audit", "--requirement", str(file), *options, *source],
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    try:
        packages: list[dict[str, Any]] = json.loads(told.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError) as error:
        raise AuditError((told.stderr.strip().splitlines() or ["nothing"])[-1]) from error
    return packages


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Looks every locked package up in published advisories.")
    parser.add_argument("--osv-url", help="URL of OSV's API; default: the advisories of PyPI")
    osv_url = parser.parse_args(arguments).osv_url
    name = osv_url or "PyPI"
    source = ("--vulnerability-service", "osv", "--osv-url", osv_url) if osv_url else ()
    if importlib.util.find_spec("pip_audit") is None:
        print("audit: pip-audit is not installed; make setup")
        return 1
    try:
        reachable = any(audited([KNOWN_FLAW], source).values())
    except (AuditError, subprocess.TimeoutExpired):
        reachable = False
    if not reachable:
        print(f"audit: NOTHING WAS LOOKED UP: the advisories of {name} cannot be reached")
        return 0
    wanted = set().union(*(pins(lock.read_text()) for lock in LOCKS))
    try:
        found = audited(wanted, source)
    except (AuditError, subprocess.TimeoutExpired) as error:
        print(f"audit: the advisories of {name} answer, but not about the locks: {error}")
        return 1
    flaws = {package: [flaw for flaw in ids if flaw not in ACCEPTED] for package, ids in found.items()}
    for package, ids in sorted(flaws.items()):
        if ids:
            print(f"audit: {package} has {', '.join(ids)}")
    print(f"audit: {len(found)} of {len(wanted)} locked packages were looked up")
    return 1 if any(flaws.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
