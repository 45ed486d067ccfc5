"""How long a request may take: the operator's limit, or less where the client asks for less.

It must not know what is done until then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deployments.errors import ApiError

TIMEOUT_HEADER = "x-request-timeout-s"
EARLY_S = 0.001
"""By so much an event loop's timer may ring before its time."""


@dataclass(frozen=True)
class Deadline:
    """When an answer is of no use any more."""

    at: float
    """In the event loop's time, seconds."""
    limit_s: float
    """From the request's arrival."""

    @classmethod
    def of(cls, asked: str | None, *, arrived: float, most_s: float) -> Deadline:
        """`asked`: what the client's header says, None where it says nothing. Raises ApiError 400."""
        limit_s = most_s
        if asked is not None:
            try:
                limit_s = float(asked)
            except ValueError:
                limit_s = math.nan
            if not (limit_s > 0 and math.isfinite(limit_s)):
                raise ApiError(400, f"header {TIMEOUT_HEADER} is {asked!r}; it must be a number of seconds over 0")
        limit_s = min(limit_s, most_s)
        return cls(arrived + limit_s, limit_s)

    @property
    def arrived(self) -> float:
        """When the request came; in the event loop's time, seconds."""
        return self.at - self.limit_s

    def passed(self, now: float) -> bool:
        return now >= self.at - EARLY_S

    def error(self) -> ApiError:
        """What a client is told whose deadline has passed."""
        return ApiError(504, f"the request took longer than {self.limit_s:g} s, the limit", code="timeout")
