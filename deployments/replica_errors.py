"""What encoders and language models fail with, as far as their callers act upon it.

These cross from process to process. The ingress knows them and does not load what raises them, so this module must not
import torch, nor anything that does.
"""

from __future__ import annotations


class QueueFullError(RuntimeError):
    """The tokens that wait for the GPU have reached their bound."""


class WorkerEndedError(RuntimeError):
    """The thread that owned the GPU has ended; nothing is encoded here any more."""


class DeviceSickError(WorkerEndedError):
    """The device has failed for good."""


class DeviceMemoryError(RuntimeError):
    """The device had no memory left for an image, though it was tried alone."""


class IdentityChangedError(RuntimeError):
    """The job's digest was made for other weights or numerics; ask for the identity again."""


class TransferFailedError(RuntimeError):
    """An embedding could not be had where it was said to lie. The request can be tried again."""
