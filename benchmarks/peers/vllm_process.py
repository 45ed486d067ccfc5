"""vLLM's towers in a peer's process: eager or compiled, and as encoder graphs with several sets of budgets.

The model is built once for each tower and quantisation, without an engine, from a checkpoint with our weights; graphs
of every set of budgets are captured on it. Written for the private names of vLLM 0.26.
"""

from __future__ import annotations

import gc
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.ladder.baton import Build, Built, Run, Sustain, Take, Taken
from benchmarks.ladder.cells import relative_errors
from benchmarks.ladder.gpu_clock import Nvml
from benchmarks.ladder.measure import Local
from benchmarks.ladder.towers import INPUT_SETS, Shape, config_of, random_inputs
from benchmarks.ladder.turns import Spell, Timed
from benchmarks.peers.vllm_tower import (
    BUDGETS,
    FINE_BUDGETS,
    FP8_PREFIX,
    MAX_IMAGES,
    PREFIX,
    compiled_shape,
    compiles,
    fitted_budgets,
    graph_images,
)
from deployments.vllm import import_shim

logger = logging.getLogger(__name__)

_MAX_TOKENS = 16384
Embed = Callable[[Mapping[str, Any]], Sequence[Tensor]]


def make() -> VllmSide:
    """Imports vLLM, which is slow, without GPU work."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_USE_V2_MODEL_RUNNER="0",  # the newer runner has no encoder graphs
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        FLASHINFER_DISABLE_VERSION_CHECK="1",
    )
    import_shim.activate()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    import vllm

    return VllmSide(vllm.__version__)


@dataclass(frozen=True)
class Loaded:
    """A vLLM model and its configuration. `built`: "model", or "engine" with vLLM's own random weights."""

    model: Any
    config: Any
    built: str


@dataclass(frozen=True)
class Configuration:
    """One configuration of a loaded model."""

    label: str
    loaded: Loaded
    embed: Embed


class VllmSide:
    """vLLM's implementation of `baton.Side`."""

    def __init__(self, version: str) -> None:
        self._version = version
        self._device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        self._nvml = Nvml.open() if self._device.type == "cuda" else None
        self._configurations: dict[str, Configuration] = {}
        self._asked: Build | None = None
        self._inputs: list[dict[str, Any]] = []

    def build(self, asked: Build) -> Built:
        """Builds every configuration of a tower; those that fail are skipped with the reason."""
        self._configurations, self._inputs, self._asked = {}, [], asked
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        skipped: dict[str, str] = {}
        facts: dict[str, object] = {"version": self._version}
        verb, said = ("compiled", "vLLM, compiled") if compiles(asked.tower) else ("launched", "vLLM")
        for prefix, quantization in ((PREFIX, None), (FP8_PREFIX, "fp8")):
            label = said if quantization is None else f"{said}, fp8"
            try:
                loaded = self._load(asked, quantization)
                self._compile(loaded, asked)
            except Exception as error:  # a model that fails must not stop the other
                logger.exception("%s is left out", label)
                skipped[f"{prefix} {verb}"] = f"failed: {type(error).__name__}: {error}"[:500]
                continue
            facts[f"{prefix} built as"] = loaded.built
            self._configurations[f"{prefix} {verb} eager"] = Configuration(
                f"{label}, eager", loaded, _eager(loaded.model)
            )
            if self._device.type != "cuda":
                continue
            for name, sets in _budget_sets(asked).items():
                try:
                    graphs = {images: self._graphs(loaded, budgets, images) for images, budgets in sets.items()}
                except Exception as error:
                    logger.exception("%s, graphs of %s are left out", label, sets)
                    skipped[f"{prefix} {verb} graphs {name}"] = f"failed: {type(error).__name__}: {error}"[:500]
                    continue
                facts[f"{prefix} {name}"] = {str(images): list(budgets) for images, budgets in sets.items()}
                configuration = Configuration(f"{label}, graphs, {name} budgets", loaded, _replayed(graphs))
                self._configurations[f"{prefix} {verb} graphs {name}"] = configuration
        return Built(
            {name: configuration.label for name, configuration in self._configurations.items()}, skipped, facts
        )

    def _compile(self, loaded: Loaded, asked: Build) -> None:
        """Runs the model once, which compiles it, before any graph is captured, as vLLM's engine does."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(loaded.config), _running(loaded):
            loaded.model.embed_multimodal(**self._fields(asked, compiled_shape(asked.shapes))[0])

    def _fields(self, asked: Build, shape: Shape) -> list[dict[str, Any]]:
        """Returns vLLM's model arguments for each input set of a shape; grids stay in host memory, as vLLM expects."""
        config = config_of(asked.tower, tiny=asked.tiny, dtype=asked.dtype)
        grids = torch.tensor(shape.grids)
        found = random_inputs(config, shape.grids, sets=INPUT_SETS, seed=asked.seed, device=self._device)
        dtype = getattr(torch, asked.dtype)
        return [{"pixel_values": values.to(dtype), "image_grid_thw": grids} for values in found]

    def take(self, asked: Take) -> Taken:
        """Loads a shape's inputs, runs every configuration once, and compares it with the reference."""
        assert self._asked is not None
        shape = next(shape for shape in self._asked.shapes if shape.name == asked.shape)
        self._inputs = self._fields(self._asked, shape)
        expected = torch.load(asked.reference, map_location=self._device) if asked.reference else None
        errors: dict[str, list[float]] = {}
        failed: dict[str, str] = {}
        for name, configuration in self._configurations.items():
            try:
                with _running(configuration.loaded):
                    tokens = configuration.embed(self._inputs[0])
                    if expected is not None and configuration.loaded.built == "model":
                        errors[name] = relative_errors(tokens, expected)
            except Exception as error:
                logger.exception("%s fails on %s", configuration.label, asked.shape)
                failed[name] = f"{type(error).__name__}: {error}"[:500]
        return Taken(errors, failed)

    def run(self, asked: Run) -> Timed:
        configuration = self._configurations[asked.name]
        with _running(configuration.loaded):
            return self._local(configuration).run(asked.number, read_clock=asked.read_clock)

    def sustain(self, asked: Sustain) -> Spell:
        configuration = self._configurations[asked.name]
        with _running(configuration.loaded):
            return self._local(configuration).sustain(asked.settle_s, asked.seconds)

    def _local(self, configuration: Configuration) -> Local:
        return Local(lambda number: configuration.embed(self._inputs[number % INPUT_SETS]), self._device, self._nvml)

    def _load(self, asked: Build, quantization: str | None) -> Loaded:
        try:
            return _built_alone(asked, quantization, self._device)
        except Exception:
            if self._device.type != "cuda":
                raise
            logger.exception("no model without an engine; with one, and vLLM's own random weights")
            return _built_by_engine(asked, quantization)

    def _graphs(self, loaded: Loaded, budgets: Sequence[int], images: int) -> Any:  # noqa: ANN401 # vLLM's manager
        """Captures graphs as vLLM's runner does. vLLM's manager reads its budgets from the configuration once."""
        from vllm.config import set_current_vllm_config
        from vllm.distributed.parallel_state import graph_capture
        from vllm.forward_context import set_forward_context
        from vllm.platforms import current_platform
        from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

        config = loaded.config
        config.compilation_config.encoder_cudagraph_token_budgets = list(budgets)
        config.compilation_config.encoder_cudagraph_max_vision_items_per_batch = graph_images(images, budgets)
        with set_current_vllm_config(config), set_forward_context(None, config), torch.inference_mode():
            manager = EncoderCudaGraphManager(config, self._device, config.model_config.dtype, loaded.model)
            with graph_capture(device=self._device):
                manager.capture(graph_pool=current_platform.graph_pool_handle())
        return manager


def _budget_sets(asked: Build) -> dict[str, dict[int, list[int]]]:
    """Returns sets of budgets by name, each by the number of images that a batch may contain."""
    return {
        "doubling": {MAX_IMAGES: BUDGETS},
        "fine": {MAX_IMAGES: FINE_BUDGETS},
        "fitted": fitted_budgets(asked.shapes),
    }


def _eager(model: Any) -> Embed:  # noqa: ANN401 # vLLM's model
    return lambda fields: model.embed_multimodal(**fields)


def _replayed(graphs: Mapping[int, Any]) -> Embed:
    """Replays the graphs for the batch's number of images, or those for any number if there is one set."""

    def embed(fields: Mapping[str, Any]) -> Sequence[Tensor]:
        images = len(fields["image_grid_thw"])
        manager = graphs[images] if images in graphs else next(iter(graphs.values()))
        return manager.execute(fields)  # type: ignore[no-any-return]

    return embed


@contextmanager
def _running(loaded: Loaded) -> Iterator[None]:
    from vllm.forward_context import set_forward_context

    with torch.inference_mode(), set_forward_context(None, loaded.config):
        yield


def _arguments(asked: Build, quantization: str | None, device: torch.device) -> dict[str, Any]:
    graphs = {
        "cudagraph_mm_encoder": True,
        "compile_mm_encoder": compiles(asked.tower),
        "encoder_cudagraph_token_budgets": BUDGETS,
        "encoder_cudagraph_max_vision_items_per_batch": MAX_IMAGES,
        "cudagraph_capture_sizes": [1, 2, 4],
    }
    return {
        "model": asked.checkpoint,
        "dtype": asked.dtype,
        "quantization": quantization,
        "max_model_len": _MAX_TOKENS,
        "max_num_batched_tokens": _MAX_TOKENS,
        "max_num_seqs": MAX_IMAGES,
        "limit_mm_per_prompt": {"image": MAX_IMAGES, "video": 0},
        **({"compilation_config": graphs} if device.type == "cuda" else {"enforce_eager": True}),
    }


def _built_alone(asked: Build, quantization: str | None, device: torch.device) -> Loaded:
    """Builds the tower with the checkpoint's weights and without engine, language model and cache."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.distributed.parallel_state import model_parallel_is_initialized
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    arguments = _arguments(asked, quantization, device)
    if hasattr(EngineArgs, "mm_device_do_normalize"):  # newer than 0.26; our inputs are already normalised
        arguments["mm_device_do_normalize"] = False
    config = EngineArgs(mm_encoder_only=True, **arguments).create_engine_config()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

        _set_torch_accelerator_to_noop()
    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            rendezvous = f"file://{tempfile.mkdtemp()}/rendezvous"
            init_distributed_environment(1, 0, rendezvous, 0, "nccl" if device.type == "cuda" else "gloo")
            ensure_model_parallel_initialized(1, 1)
            if device.type == "cuda":
                from vllm.v1.worker.workspace import init_workspace_manager

                init_workspace_manager(device, 1)
        return Loaded(get_model(vllm_config=config), config, "model")


def _built_by_engine(asked: Build, quantization: str | None) -> Loaded:
    """Builds the tower inside vLLM's engine, which takes ten times as long; all weights are vLLM's dummy weights."""
    from vllm import LLM

    arguments = _arguments(asked, quantization, torch.device("cuda"))
    engine: Any = LLM(load_format="dummy", gpu_memory_utilization=0.25, **arguments)
    runner = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    return Loaded(runner.get_model(), runner.vllm_config, "engine")
