"""What the traffic asks for: how many batches held how many tokens and how long images, kept over a restart.

Pure Python. It must not know graphs.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections import Counter
from pathlib import Path

logger = logging.getLogger(__name__)

VERSION = 1
# Sizes are counted in steps, so that the file stays small; older traffic counts half as much every so many batches.
_STEP = 4
_HALVED_AT = 50_000


class Wanted:
    """A histogram of batches. For one thread."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[int, int]] = Counter()
        self.total = 0
        """Batches in it."""

    def add(self, num_tokens: int, max_seqlen: int, number: int = 1) -> None:
        """So many batches of `num_tokens` tokens, whose longest image had `max_seqlen` patches."""
        self._counts[-(-num_tokens // _STEP) * _STEP, max_seqlen] += number
        self.total += number
        if self.total > _HALVED_AT:
            self._counts = Counter({key: count // 2 for key, count in self._counts.items() if count > 1})
            self.total = self._counts.total()

    def by_tokens(self) -> dict[int, int]:
        """Tokens, rounded up to a step, and how many batches had them."""
        found: Counter[int] = Counter()
        for (tokens, _), number in self._counts.items():
            found[tokens] += number
        return dict(found)

    def number(self, over: int, up_to: int, max_seqlen: int) -> int:
        """Batches of more than `over` and at most `up_to` tokens with no longer image than `max_seqlen` patches."""
        return sum(
            number
            for (tokens, longest), number in self._counts.items()
            if over < tokens <= up_to and longest <= max_seqlen
        )

    def save(self, path: Path, fingerprint: str) -> None:
        """Writes the file whole or not at all. `fingerprint`: of the encoder whose traffic it is."""
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [[tokens, longest, number] for (tokens, longest), number in sorted(self._counts.items())]
        content = json.dumps({"version": VERSION, "fingerprint": fingerprint, "batches": rows})
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(content)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: Path, fingerprint: str) -> Wanted:
        """What was saved for this encoder; empty where nothing was, or nothing that can be used."""
        wanted = cls()
        try:
            content = json.loads(path.read_text())
            if content["version"] != VERSION or content["fingerprint"] != fingerprint:
                logger.info("%s is of another version or encoder; starting anew", path)
                return wanted
            rows = [(int(tokens), int(longest), int(number)) for tokens, longest, number in content["batches"]]
        except FileNotFoundError:
            return wanted
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s cannot be used; starting anew: %s", path, error)
            return wanted
        for tokens, longest, number in rows:
            if min(tokens, longest, number) > 0:
                wanted.add(tokens, longest, number)
        return wanted
