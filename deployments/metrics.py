"""What the application counts, for Ray's metrics port: one table of definitions, in Prometheus as `ray_<name>`.

Serve adds the tags `deployment`, `replica` and `application` inside a replica. Only this file knows Ray's metrics. It
must not know when anything is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from ray.serve import metrics


class Count(Enum):
    """What only grows. The value says what it means."""

    IMAGES_ENCODED = "Images that the vision tower has encoded."
    IMAGES_REFUSED = "Images that could not be decoded, or that the encoder refused."
    CACHE_HITS = "Images whose embedding was in the cache."
    CACHE_MISSES = (
        "Images whose embedding was not in the cache; those that joined an encoding under way are among them."
    )
    BATCHES_RETRIED = "Batches that failed and were tried again image by image."
    QUEUE_FULL = "Images refused because too many visual tokens waited already."
    REPLICAS_LOST = "Requests answered with 503 because a replica was lost while it worked on them."

    @property
    def metric(self) -> str:
        """The metric's name, to which Ray adds `ray_` in front and `_total` at the end."""
        return f"vitray_{self.name.lower()}"


class Level(Enum):
    """What goes up and down. The value says what it means."""

    QUEUED_TOKENS = "Visual tokens that wait for the GPU or are being encoded."

    @property
    def metric(self) -> str:
        return f"vitray_{self.name.lower()}"


class Counts:
    """The counters of one replica. Make it in the replica, where its tags come from; any thread may add."""

    def __init__(self) -> None:
        self._counters = {count: metrics.Counter(count.metric, description=count.value) for count in Count}

    def add(self, count: Count, number: int = 1) -> None:
        self._counters[count].inc(number)


def gauge(level: Level) -> Callable[[int], None]:
    """A function that sets the level, from any thread. Make it in the replica."""
    made = metrics.Gauge(level.metric, description=level.value)

    def put(value: int) -> None:
        made.set(value)

    return put
