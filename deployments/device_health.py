"""Whether the device of a replica can still be trusted, from the errors that it gives.

After a CUDA error nothing in the process can use the device any more. Memory that runs out may come back; a replica for
which it never does is of no use either. It must not know what is computed, nor what is done about a sick device.
"""

from __future__ import annotations

import threading
from enum import Enum

from encoder.device_errors import cuda_error, out_of_memory

OUT_OF_MEMORY_IN_A_ROW = 6
"""Images, each tried alone, with none encoded between them. More than one request is tried, so that it needs two."""


class Fault(Enum):
    """Why a device is not to be used any more; the metrics' tag `reason`."""

    CUDA_ERROR = "cuda_error"
    OUT_OF_MEMORY = "out_of_memory"


class DeviceHealth:
    """Of one device. Any thread may tell it what happened."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._out_of_memory = 0
        self.fault: Fault | None = None
        """Once there, it stays."""

    def worked(self) -> None:
        """A batch was encoded."""
        with self._lock:
            self._out_of_memory = 0

    def failed(self, error: BaseException, *, alone: bool) -> bool:
        """A batch failed; `alone`: of one image, and it is not tried again. Whether this made the device sick."""
        with self._lock:
            before = self.fault
            if cuda_error(error):
                self.fault = Fault.CUDA_ERROR
            elif alone and out_of_memory(error):
                self._out_of_memory += 1
                if self._out_of_memory >= OUT_OF_MEMORY_IN_A_ROW:
                    self.fault = self.fault or Fault.OUT_OF_MEMORY
            return before is None and self.fault is not None
