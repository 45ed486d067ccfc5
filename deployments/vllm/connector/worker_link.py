"""A worker process's end of the link: maps and unmaps encoders' memory, and reports loads."""

from __future__ import annotations

from deployments.vllm.connector.link import WORKER_DECODER, EngineConnection, Loaded, Map, Mapped, Role, Unmap
from deployments.vllm.connector.worker_memory import WorkerMemory


class WorkerLink:
    def __init__(self, address: str, memory: WorkerMemory) -> None:
        self._memory = memory
        self._connection = EngineConnection(address, Role.WORKER)
        self._connection.listen(WORKER_DECODER, self._handle)

    def report_loaded(self, loaded: Loaded) -> None:
        self._connection.send(loaded)

    def close(self) -> None:
        self._connection.close()

    def _handle(self, message: Map | Unmap, file: int | None) -> None:
        match message:
            case Map(server, num_bytes):
                error = None
                try:
                    if file is None:
                        raise OSError("the message carries no file descriptor")
                    self._memory.map(server, file, num_bytes)
                except Exception as failed:  # of any type: the replica waits for the answer
                    error = str(failed)
                self._connection.send(Mapped(server, error))
            case Unmap(server):
                self._memory.unmap(server)
