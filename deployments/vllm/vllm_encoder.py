"""Encoder for architectures without a tower of ours: vLLM's own model class, loaded without its language model.

`VllmTower` loads the model and calls `embed_multimodal`; `VllmEncoder` packs items into batches and checks the number
of rows. Inputs come from `preparer.py`, which runs in decode workers.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import JsonValue
from torch import Tensor

from configs.encoder_config import EncoderConfig
from deployments.vllm import import_shim
from deployments.vllm.architectures import SOUNDS_ALONE
from deployments.vllm.checked_graphs import CheckedGraphs, Replay
from deployments.vllm.preparer import VISION_CHUNK, VllmInputs, noise_image, sample
from encoder.device_errors import is_device_lost, is_out_of_memory
from encoder.graphs.budgets import resolve_budgets
from encoder.images.generic_identity import GenericIdentity
from encoder.images.size import ImageError
from encoder.packing.cost_based import CostTable, ImageCost, plan_batches
from encoder.packing.greedy import Batch, pack
from encoder.packing.run_counts import Reason, RunCounts, RunRecord
from encoder.staging.staging import HostAllocator

logger = logging.getLogger(__name__)

IMAGES = ("image", VISION_CHUNK)
"""Modalities of images."""
SAMPLE_SIDES = (64, 112, 224, 448)
"""Sides in pixels of the images on which graphs are measured: for small budgets and for large ones."""
EAGER_MARGIN = 1.1
"""An eager run is chosen only if the graph takes at least 1.1 times as long: a busy host slows eager runs."""
MAX_IN_FLIGHT = 2
"""Batches launched before the oldest is awaited: one runs and the next is queued."""
SAMPLES_PER_SIDE = 4
"""Different images, so that a graph that mixes up images is found."""


class RowCountError(RuntimeError):
    """The tower returned another number of rows than the item's header states."""


@dataclass(frozen=True)
class VllmBatch:
    """A batch launched on the device."""

    batch: Batch
    outputs: list[Tensor]
    run_record: RunRecord
    ready: torch.cuda.Event | None = None
    """Recorded after the outputs, whose stream the thread that fetches them need not have; None on the CPU."""
    copy_stream: torch.cuda.Stream | None = None
    """Stream of the copies to host memory: on that of the outputs, they would wait for the next batch."""

    def fetch(self, allocate: HostAllocator | None = None) -> list[Tensor]:
        """Copies the embeddings to host memory, from `allocate` if it returns memory. Blocks."""
        if self.ready is not None:
            self.ready.synchronize()
        fetched = []
        with torch.cuda.stream(self.copy_stream):
            for output in self.outputs:
                rows, width = output.shape
                # float16 does not travel; float32 holds its values exactly.
                dtype = torch.float32 if output.dtype == torch.float16 else output.dtype
                place = None if allocate is None else allocate(rows, width, dtype)
                # Synchronises on purpose: the caller needs the values.
                fetched.append(output.to("cpu", dtype, copy=True) if place is None else place.copy_(output))
        return fetched


class Embedded(NamedTuple):
    """Output of the tower for a batch."""

    outputs: list[Tensor]
    """`[num_embeds, width]` of each item, on the device."""
    reason: Reason | None
    """Why no graph was replayed, for at least one item; None for graphs only."""
    budgets: tuple[int, ...]
    """Token budgets of the replayed graphs."""


class VllmEncoder:
    """A tower of vLLM with the packing rules of our own towers. Owned by the thread that made it.

    config, prepared = EncoderConfig(), Preparer("gemma-3-4b-it").prepare(file, "image", digest)
    encoder = VllmEncoder(VllmTower("gemma-3-4b-it", config, engine_args={}), config)
    [batch] = encoder.launch_batches([prepared])
    [embedding] = batch.fetch()  # [prepared.header.num_embeds, width]
    """

    resizes_on_device = False

    def __init__(self, tower: VllmTower, config: EncoderConfig) -> None:
        self.identity = GenericIdentity("", "", ())
        """Set by a server, which computes digests."""
        self._tower = tower
        self._budgets = resolve_budgets(config.encoder_cudagraph_token_budgets, graphs=False)
        self._max_items = config.encoder_cudagraph_max_images_per_batch
        self._cost_based = config.packing == "cost"
        self._costs: CostTable | None = None
        """Of images, once `warm_up` has measured them; None without graphs."""
        self._counts = RunCounts()
        self._in_flight: deque[torch.cuda.Event] = deque()

    def launch_batches(self, items: Sequence[VllmInputs]) -> Iterator[VllmBatch]:
        """Yields each batch once it has been launched; the caller retries the items of a batch that raised."""
        for batch in self._plan(items):
            self.wait_for_room()
            launched = self._run(items, batch)
            if launched.ready is not None:
                self._in_flight.append(launched.ready)
            yield launched

    def wait_for_room(self) -> None:
        """Blocks while MAX_IN_FLIGHT batches are in flight, so that items that arrive meanwhile are packed too."""
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            self._in_flight.popleft().synchronize()

    def num_to_launch(self, num_tokens: Sequence[int], waiting: int) -> int:
        return len(num_tokens)

    def count_tokens(self, item: VllmInputs) -> int:
        return item.num_tokens

    def idle_step(self) -> bool:
        return False

    @property
    def counts(self) -> RunCounts:
        return self._counts.copy()

    def warm_up(self, modalities: Sequence[str], prepare: Callable[[bytes, str], VllmInputs]) -> None:
        """Encodes an item of each modality, so that the first ones of requests do not wait for kernels to load and
        compile, and checks and measures the graphs. `prepare` takes a file and its modality. Failures are logged,
        unless the device is lost: a model may fail for one modality only."""
        for modality in modalities:
            try:
                for batch in self.launch_batches([prepare(sample(modality), modality)]):
                    batch.fetch()
            except Exception as error:  # models raise exceptions of any class
                if is_device_lost(error):
                    raise
                logger.warning("a sample %s could not be encoded at the start: %s", modality, error)
        if "image" in modalities and self._tower.graph_budgets:
            try:
                self._measure_graphs(prepare)
            except Exception as error:
                if is_device_lost(error):
                    raise
                logger.warning("graphs are replayed without measured times: %s", error)

    def _measure_graphs(self, prepare: Callable[[bytes, str], VllmInputs]) -> None:
        samples: dict[int, list[VllmInputs]] = {}
        for side in SAMPLE_SIDES:
            with suppress(ImageError):  # above the limits of the configuration
                first = prepare(noise_image(side, 0), "image")
                if first.num_tokens not in samples:  # many models resize all images to one size
                    others = [prepare(noise_image(side, seed), "image") for seed in range(1, SAMPLES_PER_SIDE)]
                    samples[first.num_tokens] = [first, *others]
        costs = self._tower.measure_graphs(list(samples.values()), self._max_items)
        self._costs = costs if self._cost_based else None

    def _plan(self, items: Sequence[VllmInputs]) -> list[Batch]:
        """Packs the items of each modality, since vLLM's towers take one modality at a time."""
        if not self._tower.graph_budgets:  # refused
            self._costs = None
        by_modality: dict[str, list[int]] = {}
        for index, item in enumerate(items):
            by_modality.setdefault(item.header.modality, []).append(index)
        batches = [
            Batch(tuple(indices[packed] for packed in batch.indices), batch.budget)
            for modality, indices in by_modality.items()
            for batch in self._pack([items[index].num_tokens for index in indices], modality)
        ]
        return sorted(batches, key=lambda batch: min(batch.indices))

    def _pack(self, num_tokens: Sequence[int], modality: str) -> list[Batch]:
        """Packs items of one modality: images by the measured costs. A batch without costs has no budget."""
        if modality in IMAGES and self._costs is not None:
            most_images = min(self._max_items, self._tower.max_graph_items)
            batches: list[Batch] = []
            for part in self._costs.split_for_latency(num_tokens, most_images):
                images = [ImageCost(num_tokens[index], 0.0) for index in part]
                packed = plan_batches(images, table=self._costs, max_images=most_images, max_tokens=self._budgets[-1])
                batches += [Batch(tuple(part[at] for at in batch.indices), batch.budget) for batch in packed]
            return batches
        most_items = 1 if self._tower.encodes_alone(modality) else self._max_items
        packed = pack(num_tokens, budgets=self._budgets, max_images=most_items)
        return [Batch(batch.indices, None) for batch in packed]

    def _run(self, items: Sequence[VllmInputs], batch: Batch) -> VllmBatch:
        batched = [items[index] for index in batch.indices]
        num_tokens = sum(item.num_tokens for item in batched)
        # Above what was measured, vLLM may have a graph whose time is not known.
        measured = 0 if self._costs is None else self._costs.budgets[-1]
        eagerly = batched[0].header.modality in IMAGES and batch.budget is None and num_tokens <= measured
        outputs, reason, budgets = self._tower.embed(batched, eagerly=eagerly)
        if len(outputs) != len(batched):
            raise RowCountError(f"the tower returned {len(outputs)} embeddings for {len(batched)} items")
        for item, output in zip(batched, outputs, strict=True):
            if output.ndim != 2 or output.shape[0] != item.header.num_embeds:
                raise RowCountError(
                    f"the tower returned shape {tuple(output.shape)} for an item of {item.header.num_embeds} rows"
                )
        if reason is None:
            self._counts.add_replay(num_tokens, max(sum(budgets), num_tokens))
        else:
            self._counts.add_eager_run(num_tokens, reason)
        record = RunRecord(sum(budgets) if budgets and reason is None else None, reason, num_tokens, len(batched))
        return VllmBatch(batch, outputs, record, self._tower.mark(), self._tower.copy_stream)


class VllmTower:
    """vLLM's model class with its towers only: no language model, KV cache, scheduler or engine."""

    def __init__(self, path: str | Path, config: EncoderConfig, engine_args: Mapping[str, JsonValue]) -> None:
        """Loads the towers of the checkpoint folder `path`. `engine_args`: arguments of vLLM's engine, such as `dtype`
        and `mm_processor_kwargs`."""
        import_shim.activate()
        import vllm.envs
        import vllm.ir
        from vllm.config import set_current_vllm_config
        from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader import get_model
        from vllm.multimodal.inputs import MultiModalKwargsItem
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.serial_utils import MsgpackDecoder

        if vllm.envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
            raise ValueError("VLLM_ALLOW_INSECURE_SERIALIZATION lets a decode worker send pickles: unset it")
        arguments = {
            "load_format": "safetensors",
            **engine_args,
            "model": str(path),
            "mm_encoder_only": True,
            "enforce_eager": True,
            "compilation_config": _graph_settings(config),
        }
        # Budgets of graphs end at max_num_batched_tokens, whose default depends on the context: that of `vllm serve`.
        self._config = EngineArgs(**arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)
        self._device = torch.device(self._config.device_config.device)
        on_gpu = self._device.type == "cuda"
        self.copy_stream = torch.cuda.Stream(self._device) if on_gpu else None
        """Stream on which embeddings are copied to host memory; None on the CPU."""
        if not on_gpu:  # or vLLM's loader would synchronise with an accelerator that does not exist
            from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

            _set_torch_accelerator_to_noop()
        # As vLLM's workers do, or its norms would be many kernels each.
        self._config.kernel_config.ir_op_priority.set_default()
        vllm.ir.set_default_torch_wrap(self._config.compilation_config.ir_enable_torch_wrap)
        with set_current_vllm_config(self._config), tempfile.TemporaryDirectory() as folder:
            # Nothing is sent in a group of one. NCCL's would start threads for which a process waits at its end.
            init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
            self._model: Any = get_model(vllm_config=self._config)
        self._decoder = MsgpackDecoder(t=MultiModalKwargsItem)
        switched_off = config.cudagraph_mm_encoder is False
        self._no_graphs = Reason.SWITCHED_OFF if switched_off else Reason.NOT_CAPTURED if on_gpu else Reason.NO_GPU
        self._graphs = self._capture_graphs() if on_gpu and not switched_off else None
        if config.cudagraph_mm_encoder is True and self._graphs is None:
            why = "vLLM's class has none, or no memory for them" if on_gpu else self._no_graphs.value
            raise ValueError(f"cudagraph_mm_encoder is true, and CUDA graphs are not available: {why}")

    @torch.inference_mode()
    def embed(self, items: Sequence[VllmInputs], *, eagerly: bool = False) -> Embedded:
        """Encodes items in order. vLLM stacks consecutive ones whose fields agree. `eagerly`: without a graph, which
        takes longer."""
        from vllm.multimodal.utils import group_and_batch_mm_kwargs

        pairs = [(item.header.modality, self._decoder.decode(item.inputs)) for item in items]
        on_gpu = self._device.type == "cuda"
        outputs: list[Tensor] = []
        reason: Reason | None = None
        budgets: tuple[int, ...] = ()
        for modality, count, batch in group_and_batch_mm_kwargs(pairs, device=self._device, pin_memory=on_gpu):
            rows = [item.header.num_embeds for item in items[len(outputs) : len(outputs) + count]]
            if self._graphs is None:
                found: Replay | Reason = self._no_graphs
            elif eagerly:
                found = Reason.CHEAPER
            else:
                found = self._graphs.replay(modality, batch, rows)
            if isinstance(found, Reason):
                reason = found
                outputs.extend(self._model.embed_multimodal(**batch))
            else:
                outputs.extend(found.outputs)
                budgets += found.budgets
                if not found.budgets:  # vLLM's own rule counts more tokens than the rows
                    reason = Reason.OVER_LARGEST
        return Embedded(outputs, reason, budgets)

    def mark(self) -> torch.cuda.Event | None:
        """Returns an event after all that was launched so far; None on the CPU."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(blocking=True)
        event.record()
        return event

    @property
    def graph_budgets(self) -> tuple[int, ...]:
        """Token budgets of the graphs, ascending; empty without graphs."""
        return () if self._graphs is None else self._graphs.budgets

    @property
    def max_graph_items(self) -> int:
        """Most items in a batch of one graph."""
        return 0 if self._graphs is None else self._graphs.max_items

    def measure_graphs(self, samples: Sequence[Sequence[VllmInputs]], max_items: int) -> CostTable | None:
        """Compares the graph of each budget with the eager forward and times both, on batches that fill it as far as
        `max_items` allow; eager times include EAGER_MARGIN. Takes seconds. `samples`: different images of one size, for
        each of several sizes. Budgets are left out that no batch of one size needs, or for which vLLM replays others.
        Returns None if no budget is left, or the graphs differ."""
        by_size = {images[0].num_tokens: images for images in samples}
        most = min(max_items, self.max_graph_items)
        replays: list[tuple[int, float]] = []
        eager: dict[int, float] = {}
        for before, budget in pairwise((0, *self.graph_budgets)):
            # Of equal fills that of the largest images, which attend most.
            size = max(by_size, key=lambda size: (min(budget // size, most) * size, size))
            tokens = min(budget // size, most) * size
            if tokens <= before:
                continue
            batch = list(islice(cycle(by_size[size]), tokens // size))
            embedded = self.embed(batch)
            if embedded.reason is Reason.REFUSED:
                return None
            if embedded.budgets == (budget,):
                replays.append((budget, self._time(batch, eagerly=False)))
                eager[tokens] = EAGER_MARGIN * self._time(batch, eagerly=True)
        return CostTable(tuple(replays), tuple(sorted(eager.items())), work_ms=0.0) if replays else None

    def _time(self, items: Sequence[VllmInputs], *, eagerly: bool) -> float:
        """Returns the shorter time of two runs in milliseconds, from host memory to embeddings on the device."""
        times = []
        for _ in range(2):
            began = time.perf_counter()
            self.embed(items, eagerly=eagerly)
            if (event := self.mark()) is not None:
                event.synchronize()
            times.append(time.perf_counter() - began)
        return 1000 * min(times)

    def encodes_alone(self, modality: str) -> bool:
        """Whether items of the modality must not share a batch."""
        if modality == "audio":
            return not SOUNDS_ALONE.isdisjoint(self._config.model_config.architectures)
        return modality == "video" and getattr(self._model, "requires_sequential_video_encoding", False)

    def _capture_graphs(self) -> CheckedGraphs | None:
        from vllm.distributed.parallel_state import graph_capture
        from vllm.model_executor.models.interfaces import supports_encoder_cudagraph
        from vllm.platforms import current_platform
        from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

        if not supports_encoder_cudagraph(self._model):
            return None
        manager = EncoderCudaGraphManager(self._config, self._device, self._config.model_config.dtype, self._model)
        # One frame per item. With vLLM's room for videos of hundreds of frames, each graph of GLM-4V computes 76,800
        # patches or more, also for one small image.
        manager.max_frames_per_batch = manager.max_batch_size
        try:
            # vLLM captures on a stream of its own; this context restores the thread's.
            with torch.inference_mode(), graph_capture(self._device):
                manager.capture(current_platform.graph_pool_handle())
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            logger.warning("no graphs of vLLM's encoder: %s", error)
            return None
        return CheckedGraphs(manager, self._model.embed_multimodal)


def _graph_settings(config: EncoderConfig) -> dict[str, Any]:
    """Returns vLLM's compilation settings of encoder graphs; it chooses budgets itself unless they are configured."""
    settings: dict[str, Any] = {"cudagraph_mm_encoder": config.cudagraph_mm_encoder is not False}
    if config.encoder_cudagraph_token_budgets != "auto":
        budgets = config.encoder_cudagraph_token_budgets
        settings["encoder_cudagraph_token_budgets"] = list(budgets)
        # vLLM refuses more items than the smallest budget has tokens.
        most_items = min(config.encoder_cudagraph_max_images_per_batch, budgets[0])
        settings["encoder_cudagraph_max_vision_items_per_batch"] = most_items
    return settings
