"""Memory of processes on other hosts: how one reads what another has registered, whatever moves the bytes.

A reader knows a process by its introduction, opaque bytes that may travel any way. It must not know what lies in the
memory, nor which library does it.
"""

from __future__ import annotations

from typing import Protocol


class ReadError(RuntimeError):
    """A read has ended without its bytes. Nothing is written into the reader's memory any more."""


class Reading(Protocol):
    def ended(self) -> bool:
        """Whether all bytes are there; to be asked until they are. Raises ReadError."""
        ...


class RemoteMemory(Protocol):
    """This process's end. Made on any thread, then used on one."""

    def register(self, address: int, num_bytes: int) -> None:
        """Memory of this process that others may read, or that is read into; for as long as the process lives."""
        ...

    def introduction(self) -> bytes:
        """What readers need to know of this process, after all `register`."""
        ...

    def read(self, introduction: bytes, source: int, target: int, num_bytes: int, *, told: bytes = b"") -> Reading:
        """Begins to read from address `source` of the other process to address `target` of this one. At its end the
        other one hears `told`. Raises ReadError."""
        ...

    def forget(self, introduction: bytes) -> None:
        """Ends the connection to it; a later read begins a new one."""
        ...

    def heard(self) -> list[bytes]:
        """What readers have told. To be called often while others read: on some networks it is what moves the bytes."""
        ...
