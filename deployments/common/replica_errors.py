"""Errors of encoder and LLM replicas on which their callers act.

They are pickled between processes. The ingress imports them without the modules that raise them, so this module must
not import torch, directly or indirectly.
"""

from __future__ import annotations


class QueueFullError(RuntimeError):
    """The tokens queued for the GPU have reached their bound."""


class WorkerEndedError(RuntimeError):
    """A thread or process that the replica depends on has ended; another replica may do the work."""


class DeviceFailedError(WorkerEndedError):
    """The device has failed permanently."""


class EngineDeadError(WorkerEndedError):
    """The engine of a language model has ended, and the replica answers no more requests."""

    def __init__(self, replica: str, had_request: bool) -> None:
        """`replica`: its unique id. `had_request`: the engine ended during this request, which may be the cause."""
        super().__init__(replica, had_request)
        self.replica = replica
        self.had_request = had_request

    def __str__(self) -> str:
        return f"the engine of replica {self.replica} has ended"


class DeviceMemoryError(RuntimeError):
    """The device ran out of memory for an image that was encoded alone."""


class OtherIdentityError(RuntimeError):
    """The replica's weights or numerics differ from the identity of the job; another replica may match it."""


class IdentityGoneError(RuntimeError):
    """No running replica has the identity of the call; the call must be made again for another identity."""


class VersionGoneError(RuntimeError):
    """All running replicas have another version of the messages than the caller, which an update is about to end."""


class TransferFailedError(RuntimeError):
    """An embedding could not be read from its stated location. The request can be retried."""
