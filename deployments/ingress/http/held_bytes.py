"""A bound on the bytes of request bodies and image files in memory of an ingress replica."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from deployments.common.api_error import ApiError, OverloadedError, Shed
from deployments.telemetry.metrics import AdmissionMetrics


class HeldBytes:
    """The bytes that all requests of an ingress replica hold. It is used from one event loop.

    with held_bytes.request() as held:
        held.add(len(chunk))          # for each chunk of the body
        held.resize(num_bytes)        # once the body is parsed
        held.add_fetched(len(chunk))  # for each chunk of a fetched file
    """

    def __init__(
        self,
        max_bytes: int,
        metrics: AdmissionMetrics,
        *,
        max_fetched_bytes: int,
        retry_after_s: Callable[[], int],
    ) -> None:
        """`max_fetched_bytes` bounds the fetched files of one request."""
        self._max_bytes = max_bytes
        self.max_fetched_bytes = max_fetched_bytes
        self._metrics = metrics
        self._retry_after_s = retry_after_s
        self.num_bytes = 0

    @contextmanager
    def request(self) -> Iterator[Held]:
        """Yields the count of one request's bytes, which is reset to 0 on exit."""
        held = Held(self)
        try:
            yield held
        finally:
            held.resize(0)

    def add(self, difference: int) -> None:
        """Adds `difference` bytes, which may be negative. Raises OverloadedError if the sum would exceed the bound."""
        if difference > 0 and self.num_bytes + difference > self._max_bytes:
            self._metrics.shed(Shed.BYTES, 0)
            message = f"requests hold {self.num_bytes} bytes, {difference} more would pass {self._max_bytes}; try again"
            raise OverloadedError(message, retry_after_s=self._retry_after_s())
        self.num_bytes += difference
        self._metrics.bytes_held(self.num_bytes)


class Held:
    """The bytes that one request holds."""

    def __init__(self, all_held: HeldBytes) -> None:
        self._all = all_held
        self.num_bytes = 0
        self._num_fetched = 0

    def add(self, num_bytes: int) -> None:
        """Adds to the count. Raises OverloadedError if the bound would be exceeded; the count is then unchanged."""
        self._all.add(num_bytes)
        self.num_bytes += num_bytes

    def add_fetched(self, num_bytes: int) -> None:
        """Adds bytes of a fetched file. Raises ApiError 413 over the bound of one request, and as `add` does."""
        self._num_fetched += num_bytes
        if self._num_fetched > (limit := self._all.max_fetched_bytes):
            message = f"the request's files are over the limit of {limit} fetched bytes"
            raise ApiError(413, message, code="body_too_large")
        self.add(num_bytes)

    def resize(self, num_bytes: int) -> None:
        """Sets the count to `num_bytes`. Raises OverloadedError as `add` does."""
        self.add(num_bytes - self.num_bytes)
