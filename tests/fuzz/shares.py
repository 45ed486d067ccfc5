"""What share of `--fuzz-cases` each fuzzer takes, by what a case of it costs.

What a fuzzer finds becomes an `@example` beside it, once it is mended.
"""

from __future__ import annotations

IN_PROCESS = {
    "changed files": 0.44,
    "changed videos": 0.1,
    "any bytes after a signature": 0.08,
    "changed sounds": 0.5,
    "urls and redirects": 0.15,
    "bodies": 0.1,
    "image parts": 1.0,
    "bodies that are hardly json": 0.02,
    "conversations that are stored": 0.05,
    "headers and bits": 0.1,
    "headers that are no numbers": 0.02,
}
OVER_HTTP = {"requests": 0.02}
