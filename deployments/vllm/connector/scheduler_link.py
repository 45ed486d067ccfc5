"""The scheduler process's end of the link: updates the lease table, and reports missing embeddings and ended leases."""

from __future__ import annotations

import os
from collections.abc import Sequence

from deployments.vllm.connector.lease_table import EndedLease, LeaseTable
from deployments.vllm.connector.link import (
    MAX_DIGESTS,
    MAX_LEASES,
    SCHEDULER_DECODER,
    EngineConnection,
    Grant,
    LeasesEnded,
    Missing,
    Release,
    Role,
)


class SchedulerLink:
    def __init__(self, address: str) -> None:
        self.table = LeaseTable()
        self._reported_missing: dict[str, set[str]] = {}
        self._connection = EngineConnection(address, Role.SCHEDULER)
        self._connection.listen(SCHEDULER_DECODER, self._handle)

    def reserve(self, request: str, digests: Sequence[str]) -> int:
        """Returns how many embeddings, from the first on, can be loaded. Reports missing ones, once per request."""
        num_loadable = self.table.reserve(request, digests)
        if num_loadable < len(digests):
            reported = self._reported_missing.setdefault(request, set())
            missing = [
                digest
                for digest in dict.fromkeys(digests[num_loadable:])
                if digest not in reported and not self.table.has(digest)
            ]
            reported.update(missing)
            for first in range(0, len(missing), MAX_DIGESTS):
                self._connection.send(Missing(request, missing[first : first + MAX_DIGESTS]))
        return num_loadable

    def end_step(self) -> None:
        """Must be called when all loads of a step are planned; reports the leases that end then."""
        self._report_ended(self.table.end_step())

    def finish_request(self, request: str) -> None:
        self._reported_missing.pop(request, None)
        self._report_ended(self.table.finish_request(request))

    def close(self) -> None:
        self._connection.close()

    def _report_ended(self, leases: Sequence[EndedLease]) -> None:
        for first in range(0, len(leases), MAX_LEASES):
            self._connection.send(LeasesEnded(list(leases[first : first + MAX_LEASES])))

    def _handle(self, message: Grant | Release, file: int | None) -> None:
        if file is not None:
            os.close(file)
        match message:
            case Grant(lease):
                self.table.grant(lease)
            case Release(leases):
                self._report_ended([ended for lease in leases for ended in self.table.release(lease)])
