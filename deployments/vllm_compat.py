"""Every import from vLLM, 0.26 to 0.33: what moved between those versions is looked up here and nowhere else.

Embeddings enter through vLLM's public extension points: `enable_mm_embeds`, a connector registered with
MEDIA_CONNECTOR_REGISTRY and, where the engine loads them by itself, `deployments/ec_connector.py`, which vLLM imports
in its own processes. This module must not know of Ray or of the ingress. Nothing of vLLM is imported until a
function is called, so that the other deployments do not pay for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import importlib.util
import os
import time
from argparse import Namespace
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol, cast

from pydantic import JsonValue

from configs.schema import unknown_key
from deployments import import_shim
from deployments.engine_link import ADDRESS_KEY, LEAST_TOKENS_KEY
from deployments.engine_stats import EngineStats
from deployments.media_keys import KeyStore, connector_class

TESTED_VERSIONS = ("0.26.0", "0.32.0")
CONNECTOR_NAME = "vitray"
NEWER_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
NEWER_RUNNERS_CONNECTOR = "vllm.v1.worker.gpu.ec_connector"
"""By which the newer model runner loads embeddings; 0.26 has the runner without it."""
PICKLED_FORMATS = ("auto", "hf", "pt", "npcache")
"""vLLM's ways of loading weights that take files of pickles, or fall back to them."""

SCHEDULER_METHOD = "_try_schedule_encoder_inputs"
"""Of vLLM's schedulers (0.26 to 0.33), which `deployments/ec_scheduler.py` goes before."""

_OURS = {
    "model": "the checkpoint is `model` at the top of args",
    "enable_mm_embeds": "images come as embeddings",
    "mm_processor_cache_gb": "images come as embeddings, which encoders keep: encoder_replica.cache_bytes",
}
KEEPS_NAMES = (0, 32)
"""The version of vLLM from which images keep the names that requests give them where nothing is cached."""

Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

# Newest first. Each row: what is needed, and the modules that have held it.
LOCATIONS: dict[str, tuple[str, ...]] = {
    "build_app": ("vllm.entrypoints.launchers.app", "vllm.entrypoints.openai.api_server"),
    "init_app_state": ("vllm.entrypoints.launchers.api_server.app_state", "vllm.entrypoints.openai.api_server"),
    "make_arg_parser": (
        "vllm.entrypoints.common.cli_args",
        "vllm.entrypoints.launchers.cli_args",
        "vllm.entrypoints.openai.cli_args",
    ),
    "FlexibleArgumentParser": ("vllm.utils.argparse_utils",),
    "AsyncEngineArgs": ("vllm.engine.arg_utils",),
    "AsyncLLM": ("vllm.v1.engine.async_llm",),
    "MEDIA_CONNECTOR_REGISTRY": ("vllm.multimodal.media",),
    "ECTransferConfig": ("vllm.config",),
    "Scheduler": ("vllm.v1.core.sched.scheduler",),
    "ECConnectorBase": ("vllm.distributed.ec_transfer.ec_connector.base",),
}


class Engine(Protocol):
    """What is used of vLLM's AsyncLLM."""

    model_config: Any
    vllm_config: Any

    async def check_health(self) -> None: ...
    async def get_supported_tasks(self) -> tuple[str, ...]: ...
    def shutdown(self) -> None: ...


class VllmNotUsableError(RuntimeError):
    """vLLM is missing, or a version whose modules are not known here."""


def is_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def lookup(name: str) -> Any:  # noqa: ANN401 - vLLM's own classes and functions, whose types differ by version
    """The vLLM object called `name`, from the newest module that has it."""
    import_shim.activate()
    for module_name in LOCATIONS[name]:
        module = _import_if_present(module_name)
        if module is not None and hasattr(module, name):
            return getattr(module, name)
    if not is_installed():
        raise VllmNotUsableError("vLLM is not installed: pip install 'vitray[gpu]', or 'vitray[cpu]' without a GPU")
    import vllm

    tried = ", ".join(LOCATIONS[name])
    raise VllmNotUsableError(f"vLLM {vllm.__version__} has no {name} (looked in {tried}); supported: 0.26 to 0.33")


def _import_if_present(name: str) -> ModuleType | None:
    """The module, or None where this version does not have it. An import that fails inside it is an error."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            return None
        raise


def default_server_args() -> Namespace:
    """What `vllm serve` without options has, engine fields included."""
    return cast(Namespace, lookup("make_arg_parser")(lookup("FlexibleArgumentParser")()).parse_args([]))


def check_args(engine_args: Mapping[str, JsonValue], server_args: Mapping[str, JsonValue]) -> None:
    """Refuses names that this vLLM does not have.

    Raises:
        ValueError: names the key, the nearest known one, and where a key of the other kind belongs.
    """
    engine_fields = [field.name for field in dataclasses.fields(lookup("AsyncEngineArgs"))]
    server_fields = [name for name in vars(default_server_args()) if name not in engine_fields]
    for kind, given, known, other in (
        ("engine_args", engine_args, engine_fields, server_fields),
        ("server_args", server_args, server_fields, engine_fields),
    ):
        for key in given:
            if key in other:
                elsewhere = "server_args" if kind == "engine_args" else "engine_args"
                raise ValueError(f"llm.{kind}: {key!r} belongs under llm.{elsewhere}")
            if key not in known:
                raise ValueError(f"llm.{kind}: {unknown_key(key, known)}")
    for key, why in _OURS.items():
        if key in engine_args:
            raise ValueError(f"llm.engine_args: {key!r} is set by vitray ({why})")
    if engine_args.get("trust_remote_code"):
        raise ValueError("llm.engine_args: 'trust_remote_code' would run whatever code a checkpoint brings")
    if (load_format := engine_args.get("load_format")) in PICKLED_FORMATS:
        raise ValueError(f"llm.engine_args: 'load_format' {load_format!r} may unpickle weights; use 'safetensors'")
    if "api_key" in server_args:  # credentials stop at the ingress, so vLLM would answer 401 to everybody
        raise ValueError("llm.server_args: 'api_key' would lock everybody out: authenticate before the ingress")


@dataclass
class FirstTokenClock:
    """When vLLM gave the first token of the request in whose context this was set; `time.perf_counter()` seconds."""

    first_token_at_s: float | None = None
    ticked: asyncio.Event = field(default_factory=asyncio.Event)

    def tick(self) -> None:
        if self.first_token_at_s is None:
            self.first_token_at_s = time.perf_counter()
            self.ticked.set()


first_token_clock: ContextVar[FirstTokenClock | None] = ContextVar("first_token_clock", default=None)


def start_engine(
    model: str,
    engine_args: Mapping[str, JsonValue],
    server_args: Mapping[str, JsonValue],
    *,
    cpu_kv_cache_gib: int | None,
    stats: EngineStats,
    link: str | None = None,
    begin_from_tokens: int | None = None,
) -> tuple[Engine, Namespace]:
    """Loads the model, which takes from 30 s to minutes.

    `cpu_kv_cache_gib` is the KV cache of vLLM's CPU backend, None on a GPU. `stats` is told what the engine has to do,
    whether or not vLLM is to log it. `link`: where the engine's connectors call, if the engine is to load embeddings by
    itself; `begin_from_tokens`: from how many tokens on it reads a prompt before all of its embeddings are there, None
    for not at all. Returns vLLM's AsyncLLM and the arguments that its application wants.
    """
    check_args(engine_args, server_args)
    if cpu_kv_cache_gib is not None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(cpu_kv_cache_gib)  # vLLM has no other way to set it
    async_llm = lookup("AsyncLLM")

    class ClockedLLM(async_llm):  # type: ignore[misc, valid-type]
        """Notes the time of the first token, which vLLM's HTTP answers do not tell."""

        async def generate(self, *args: object, **kwargs: object) -> AsyncGenerator[object, None]:
            clock = first_token_clock.get()
            async for output in super().generate(*args, **kwargs):
                if clock is not None:
                    clock.tick()
                yield output

    arguments: dict[str, object] = {
        # The tower of Qwen3-VL must stay loaded, or vLLM switches deepstack off; profiling it reserves memory in vain.
        "skip_mm_profiling": True,
        "load_format": "safetensors",
        **engine_args,
        "model": model,
        "enable_mm_embeds": True,
        # What vLLM keeps of an image by its name may be the stand-in for an embedding that its engine loaded. Before
        # 0.32 a later request that brings the embedding gets that in its place, and waits for ever.
        "mm_processor_cache_gb": 0,
    }
    if link is not None:
        arguments["ec_transfer_config"] = lookup("ECTransferConfig")(
            ec_connector="SharedMemoryConnector",
            ec_connector_module_path="deployments.ec_connector",
            ec_role="ec_consumer",
            ec_connector_extra_config={ADDRESS_KEY: link, LEAST_TOKENS_KEY: begin_from_tokens},
        )
        if begin_from_tokens is not None:
            arguments["scheduler_cls"] = "deployments.ec_scheduler.arriving_scheduler"
    parsed_engine_args = lookup("AsyncEngineArgs")(**arguments)
    engine = ClockedLLM.from_engine_args(parsed_engine_args, stat_loggers=[stats.logger])
    namespace = default_server_args()
    for source in (arguments, server_args):
        for key, value in source.items():
            setattr(namespace, key, value)
    # What /v1/models tells as the model's root: a path of this machine is nobody's business.
    names = arguments.get("served_model_name")
    namespace.model = names[0] if isinstance(names, list) and names else names or Path(model).name
    return engine, namespace


def why_not_loading(engine_args: Mapping[str, JsonValue]) -> str | None:
    """Why an engine with these arguments cannot load embeddings by itself; None where it can."""
    for taken in ("ec_transfer_config", "kv_transfer_config"):
        if engine_args.get(taken) is not None:
            return f"llm.engine_args sets {taken!r}"
    if engine_args.get("pipeline_parallel_size", 1) != 1:
        return "of a pipeline only the first stage loads embeddings"
    if engine_args.get("mm_processor_kwargs") is not None:
        return "llm.engine_args sets 'mm_processor_kwargs', with which vLLM gives images other names"
    if engine_args.get("enable_prefix_caching") is False and _version() < KEEPS_NAMES:
        return "without prefix caching this vLLM gives images names of its own"
    if not hasattr(lookup("ECConnectorBase"), "ensure_cache_available"):
        return "this vLLM has no connectors that wait for embeddings"
    # Left to itself, vLLM takes its older runner then; told to take the newer one, its engine would not start.
    if importlib.util.find_spec(NEWER_RUNNERS_CONNECTOR) is None and os.environ.get(NEWER_RUNNER, "0") != "0":
        return f"{NEWER_RUNNER} is set, and this vLLM's newer model runner cannot"
    return None


def why_not_beginning(engine_args: Mapping[str, JsonValue]) -> str | None:
    """Why an engine that loads embeddings by itself cannot read a prompt before all are there; None where it can."""
    for taken in ("scheduler_cls", "speculative_config"):
        if engine_args.get(taken) is not None:
            return f"llm.engine_args sets {taken!r}"
    if engine_args.get("enable_chunked_prefill") is False:
        return "llm.engine_args sets 'enable_chunked_prefill' to false"
    if not hasattr(lookup("Scheduler"), SCHEDULER_METHOD):
        return f"this vLLM's scheduler has no {SCHEDULER_METHOD}"
    return None


def _version() -> tuple[int, int]:
    import vllm

    major, minor = vllm.__version__.split(".")[:2]
    return int(major), int(minor)


def caches_prefixes(engine: Engine) -> bool:
    """Whether the KV cache of an earlier prompt serves one that begins alike."""
    return bool(engine.vllm_config.cache_config.enable_prefix_caching)


def memory_share_left(engine_args: Mapping[str, JsonValue]) -> float:
    """The share of a GPU's memory that an engine with these arguments leaves to others."""
    used = engine_args.get("gpu_memory_utilization", lookup("AsyncEngineArgs").gpu_memory_utilization)
    return max(0.0, 1.0 - float(used))


async def build_application(engine: Engine, args: Namespace, store: KeyStore) -> AsgiApp:
    """vLLM's own OpenAI application around `engine`. It takes embeddings from `store` and fetches nothing by itself."""
    lookup("MEDIA_CONNECTOR_REGISTRY").register(CONNECTOR_NAME)(connector_class(store))
    os.environ["VLLM_MEDIA_CONNECTOR"] = CONNECTOR_NAME  # vLLM has no other way to choose it
    tasks = await engine.get_supported_tasks()
    app = lookup("build_app")(args, tasks, engine.model_config)
    await lookup("init_app_state")(engine, app.state, args, tasks)
    # vLLM's error handler tells its HTTP server to stop when the engine is dead; here Serve's health check does that.
    app.state.server = SimpleNamespace(should_exit=False)
    return cast(AsgiApp, app)


@dataclass(frozen=True)
class EmbeddingShape:
    """What the language model takes for an image."""

    width: int
    """Columns of an embedding: hidden size times (1 + deepstack levels)."""
    merge_size: int


def embedding_shape(engine: Engine) -> EmbeddingShape:
    """Read from the config that vLLM loaded."""
    config = engine.model_config.hf_config
    vision = getattr(config, "vision_config", None)
    if vision is None:
        raise VllmNotUsableError(f"model type {config.model_type!r} has no vision_config: it takes no images")
    levels = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    return EmbeddingShape(int(vision.out_hidden_size) * (1 + levels), int(vision.spatial_merge_size))
