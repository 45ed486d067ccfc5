"""Times the start-up check of fused kernels on the published towers with random weights; needs a GPU.

    python scripts/start_check.py [--arch qwen3_vl] [--no-fp8] [--out start_check.json]

Builds and fuses each tower and compares it with the eager tower in float32 on every class of kernel, twice in this
process, since the first run compiles or loads kernels. The fp8 forward is checked too if the GPU supports it. The last
line on stdout is JSON. Exits with 1 if an error exceeds its limit or a second run takes 2 s or more.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.ladder.towers import NAMES, SECTIONS, config_of, random_tower
from benchmarks.record import gpu, provenance, write
from configs.encoder_config import EncoderConfig
from encoder import forwards
from encoder.fp8.tower import CAPABILITY
from encoder.fp8.validation import Fp8RefusedError, RunGrids
from encoder.start_check import ClassError, StartCheck
from encoder.towers.tower import VisionTower

LIMIT_S = 2.0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The start-up check of fused kernels on the published towers, timed.")
    parser.add_argument(
        "--arch",
        choices=tuple(SECTIONS),
        action="append",
        help="tower to check; may be given several times; default: all",
    )
    parser.add_argument("--no-fp8", action="store_true", help="skip the 8-bit forward")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--commit", help="commit of the sources, if they are not a git checkout")
    return parser.parse_args(arguments)


def seconds(run: Callable[[], object]) -> float:
    """Returns the seconds of `run`, including the GPU's work for it."""
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - began


class TimedCheck(StartCheck):
    """Runs the check of each forward twice, and records seconds and errors instead of raising."""

    last: TimedCheck

    def __init__(self, tower: VisionTower) -> None:
        TimedCheck.last, self.checks = self, list[dict[str, object]]()
        self.reference_s = [seconds(lambda: super(TimedCheck, self).__init__(tower)) for _ in range(2)]

    def __call__(self, run: RunGrids, tolerance: float = 0.0) -> list[ClassError]:
        """Appends the result to `checks` and returns the errors of the first run."""
        found: list[list[ClassError]] = []
        took = [seconds(lambda: found.append(self.errors(run))) for _ in range(2)]
        totals = [reference + forward for reference, forward in zip(self.reference_s, took, strict=True)]
        worst = max(one.error for one in [*found[0], *found[1]])
        failed = [failure for errors in found for failure in self.over_limit(errors, tolerance)]
        self.checks.append(
            {
                "cold_s": round(totals[0], 3),
                "warm_s": round(totals[1], 3),
                "of_these_reference_s": [round(each, 3) for each in self.reference_s],
                "limit": max(self.tolerance, tolerance),
                "eager_error": self.eager_error,
                "worst_error": worst,
                "passed": not failed and totals[1] < LIMIT_S,
                "classes": [asdict(one) for one in found[0]],
            }
        )
        return found[0]


def check(arch: str, *, fp8: bool) -> list[dict[str, object]]:
    """Checks the tower `arch` as at start-up: the fused forward, then the fp8 forward."""
    device = torch.device("cuda")
    config = config_of(arch, tiny=False, dtype="bfloat16")
    tower = random_tower(config, seed=0, dtype=torch.bfloat16, device=device)
    named: list[dict[str, object]] = []
    try:
        attention = forwards.choose_forward(tower, EncoderConfig(fused_kernels=True, fp8=fp8)).attention
    except Fp8RefusedError as error:
        named, attention = [{"forward": "fp8", "refused": str(error), "passed": False}], ""
    checks = zip(("fused", "fp8"), TimedCheck.last.checks, strict=False)
    return [
        {"tower": NAMES[arch], "attention": attention, **one}
        for one in [*({"forward": name, **found} for name, found in checks), *named]
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parse(arguments)
    if not torch.cuda.is_available():
        print("the start-up check needs a GPU, and none was found", file=sys.stderr)
        return 2
    fp8 = not asked.no_fp8 and torch.cuda.get_device_capability() >= CAPABILITY
    setattr(forwards, "StartCheck", TimedCheck)  # noqa: B010 # mypy does not see this export
    checks: list[dict[str, object]] = []
    for arch in asked.arch or SECTIONS:
        checks += check(arch, fp8=fp8)
        gc.collect()
        torch.cuda.empty_cache()
    source = {
        **provenance(asked.commit, arguments),
        "command": ["scripts/start_check.py", *(arguments or sys.argv[1:])],
    }
    write({"gpu": gpu(), **source, "limit_s": LIMIT_S, "checks": checks}, asked.out)
    return 0 if all(each["passed"] for each in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
