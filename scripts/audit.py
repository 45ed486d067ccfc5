"""Looks every locked package up in the advisories of PyPI, with pip-audit; part of `make check`.

Where the advisories cannot be reached it says so and is content: that nothing was found and that nothing was looked up
must not look the same, so a version with a known flaw is looked up first.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = (ROOT / "locks" / "cpu.txt", ROOT / "locks" / "gpu.txt")
KNOWN_FLAW = "jinja2==2.4.1"  # CVE-2014-1402 and several later ones
ACCEPTED: dict[str, str] = {}
"""Advisories that do not concern us, by their id, each with the reason."""
TIMEOUT_S = 300

_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)


def pins(text: str) -> set[str]:
    """`name==version` of every package in a lock; a build's own suffix (`+cpu`) has no advisories of its own."""
    return {f"{name}=={version.partition('+')[0]}" for name, version in _PIN.findall(text)}


def audited(requirements: Iterable[str]) -> dict[str, list[str]] | None:
    """Advisories by package, of those packages that were found; None where pip-audit did not get through.

    Raises:
        subprocess.TimeoutExpired: it took longer than TIMEOUT_S.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "requirements.txt"
        file.write_text("\n".join(sorted(requirements)) + "\n")
        options = ["--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off"]
        found = subprocess.run(
            [sys.executable, "-m", "pip_audit", "--requirement", str(file), *options],
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    try:
        answers = json.loads(found.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return None
    return {
        f"{package['name']}=={package['version']}": [flaw["id"] for flaw in package["vulns"]]
        for package in answers
        if "vulns" in package
    }


def main() -> int:
    if importlib.util.find_spec("pip_audit") is None:
        print("audit: pip-audit is not installed; make setup")
        return 1
    try:
        reachable = audited([KNOWN_FLAW])
        if not reachable or not any(reachable.values()):
            print("audit: the advisories of PyPI cannot be reached from here; nothing was looked up")
            return 0
        wanted = set().union(*(pins(lock.read_text()) for lock in LOCKS))
        found = audited(wanted)
    except subprocess.TimeoutExpired:
        print(f"audit: the advisories of PyPI did not answer in {TIMEOUT_S} s")
        return 0
    if found is None:
        print("audit: the advisories of PyPI did not answer")
        return 0
    flaws = {package: [flaw for flaw in ids if flaw not in ACCEPTED] for package, ids in found.items()}
    for package, ids in sorted(flaws.items()):
        if ids:
            print(f"audit: {package} has {', '.join(ids)}")
    print(f"audit: {len(found)} of {len(wanted)} locked packages were looked up")
    return 1 if any(flaws.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
