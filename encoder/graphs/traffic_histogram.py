"""Histogram of batches by number of tokens and length of the longest image, saved over restarts. Pure Python."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections import Counter
from pathlib import Path

logger = logging.getLogger(__name__)

VERSION = 1
# Token counts are rounded up to steps, to keep the file small. All counts are halved when the total exceeds
# `_HALVED_AT`, so that older traffic weighs less.
_STEP = 4
_HALVED_AT = 50_000


class TrafficHistogram:
    """Traffic histogram of batches. Not thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[int, int]] = Counter()
        self.total = 0
        """Number of batches in the histogram."""

    def add(self, num_tokens: int, max_seqlen: int, number: int = 1) -> None:
        """Counts `number` batches of `num_tokens` tokens whose longest image has `max_seqlen` patches."""
        self._counts[-(-num_tokens // _STEP) * _STEP, max_seqlen] += number
        self.total += number
        if self.total > _HALVED_AT:
            self._counts = Counter({key: count // 2 for key, count in self._counts.items() if count > 1})
            self.total = self._counts.total()

    def by_tokens(self) -> dict[int, int]:
        """Returns the number of batches by number of tokens, rounded up to a step."""
        found: Counter[int] = Counter()
        for (tokens, _), number in self._counts.items():
            found[tokens] += number
        return dict(found)

    def number(self, over: int, up_to: int, max_seqlen: int) -> int:
        """Counts batches of more than `over` and at most `up_to` tokens with no image over `max_seqlen` patches."""
        return sum(
            number
            for (tokens, longest), number in self._counts.items()
            if over < tokens <= up_to and longest <= max_seqlen
        )

    def save(self, path: Path, fingerprint: str) -> None:
        """Writes the file atomically. `fingerprint`: of the encoder that ran the batches. Raises OSError."""
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
    def load(cls, path: Path, fingerprint: str) -> TrafficHistogram:
        """Loads the histogram of this encoder; returns an empty one if the file is missing, unusable or another's."""
        wanted = cls()
        try:
            content = json.loads(path.read_text())
            if content["version"] != VERSION or content["fingerprint"] != fingerprint:
                logger.info("%s is of another version or encoder; starting with an empty histogram", path)
                return wanted
            rows = [(int(tokens), int(longest), int(number)) for tokens, longest, number in content["batches"]]
        except FileNotFoundError:
            return wanted
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s cannot be used; starting with an empty histogram: %s", path, error)
            return wanted
        for tokens, longest, number in rows:
            if min(tokens, longest, number) > 0:
                wanted.add(tokens, longest, number)
        return wanted
