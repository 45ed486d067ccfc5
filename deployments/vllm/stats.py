"""Load of vLLM's engine, as reported with every step, for autoscaling.

vLLM (0.26 to 0.33) calls a logger with its scheduler's statistics. vLLM documents that these may
change; `SchedulerStats` has all that are used.
"""

from __future__ import annotations

from typing import Protocol

from deployments.scaling.llm_scaler import EngineLoad


class SchedulerStats(Protocol):
    """The fields of vLLM's SchedulerStats that are used."""

    num_running_reqs: int
    num_waiting_reqs: int
    num_skipped_waiting_reqs: int
    """Further waiting requests, which do not wait for capacity."""
    kv_cache_usage: float


class EngineStats:
    """Last reported load of a replica's engine. `logger` is passed to vLLM as one of its `stat_loggers`; vLLM calls all
    methods of a logger by name."""

    def __init__(self) -> None:
        self._load = EngineLoad()

    def logger(self, *_: object) -> EngineStats:
        return self

    def load(self, *, num_excluded: int = 0) -> EngineLoad:
        """Returns the load. `num_excluded`: requests that do not count, subtracted from the waiting ones first."""
        running, waiting = self._load.running_requests, self._load.waiting_requests
        return EngineLoad(
            max(0, running - max(0, num_excluded - waiting)), max(0, waiting - num_excluded), self._load.kv_cache_use
        )

    def record(self, scheduler_stats: SchedulerStats | None, *_: object, **__: object) -> None:
        """`scheduler_stats` is None for a step without statistics."""
        if scheduler_stats is not None:
            waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self._load = EngineLoad(scheduler_stats.num_running_reqs, waiting, scheduler_stats.kv_cache_usage)

    def log_engine_initialized(self) -> None: ...

    def log(self) -> None: ...

    def record_sleep_state(self, *_: object) -> None: ...
