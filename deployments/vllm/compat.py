"""All imports from vLLM, 0.26 to 0.33, in the replica's process. Names that moved between versions are looked up here.

Items enter by reference: a connector registered with MEDIA_CONNECTOR_REGISTRY returns stand-ins, the renderer finds
their headers (`deployments/vllm/renderer.py`), and the engine loads their embeddings by
`deployments/vllm/connector/ec_connector.py`, which vLLM imports in its own processes. vLLM is imported only when a
function is called, so that the other deployments do not pay for it.
"""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import importlib
import importlib.util
import os
import secrets
import time
from argparse import Namespace
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol, cast

from pydantic import JsonValue

from configs.schema import unknown_key_message
from deployments.vllm import import_shim
from deployments.vllm.connector.link import ADDRESS_KEY, MIN_TOKENS_KEY
from deployments.vllm.references import DecodedImages, References
from deployments.vllm.stats import EngineStats
from deployments.vllm.stream_pacing import Pacer
from encoder.item_header import ItemHeader, PromptRun, PromptUpdate

CONNECTOR_NAME = "vitray"
V2_RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
V2_RUNNER_CONNECTOR = "vllm.v1.worker.gpu.ec_connector"
"""Module by which the newer model runner loads embeddings; vLLM 0.26 has the runner without it."""
PICKLED_FORMATS = ("auto", "hf", "pt", "npcache")
"""Load formats of vLLM that read pickled weights, or fall back to them."""

_SET_BY_VITRAY = {
    "model": "the checkpoint is `model` at the top of args",
    "enable_mm_embeds": "images come as embeddings",
    "mm_processor_cache_type": "the engine is sent every item with every request",
}
_SET_WITH_ENCODERS = {
    "mm_processor_cache_gb": "images come as embeddings, which encoders keep: encoder_replica.cache_bytes"
}

Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

# Modules that have contained each name, newest first.
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
    "UsageContext": ("vllm.usage.usage_lib",),
    "MEDIA_CONNECTOR_REGISTRY": ("vllm.multimodal.media",),
    "ECTransferConfig": ("vllm.config",),
    "Scheduler": ("vllm.v1.core.sched.scheduler",),
    "ECConnectorBase": ("vllm.distributed.ec_transfer.ec_connector.base",),
}


class Engine(Protocol):
    """The members of vLLM's AsyncLLM that are used."""

    model_config: Any
    vllm_config: Any
    renderer: Any

    @property
    def errored(self) -> bool: ...
    async def check_health(self) -> None: ...
    async def get_supported_tasks(self) -> tuple[str, ...]: ...
    def shutdown(self) -> None: ...


class VllmNotUsableError(RuntimeError):
    """vLLM is not installed, its version is not supported, or its model takes no images."""


def is_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def lookup(name: str) -> Any:  # noqa: ANN401 - vLLM's own classes and functions, whose types differ by version
    """Returns vLLM's object `name` from the newest module that has it. Raises VllmNotUsableError."""
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
    """Returns the module, or None if this version does not have it. Raises errors of imports inside the module."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            return None
        raise


def default_server_args() -> Namespace:
    """Returns the arguments of `vllm serve` without options, including engine arguments."""
    return cast(Namespace, lookup("make_arg_parser")(lookup("FlexibleArgumentParser")()).parse_args([]))


def _check_names(engine_args: Mapping[str, JsonValue], server_args: Mapping[str, JsonValue]) -> None:
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
                raise ValueError(f"llm.{kind}: {unknown_key_message(key, known)}")


def _source_has(engine_args: Mapping[str, JsonValue], server_args: Mapping[str, JsonValue]) -> bool:
    """Whether vLLM's source names all arguments. Reading it takes 30 ms, importing it 12 s of CPU."""
    engine_fields = source_fields("AsyncEngineArgs", "EngineArgs")
    server_fields = source_fields("make_arg_parser", "FrontendArgs") - engine_fields
    return engine_args.keys() <= engine_fields and server_args.keys() <= server_fields


def source_fields(name: str, suffix: str) -> set[str]:
    """Returns the fields of the classes whose names end with `suffix` in the modules that have contained `name`."""
    vllm = importlib.util.find_spec("vllm")
    folders = [] if vllm is None else vllm.submodule_search_locations or []
    files = [
        Path(folder, *module.split(".")[1:]).with_suffix(".py") for folder in folders for module in LOCATIONS[name]
    ]
    classes = (one for file in files if file.is_file() for one in ast.parse(file.read_text()).body)
    return {
        field.target.id
        for one in classes
        if isinstance(one, ast.ClassDef) and one.name.endswith(suffix)
        for field in one.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def check_args(
    engine_args: Mapping[str, JsonValue], server_args: Mapping[str, JsonValue], *, own_tower: bool = False
) -> None:
    """Refuses arguments that this vLLM does not have, that vitray sets, or that are unsafe. `own_tower`: the engine
    runs the tower, and not an encoder.

    Raises:
        ValueError: names the key, and the nearest known one or the section where it belongs.
    """
    if not _source_has(engine_args, server_args):
        _check_names(engine_args, server_args)
    set_by_vitray = _SET_BY_VITRAY if own_tower else _SET_BY_VITRAY | _SET_WITH_ENCODERS
    for key, why in set_by_vitray.items():
        if key in engine_args:
            raise ValueError(f"llm.engine_args: {key!r} is set by vitray ({why})")
    if (engines := engine_args.get("data_parallel_size", 1)) != 1:
        raise ValueError(
            f"llm.engine_args: 'data_parallel_size' is {engines!r}, the limit is 1: a replica has one engine; "
            "raise the number of LLM replicas"
        )
    if engine_args.get("trust_remote_code"):
        raise ValueError("llm.engine_args: 'trust_remote_code' would run whatever code a checkpoint brings")
    if (load_format := engine_args.get("load_format")) in PICKLED_FORMATS:
        raise ValueError(f"llm.engine_args: 'load_format' {load_format!r} may unpickle weights; use 'safetensors'")
    if "api_key" in server_args:  # the ingress does not pass credentials on: vLLM would answer 401
        raise ValueError("llm.server_args: 'api_key' would lock everybody out: authenticate before the ingress")


@dataclass
class FirstTokenClock:
    """Time of the first token of the request in whose context this was set, in `time.perf_counter()` seconds, and the
    request's name in the engine."""

    on_first_token: Callable[[], None] = lambda: None
    """Called at the first token."""
    first_token_at_s: float | None = None
    first_token_event: asyncio.Event = field(default_factory=asyncio.Event)
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    """Part of the engine's identifiers of the request. No part of them is the client's: its `X-Request-Id` may be that
    of other requests, and of any length."""
    num_prompts: int = 0
    """Prompts of the request that the engine was given."""

    def name_prompt(self) -> str:
        """Returns an identifier for the next prompt of the request."""
        self.num_prompts += 1
        return f"{self.token}-{self.num_prompts}"

    def tick(self) -> None:
        if self.first_token_at_s is None:
            self.first_token_at_s = time.perf_counter()
            self.first_token_event.set()
            self.on_first_token()


first_token_clock: ContextVar[FirstTokenClock | None] = ContextVar("first_token_clock", default=None)
cache_salt: ContextVar[str | None] = ContextVar("cache_salt", default=None)
"""Salt of the request in vLLM's prefix cache; some versions do not read it from the bodies of `/v1/messages`."""


def start_engine(
    model: str,
    engine_args: Mapping[str, JsonValue],
    server_args: Mapping[str, JsonValue],
    *,
    cpu_kv_cache_gib: int | None,
    stats: EngineStats,
    link: str | None,
    early_prefill_min_tokens: int | None = None,
) -> tuple[Engine, Namespace]:
    """Starts vLLM and loads the model, which takes from 30 s to minutes. Returns the AsyncLLM and the arguments of its
    application. Limits of batches that are not given are those of `vllm serve`.

    `cpu_kv_cache_gib`: size of the KV cache of vLLM's CPU backend, None on a GPU. `stats` receives the engine's load,
    whether or not vLLM logs it. `link`: address for the engine's connectors; None for an engine that runs its own tower
    and has none. `early_prefill_min_tokens`: minimum number of tokens for early prefill, None to disable it.
    """
    check_args(engine_args, server_args, own_tower=link is None)
    if cpu_kv_cache_gib is not None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(cpu_kv_cache_gib)  # vLLM has no other way to set it
    async_llm = lookup("AsyncLLM")
    # vLLM 0.26 loses text behind the end of the reasoning if several tokens come at once.
    pacer = Pacer(0.0 if "reasoning_parser" in {**engine_args, **server_args} else None)

    class ClockedLLM(async_llm):  # type: ignore[misc, valid-type]
        """Records the time of the first token, which vLLM's HTTP answers lack, sets identifier and salt, and paces the
        streams."""

        async def generate(
            self, prompt: object, sampling_params: object, request_id: str, **kwargs: object
        ) -> AsyncGenerator[object, None]:
            clock, salt = first_token_clock.get(), cache_salt.get()
            if salt is not None and isinstance(prompt, dict):
                prompt = {**prompt, "cache_salt": salt}
            if clock is not None:
                request_id = clock.name_prompt()
            outputs = super().generate(prompt, sampling_params, request_id, **kwargs)
            async with aclosing(pacer.pace(outputs)) as paced:
                async for output in paced:
                    if clock is not None:
                        clock.tick()
                    yield output

    arguments: dict[str, object] = {
        "load_format": "safetensors",
        **engine_args,
        "model": model,
    }
    if link is not None:
        arguments |= _without_tower(link, early_prefill_min_tokens)
    arguments.pop("media_io_kwargs", None)  # vLLM would hash them into the items' identifiers
    if early_prefill_min_tokens is not None:
        arguments["scheduler_cls"] = "deployments.vllm.connector.partial_prefill_scheduler.make_scheduler"
    parsed_engine_args = lookup("AsyncEngineArgs")(**arguments)
    # With enforce_eager, vLLM still compiles part of its sampler, and fails without a C++ compiler.
    is_eager = cpu_kv_cache_gib is not None and engine_args.get("enforce_eager")
    if compiles_nothing := is_eager and "TORCHDYNAMO_DISABLE" not in os.environ:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        # An engine's default number of tokens a step depends on it: on an H100 8,192 with this one, 2,048 with none.
        server = lookup("UsageContext").OPENAI_API_SERVER
        engine = ClockedLLM.from_engine_args(parsed_engine_args, usage_context=server, stat_loggers=[stats.logger])
    finally:
        if compiles_nothing:
            del os.environ["TORCHDYNAMO_DISABLE"]
    namespace = default_server_args()
    for source in (arguments, server_args):
        for key, value in source.items():
            setattr(namespace, key, value)
    # /v1/models returns it as the model's root, which must not be a path of this machine.
    names = arguments.get("served_model_name")
    namespace.model = names[0] if isinstance(names, list) and names else names or Path(model).name
    return engine, namespace


def _without_tower(link: str, early_prefill_min_tokens: int | None) -> dict[str, object]:
    """Returns arguments of an engine that loads embeddings, as `start_engine`."""
    return {
        # Profiling would run the tower, which has no weights.
        "skip_mm_profiling": True,
        # Headers are short: without a cache in the engine, they always travel with the request.
        "mm_processor_cache_gb": 0,
        "ec_transfer_config": lookup("ECTransferConfig")(
            ec_connector="SharedMemoryConnector",
            ec_connector_module_path="deployments.vllm.connector.ec_connector",
            ec_role="ec_consumer",
            ec_connector_extra_config={ADDRESS_KEY: link, MIN_TOKENS_KEY: early_prefill_min_tokens},
        ),
    }


def engine_load_unsupported_reason(engine_args: Mapping[str, JsonValue]) -> str | None:
    """Returns why an engine with these arguments cannot load embeddings; None if it can."""
    for key in ("ec_transfer_config", "kv_transfer_config"):
        if engine_args.get(key) is not None:
            return f"llm.engine_args sets {key!r}"
    if engine_args.get("pipeline_parallel_size", 1) != 1:
        return "only the first stage of a pipeline loads embeddings"
    for key in ("mm_processor_kwargs", "enable_tower_connector_lora", "video_pruning_rate"):
        if engine_args.get(key) not in (None, False):
            return f"llm.engine_args sets {key!r}, but encoders process the images"
    if engine_args.get("tokenizer_mode") == "mistral":
        return "with llm.engine_args.tokenizer_mode 'mistral' the tokenizer opens images itself; set 'hf'"
    # By default this vLLM then uses its older runner; its engine would not start with the newer one.
    if importlib.util.find_spec(V2_RUNNER_CONNECTOR) is None and os.environ.get(V2_RUNNER_VARIABLE, "0") != "0":
        return f"{V2_RUNNER_VARIABLE} is set, and the V2 model runner of this vLLM cannot load embeddings"
    return None


def early_prefill_unsupported_reason(engine_args: Mapping[str, JsonValue]) -> str | None:
    """Returns why an engine with these arguments cannot do early prefill; None if it can."""
    for key in ("scheduler_cls", "speculative_config"):
        if engine_args.get(key) is not None:
            return f"llm.engine_args sets {key!r}"
    if engine_args.get("enable_chunked_prefill") is False:
        return "llm.engine_args sets 'enable_chunked_prefill' to false"
    return None


def has_prefix_cache(engine: Engine) -> bool:
    """Whether the engine has a prefix cache."""
    return bool(engine.vllm_config.cache_config.enable_prefix_caching)


def early_prefill_refused_by_model(engine: Engine) -> str | None:
    """Returns why the engine's model cannot do early prefill; None if it can."""
    if engine.model_config.is_hybrid:  # as Qwen3.5
        return "some layers keep a recurrent state, and prefill chunks must end where its blocks do"
    return None


async def build_application(engine: Engine, args: Namespace, items: References | DecodedImages) -> AsgiApp:
    """Returns vLLM's OpenAI application on `engine`, which takes `items` by reference and fetches no media."""
    from deployments.vllm.renderer import install_references, make_connector

    lookup("MEDIA_CONNECTOR_REGISTRY").register(CONNECTOR_NAME)(make_connector(items))
    os.environ["VLLM_MEDIA_CONNECTOR"] = CONNECTOR_NAME  # vLLM has no other way to choose it
    tasks = await engine.get_supported_tasks()
    app = lookup("build_app")(args, tasks, engine.model_config)
    await lookup("init_app_state")(engine, app.state, args, tasks)
    install_references(engine.renderer, items)  # after vLLM's warm-up, which processes an image
    # vLLM's error handler stops its HTTP server when the engine is dead; here Serve's health check does that.
    app.state.server = SimpleNamespace(should_exit=False)
    return cast(AsgiApp, app)


def embedding_width(engine: Engine) -> int:
    """Returns the columns of the embeddings that the model takes: hidden size times (1 + deepstack levels).

    Raises VllmNotUsableError if the model takes no images.
    """
    config = engine.model_config.hf_config
    if not engine.model_config.is_multimodal_model:
        raise VllmNotUsableError(f"vLLM runs model type {config.model_type!r} as a text model: it takes no images")
    vision = getattr(getattr(config, "thinker_config", config), "vision_config", None)
    levels = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    return audio_width(engine) * (1 + levels)


def audio_width(engine: Engine) -> int:
    """Returns the columns of the embeddings of sounds, which have no deepstack levels."""
    return int(engine.model_config.get_inputs_embeds_size())


def one_token_header(engine: Engine, digest: str) -> ItemHeader:
    """Returns the header of an image of one token for one of vitray's own towers."""
    config = engine.model_config.hf_config
    token, merge_size = int(config.image_token_id), int(config.vision_config.spatial_merge_size)
    update = PromptUpdate("replace", (token,), (PromptRun(token, 1, True),))
    return ItemHeader(digest, "image", 1, (update,), (1, merge_size, merge_size))
