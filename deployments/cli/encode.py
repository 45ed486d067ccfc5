"""`vitray encode`: computes the embeddings of a folder of pictures, without a server."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

BAD = "bad.jsonl"
MIB = 1024**2
_LISTED = 10


@click.command()
@click.argument("pictures", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "-o", "--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder for the embeddings."
)
@click.option("-m", "--model", required=True, help="Checkpoint folder or hub name.")
@click.option("--dtype", default="auto", show_default=True, type=click.Choice(["auto", "float32", "bfloat16"]),
              help='Type of weights and embeddings. "auto": that of the checkpoint.')  # fmt: skip
@click.option(
    "--device",
    default="auto",
    show_default=True,
    help='Device that encodes, such as "cpu". "auto": a GPU if there is one.',
)
@click.option(
    "--min-pixels",
    type=click.IntRange(min=1),
    help="Minimum pixels of a resized picture. Default: the checkpoint's limit.",
)
@click.option(
    "--max-pixels",
    type=click.IntRange(min=1),
    help="Maximum pixels of a resized picture. Default: the checkpoint's limit.",
)
@click.option(
    "--threads",
    default=lambda: min(8, os.cpu_count() or 1),
    show_default="number of CPUs, at most 8",
    type=int,
    help="Threads that decode pictures.",
)
@click.option("--images-per-file", default=256, show_default=True, type=click.IntRange(min=1),
              help="Maximum number of embeddings in a file.")  # fmt: skip
def encode(
    pictures: Path,
    out: Path,
    model: str,
    dtype: str,
    device: str,
    min_pixels: int | None,
    max_pixels: int | None,
    threads: int,
    images_per_file: int,
) -> None:
    """Encode the PICTURES of a folder and its subfolders, and store the embeddings in another folder.

    \b
    vitray encode pictures/ --out embeddings/ --model models/scenes-8m

    A later run, after an interruption or with new pictures, encodes only what is missing. A line of manifest.jsonl
    names a picture's `file` and in it the tensor `digest`: `[num_tokens, width]`, as the language model expects it.
    Unreadable pictures are listed in bad.jsonl; the next run tries them again.

    The command uses one GPU. For several, run it once for each (CUDA_VISIBLE_DEVICES), on parts of the
    pictures and with a folder for the embeddings of each part.

    Exits with 1 if embeddings could not be computed or written; unreadable pictures are not a failure.
    """
    from tqdm import tqdm

    from configs.encoder_config import EncoderConfig
    from encoder import Encoder
    from encoder.checkpoint.files import resolve_checkpoint
    from encoder.checkpoint.image_rules import PixelBounds
    from encoder.offline.encode_folder import encode_folder, list_images
    from encoder.offline.store import EmbeddingFiles, EmbeddingFilesError

    try:
        bounds = PixelBounds(min_pixels, max_pixels)
        config = EncoderConfig(dtype=dtype)  # type: ignore[arg-type] # click has checked it
        encoder = Encoder.from_checkpoint(resolve_checkpoint(model), config, device=device, progress=True)
        about = {
            "dtype": encoder.identity.dtype,
            "width": encoder.identity.vision.width,
            "min_pixels": min_pixels,
            "max_pixels": max_pixels,
            "fingerprint": encoder.identity.fingerprint,
        }
        with (
            EmbeddingFiles(out, about, images_per_file=images_per_file, bytes_per_file=256 * MIB) as files,
            tqdm(total=len(list_images(pictures)), unit="picture", disable=None) as bar,
        ):
            outcome = encode_folder(encoder, pictures, files, bounds=bounds, threads=threads, progress=bar.update)
        lines = [json.dumps({"path": path, "reason": reason}) for path, reason in outcome.failed]
        (out / BAD).write_text("".join(f"{line}\n" for line in lines))
    except (EmbeddingFilesError, ValueError, RuntimeError) as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        raise click.ClickException(
            "interrupted; finished embeddings are kept, and the same command continues from there"
        ) from None
    except OSError as error:
        raise click.ClickException(f"{error.filename or out}: {error.strerror or error}") from error
    for path, reason in outcome.failed[:_LISTED]:
        click.echo(f"bad: {path}: {reason}", err=True)
    if len(outcome.failed) > _LISTED:
        click.echo(f"and {len(outcome.failed) - _LISTED} more in {out / BAD}", err=True)
    total = outcome.encoded + outcome.duplicates + outcome.skipped
    click.echo(
        f"{total} embeddings in {out}: {outcome.encoded} encoded, {outcome.duplicates} of the same bytes as another, "
        f"{outcome.skipped} there already; {len(outcome.failed)} bad pictures"
    )
    if not total and not outcome.failed:
        raise click.ClickException(f"{pictures} contains no pictures")
