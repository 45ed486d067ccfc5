"""`vitray encode` with several processes, one per GPU: Ray Data distributes the pictures, and restarts lost tasks.

Each process writes the files of its shares. The process that starts them owns the folder and lists the embeddings in
its manifest. A share that is encoded twice gives the same result.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from configs.encoder_config import EncoderConfig
from encoder import Encoder
from encoder.checkpoint.image_rules import PixelBounds
from encoder.offline.encode_folder import Outcome, encode_paths, find_missing
from encoder.offline.partial_store import EmbeddingPart
from encoder.offline.store import EmbeddingFiles, EmbeddingFilesError, Entry, another_encoder_error, same_encoder

ROOT = Path(__file__).resolve().parents[2]
SHARE = 64
"""Maximum number of pictures in a share, which is lost when a process dies, and is one step of the progress bar."""


@dataclass(frozen=True)
class Job:
    """Arguments of every process."""

    checkpoint: str
    pictures: str
    out: str
    dtype: str = "auto"
    device: str = "auto"
    min_pixels: int | None = None
    max_pixels: int | None = None
    threads: int = 2
    bytes_per_file: int = 256 * 1024**2
    about: dict[str, object] | None = None
    """Description of the embeddings that the folder already contains (`about`)."""

    @property
    def bounds(self) -> PixelBounds:
        return PixelBounds(self.min_pixels, self.max_pixels)


def load(job: Job, *, progress: bool = False) -> Encoder:
    """Returns the encoder of a process. Raises ValueError if it cannot be loaded."""
    config = EncoderConfig(dtype=job.dtype)  # type: ignore[arg-type] # checked by the command that creates the job
    return Encoder.from_checkpoint(job.checkpoint, config, device=job.device, progress=progress)


def about(encoder: Encoder, job: Job) -> dict[str, object]:
    """Returns the properties that determine the embeddings, which are recorded in their folder."""
    return {
        "dtype": encoder.identity.dtype,
        "width": encoder.identity.vision.width,
        "min_pixels": job.min_pixels,
        "max_pixels": job.max_pixels,
        "fingerprint": encoder.identity.fingerprint,
    }


class EncodeShares:
    """Ray Data callable with one encoder per process, which encodes shares of the pictures."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._encoder = load(job)
        self._about = about(self._encoder, job)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """Maps `share` to `done`, both JSON: number and paths; encoder, entries and bad pictures, or an error."""
        return {"done": [json.dumps(self._done(json.loads(str(share)))) for share in batch["share"]]}

    def _done(self, share: dict[str, Any]) -> dict[str, object]:
        job = self._job
        if job.about is not None and not same_encoder(job.about, self._about):
            return {"error": another_encoder_error(Path(job.out))}
        part = EmbeddingPart(Path(job.out), share["number"], bytes_per_file=job.bytes_per_file)
        try:
            with part:
                outcome = encode_paths(
                    self._encoder, Path(job.pictures), share["paths"], part, bounds=job.bounds, threads=job.threads
                )
        except (EmbeddingFilesError, OSError) as error:
            return {"error": str(error)}
        entries = [asdict(entry) for entry in part.entries]
        return {"about": self._about, "entries": entries, "encoded": outcome.encoded, "bad": outcome.failed}


def shares(paths: Sequence[str], processes: int, first_number: int) -> list[dict[str, Any]]:
    """Splits the paths into shares of at most SHARE pictures, small enough that every process gets one."""
    size = max(1, min(SHARE, -(-len(paths) // processes)))
    cut = [list(paths[begin : begin + size]) for begin in range(0, len(paths), size)]
    return [{"number": first_number + place, "paths": found} for place, found in enumerate(cut)]


def encode_folder(
    job: Job, files: EmbeddingFiles, *, processes: int, progress: Callable[[int], object] = lambda number: None
) -> Outcome:
    """Encodes the pictures that `files` lacks. Each process gets a GPU, or a CPU if there is no GPU or `job.device` is
    "cpu".

    Raises:
            EmbeddingFilesError: embeddings cannot be written, or the folder belongs to another encoder.
            RuntimeError: Ray Data is not installed, or failed.
    """
    wanted, skipped = find_missing(Path(job.pictures), files)
    outcome = Outcome(skipped=skipped)
    progress(skipped)
    if not wanted:
        return outcome
    for done in _by_ray(replace(job, about=files.about), shares(wanted, processes, files.next_number), processes):
        if "error" in done:
            raise EmbeddingFilesError(done["error"])
        files.claim(done["about"])
        entries = [Entry(**{**entry, "grid_thw": tuple(entry["grid_thw"])}) for entry in done["entries"]]
        files.add_entries(entries)
        outcome.encoded += done["encoded"]
        outcome.duplicates += len(entries) - done["encoded"]
        outcome.failed += [(path, reason) for path, reason in done["bad"]]
        progress(len(entries) + len(done["bad"]))
    outcome.failed.sort()
    return outcome


def _by_ray(job: Job, cut: Sequence[dict[str, Any]], processes: int) -> Any:  # noqa: ANN401 # JSON of each share
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise RuntimeError(f"several processes need Ray Data: pip install 'ray[data]' ({error})") from error
    started = not ray.is_initialized()
    if started:
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        ray.init(
            address=os.environ.get("RAY_ADDRESS") or "local",
            runtime_env={"env_vars": {"PYTHONPATH": paths}},
            include_dashboard=False if not os.environ.get("RAY_ADDRESS") else None,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    try:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.WARNING)
        there = ray.cluster_resources()
        on_gpus = job.device != "cpu" and there.get("GPU", 0) >= 1
        # Ray Data would wait for ever for actors beyond the cluster's resources.
        most = min(processes, len(cut), max(1, int(there["GPU" if on_gpus else "CPU"])))
        rows = ray.data.from_items([{"share": json.dumps(share)} for share in cut], override_num_blocks=len(cut))
        done = rows.map_batches(
            EncodeShares,
            fn_constructor_args=(job,),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=most),
            num_gpus=1 if on_gpus else 0,
            num_cpus=0 if on_gpus else 1,
        )
        for row in done.iter_rows():
            yield json.loads(str(row["done"]))
    except ray.exceptions.RayError as error:
        raise RuntimeError(f"Ray Data gave up: {error}") from error
    finally:
        if started:
            ray.shutdown()
