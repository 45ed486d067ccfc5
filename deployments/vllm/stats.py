"""Load of vLLM's engines, as reported with every step, for autoscaling.

vLLM (0.26 to 0.33) calls a logger for each engine with its scheduler's statistics. vLLM documents that these may
change; `SchedulerStats` has all that are used.
"""

from __future__ import annotations

from statistics import fmean
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
    """Last reported load of each engine of one replica. `logger` is passed to vLLM as one of its `stat_loggers`."""

    def __init__(self) -> None:
        self._loggers: list[EngineLogger] = []

    def logger(self, vllm_config: object, engine_index: int = 0) -> EngineLogger:
        """Creates an engine's logger; vLLM calls it once for each engine."""
        self._loggers.append(EngineLogger())
        return self._loggers[-1]

    def load(self, *, num_excluded: int = 0) -> EngineLoad:
        """Returns the total load of all engines, with the mean use of their KV caches. `num_excluded`: requests that do
        not count, subtracted from the waiting ones first."""
        loads = [logger.load for logger in self._loggers]
        running, waiting = sum(load.running_requests for load in loads), sum(load.waiting_requests for load in loads)
        return EngineLoad(
            max(0, running - max(0, num_excluded - waiting)),
            max(0, waiting - num_excluded),
            fmean(load.kv_cache_use for load in loads) if loads else 0.0,
        )


class EngineLogger:
    """Logger of one engine. vLLM calls all of its methods by name."""

    def __init__(self) -> None:
        self.load = EngineLoad()

    def record(self, scheduler_stats: SchedulerStats | None, *_: object, **__: object) -> None:
        """`scheduler_stats` is None for a step without statistics."""
        if scheduler_stats is not None:
            waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self.load = EngineLoad(scheduler_stats.num_running_reqs, waiting, scheduler_stats.kv_cache_usage)

    def log_engine_initialized(self) -> None: ...

    def log(self) -> None: ...

    def record_sleep_state(self, *_: object) -> None: ...
