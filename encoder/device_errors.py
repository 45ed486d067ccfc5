"""What an error says about the device."""

from __future__ import annotations

import torch


def check_device(device: torch.device) -> None:
    """Raises the CUDA error if the device is lost: after one, every CUDA call raises it. Does nothing after an error
    that leaves the device usable, such as a missing kernel image."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Also where CUDA itself says so, not torch's allocator."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, torch.AcceleratorError) and "out of memory" in str(error)
    )


def is_device_lost(error: BaseException) -> bool:
    """Whether an error is one of CUDA's after which the process has lost its device. Waits for the device."""
    if is_out_of_memory(error) or not (
        isinstance(error, torch.AcceleratorError) or (isinstance(error, RuntimeError) and "CUDA error" in str(error))
    ):
        return False
    try:
        check_device(torch.device("cuda"))
    except Exception:  # also where there is no CUDA
        return True
    return False
