"""A request's deadline: the operator's limit, or a shorter one that the client asks for."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deployments.common.api_error import ApiError

TIMEOUT_HEADER = "x-request-timeout-s"
TIMER_TOLERANCE_S = 0.001
"""Seconds by which an event loop's timer may fire too early."""


@dataclass(frozen=True)
class Deadline:
    """Deadline of one request."""

    at: float
    """Seconds of the event loop's clock."""
    limit_s: float
    """Seconds from the request's arrival to the deadline."""

    @classmethod
    def from_header(cls, header: str | None, *, arrived: float, max_s: float) -> Deadline:
        """Returns the deadline of a request that arrived at `arrived` (event-loop seconds), at most `max_s` later.

        `header` is the value of TIMEOUT_HEADER, None if it is absent. Raises ApiError 400 if it is not a number over 0.
        """
        limit_s = max_s
        if header is not None:
            try:
                limit_s = float(header)
            except ValueError:
                limit_s = math.nan
            if not (limit_s > 0 and math.isfinite(limit_s)):
                raise ApiError(400, f"header {TIMEOUT_HEADER} is {header!r}; it must be a number of seconds over 0")
        limit_s = min(limit_s, max_s)
        return cls(arrived + limit_s, limit_s)

    @property
    def arrived(self) -> float:
        """Arrival of the request, in seconds of the event loop's clock."""
        return self.at - self.limit_s

    def has_passed(self, now: float) -> bool:
        return now >= self.at - TIMER_TOLERANCE_S

    def error(self) -> ApiError:
        """Returns the error for a request that missed its deadline."""
        return ApiError(504, f"the request took longer than {self.limit_s:g} s, the limit", code="timeout")
