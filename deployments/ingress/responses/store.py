"""The deployment `ResponseStore`: stored responses of `/v1/responses` in the memory of one process, by tenant and id.

A response consists of the items of its conversation. Equal items of a tenant are stored once, so that neither the turns
of a conversation nor a client that sends every earlier item again multiplies the memory of images.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deployments.telemetry.metrics import Counter, Counters, ErrorLogCounter, Gauge, gauge_setter

RESPONSE_OVERHEAD_BYTES = 1024
ITEM_OVERHEAD_BYTES = 384
REFERENCE_BYTES = 8
"""Memory of Python's objects around each response, each distinct item, and each item's reference in a response."""


@dataclass(slots=True)
class Item:
    """An item of a tenant's conversations."""

    key: tuple[str, bytes]
    """The tenant, and the item as JSON."""
    references: int = 0
    """How often responses refer to it; it is freed with the last of them."""

    @property
    def num_bytes(self) -> int:
        return len(self.key[1]) + ITEM_OVERHEAD_BYTES


@dataclass(slots=True)
class Stored:
    """A response. It is found once it is complete."""

    input: list[Item]
    """All items that led to it, those of earlier turns included."""
    used_at_s: float
    output: list[Item] = field(default_factory=list)
    response: bytes | None = None
    """The response as JSON; None before its end."""


class ResponseStore:
    """Stored responses, within `max_bytes`; the least recently used are evicted first, and those that were not used for
    `ttl_s` expire. One replica: its methods run one after the other on its event loop.

    await store.put(tenant, "resp_2", "resp_1", [b'{"role": "user", "content": "And now?"}'])
    await store.complete(tenant, "resp_2", response, output)
    items = await store.conversation(tenant, "resp_2")
    """

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._responses: OrderedDict[tuple[str, str], Stored] = OrderedDict()  # the least recently used first
        self._items: dict[tuple[str, bytes], Item] = {}
        self._counts = Counters()
        ErrorLogCounter.install(self._counts)
        self._set_gauge = gauge_setter(Gauge.RESPONSE_STORE_BYTES)
        self.num_bytes = 0

    async def put(self, tenant: str, response_id: str, previous_id: str | None, items: Sequence[bytes]) -> bool:
        """Stores the input of a response that has begun: the conversation up to `previous_id`, and `items` as JSON.
        Returns False, which is counted, if it is too large or the previous response is gone."""
        previous = None if previous_id is None else self._find(tenant, previous_id)
        if previous_id is not None and previous is None:
            self._counts.add(Counter.RESPONSES_EVICTED, reason="no_previous")
            return False
        earlier = [] if previous is None else [item.key[1] for item in previous.input + previous.output]
        self.num_bytes += RESPONSE_OVERHEAD_BYTES
        self._responses[tenant, response_id] = Stored(self._refer(tenant, [*earlier, *items]), self._clock())
        return self._evict((tenant, response_id))

    async def complete(self, tenant: str, response_id: str, response: bytes, output: Sequence[bytes]) -> bool:
        """Stores the end of a response. Returns False if its input was not stored, or not for long."""
        stored = self._responses.get((tenant, response_id))
        if stored is None:
            return False
        stored.response, stored.used_at_s = response, self._clock()
        self._responses.move_to_end((tenant, response_id))
        self.num_bytes += len(response)
        stored.output = self._refer(tenant, output)
        return self._evict((tenant, response_id))

    async def discard(self, tenant: str, response_id: str) -> None:
        """Removes a response that will not be complete. Does nothing for others."""
        stored = self._responses.get((tenant, response_id))
        if stored is not None and stored.response is None:
            self._remove((tenant, response_id))

    async def conversation(self, tenant: str, response_id: str) -> list[bytes] | None:
        """Returns the items that led to a response, and its own, as JSON; None if it is not found."""
        stored = self._find(tenant, response_id)
        return None if stored is None else [item.key[1] for item in stored.input + stored.output]

    async def input_items(self, tenant: str, response_id: str) -> list[bytes] | None:
        """Returns the items that led to a response as JSON; None if it is not found."""
        stored = self._find(tenant, response_id)
        return None if stored is None else [item.key[1] for item in stored.input]

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        """Returns a response as JSON, None if it is not found."""
        stored = self._find(tenant, response_id)
        return None if stored is None else stored.response

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Deletes a response, and returns whether it was found. Responses that continue it keep its items."""
        if self._find(tenant, response_id) is None:
            return False
        self._remove((tenant, response_id))
        return True

    async def check_health(self) -> None:
        """Deletes what has expired; Serve calls it every few seconds."""
        self._expire()

    def _find(self, tenant: str, response_id: str) -> Stored | None:
        self._expire()
        stored = self._responses.get((tenant, response_id))
        if stored is None or stored.response is None:
            return None
        stored.used_at_s = self._clock()
        self._responses.move_to_end((tenant, response_id))
        return stored

    def _refer(self, tenant: str, items: Sequence[bytes]) -> list[Item]:
        """Returns the items with a reference more to each."""
        found = [self._items.setdefault(key, Item(key)) for key in ((tenant, item) for item in items)]
        for item in found:
            self.num_bytes += REFERENCE_BYTES + (0 if item.references else item.num_bytes)
            item.references += 1
        return found

    def _remove(self, key: tuple[str, str]) -> None:
        stored = self._responses.pop(key)
        self.num_bytes -= RESPONSE_OVERHEAD_BYTES + len(stored.response or b"")
        for item in stored.input + stored.output:
            item.references -= 1
            self.num_bytes -= REFERENCE_BYTES + (0 if item.references else item.num_bytes)
            if not item.references:
                del self._items[item.key]
        self._set_gauge(self.num_bytes)

    def _expire(self) -> None:
        while self._responses:
            key, oldest = next(iter(self._responses.items()))
            if self._clock() - oldest.used_at_s < self._ttl_s:
                return
            self._remove(key)
            self._counts.add(Counter.RESPONSES_EVICTED, reason="expired")

    def _evict(self, last: tuple[str, str]) -> bool:
        """Evicts responses until the others fit, beginning with the `last` used one if it would not fit alone. Returns
        whether that is still stored."""
        stored = self._responses[last]
        references = [*stored.input, *stored.output]
        items = sum(item.num_bytes for item in {item.key: item for item in references}.values())
        num_bytes = RESPONSE_OVERHEAD_BYTES + len(stored.response or b"") + len(references) * REFERENCE_BYTES + items
        if num_bytes > self._max_bytes:
            self._remove(last)
            self._counts.add(Counter.RESPONSES_EVICTED, reason="too_large")
            return False
        while self.num_bytes > self._max_bytes:
            self._remove(next(iter(self._responses)))
            self._counts.add(Counter.RESPONSES_EVICTED, reason="bytes")
        self._set_gauge(self.num_bytes)
        return True
