"""What vLLM's engines have to do, as they tell it with every step: for scaling.

vLLM (0.26 to 0.33) calls a logger that it is given for each engine with its scheduler's numbers. It says of those that
they may change; here are all that are used. This module must not import vLLM, nor know what is made of the numbers.
"""

from __future__ import annotations

from statistics import fmean
from typing import Protocol

from deployments.llm_scaling import EngineLoad


class SchedulerStats(Protocol):
    """What is used of vLLM's."""

    num_running_reqs: int
    num_waiting_reqs: int
    num_skipped_waiting_reqs: int
    """Waiting too, for something else than room."""
    kv_cache_usage: float


class EngineStats:
    """The last word of each engine of one replica. `logger` is for vLLM's `stat_loggers`."""

    def __init__(self) -> None:
        self._loggers: list[EngineLogger] = []

    def logger(self, vllm_config: object, engine_index: int = 0) -> EngineLogger:
        """Called by vLLM, once for each engine."""
        self._loggers.append(EngineLogger())
        return self._loggers[-1]

    def load(self, *, besides: int = 0) -> EngineLoad:
        """All engines together; of the KV cache the mean share. `besides`: so many requests do not count, those that
        wait first."""
        loads = [logger.load for logger in self._loggers]
        running, waiting = sum(load.running for load in loads), sum(load.waiting for load in loads)
        return EngineLoad(
            max(0, running - max(0, besides - waiting)),
            max(0, waiting - besides),
            fmean(load.kv_cache_use for load in loads) if loads else 0.0,
        )


class EngineLogger:
    """Of one engine. vLLM calls all of it by these names."""

    def __init__(self) -> None:
        self.load = EngineLoad()

    def record(self, scheduler_stats: SchedulerStats | None, *_: object, **__: object) -> None:
        """None comes with a step that has nothing to tell."""
        if scheduler_stats is not None:
            waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self.load = EngineLoad(scheduler_stats.num_running_reqs, waiting, scheduler_stats.kv_cache_usage)

    def log_engine_initialized(self) -> None: ...

    def log(self) -> None: ...

    def record_sleep_state(self, *_: object) -> None: ...
