"""SM clock, power and temperature of a GPU, sampled through NVML by a separate process.

    with sampled(index=0) as readings:
        ...
    readings.between(began_s, ended_s)    # None without a GPU or without nvidia-ml-py

Times are those of `time.monotonic`, a clock that all processes of a host share.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

EVERY_S = 0.05
_END_S = 10.0


@dataclass(frozen=True)
class Reading:
    """One sample."""

    at_s: float
    sm_mhz: float
    watts: float
    celsius: float


@dataclass(frozen=True)
class Conditions:
    """Conditions during a run: median SM clock, mean power, highest temperature, number of samples."""

    sm_mhz: float
    watts: float
    celsius: float
    samples: int

    @classmethod
    def of(cls, readings: Sequence[Reading]) -> Conditions | None:
        """Summarizes samples; None without samples."""
        if not readings:
            return None
        return cls(
            statistics.median(reading.sm_mhz for reading in readings),
            statistics.fmean(reading.watts for reading in readings),
            max(reading.celsius for reading in readings),
            len(readings),
        )


class Nvml:
    """Reads one GPU. A reading takes well under a millisecond on the host and no time on the GPU."""

    def __init__(self, library: Any, index: int) -> None:  # noqa: ANN401 # pynvml is untyped
        self._library = library
        library.nvmlInit()
        self._handle = library.nvmlDeviceGetHandleByIndex(index)

    @classmethod
    def open(cls, index: int = 0) -> Nvml | None:
        """Returns a reader; None if nvidia-ml-py, the driver or the GPU is missing."""
        try:
            library = importlib.import_module("pynvml")
        except ImportError:
            return None
        try:
            return cls(library, index)
        except library.NVMLError:
            return None

    def read(self) -> Reading:
        library, handle = self._library, self._handle
        return Reading(
            time.monotonic(),
            float(library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM)),
            library.nvmlDeviceGetPowerUsage(handle) / 1e3,
            float(library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU)),
        )


class Readings:
    """Samples that a sampling process has written so far, one JSON object per line."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def between(self, began_s: float, ended_s: float) -> Conditions | None:
        """Returns the conditions from `began_s` to `ended_s` of `time.monotonic`; None without samples."""
        if self._file is None:
            return None
        found = []
        for line in self._file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # the last line may be incomplete
                reading = Reading(**json.loads(line))
                if began_s <= reading.at_s <= ended_s:
                    found.append(reading)
        return Conditions.of(found)


@contextlib.contextmanager
def sample_gpu(index: int | None) -> Iterator[Readings]:
    """Samples GPU `index` until the block ends; without samples if it is None or the GPU cannot be read."""
    if index is None or Nvml.open(index) is None:
        yield Readings(None)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "readings.jsonl"
        with file.open("w") as out:
            process = subprocess.Popen([sys.executable, __file__, str(index)], stdout=out)
        try:
            yield Readings(file)
        finally:
            process.terminate()
            process.wait(_END_S)


def main(index: int) -> None:
    nvml = Nvml.open(index)
    if nvml is None:
        raise SystemExit(f"GPU {index} cannot be read by NVML")
    while True:
        print(json.dumps(asdict(nvml.read())), flush=True)
        time.sleep(EVERY_S)


if __name__ == "__main__":
    main(int(sys.argv[1]))
