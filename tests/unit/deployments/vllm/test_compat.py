"""The one door to vLLM: every name found in the installed version, and arguments refused before an engine starts."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import importlib.util
import inspect
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import JsonValue

from configs.resolve import PROJECT_ROOT
from deployments.scaling.llm_scaler import EngineLoad
from deployments.vllm import compat
from deployments.vllm.stats import EngineStats
from scripts import check_vllm_imports
from tests.unit.deployments.vllm.fake_llm import start_fake_engine

vllm_spec = importlib.util.find_spec("vllm")
INSTALLED = Path(vllm_spec.origin).parent.parent if vllm_spec and vllm_spec.origin else None


@pytest.mark.parametrize("name", list(compat.LOCATIONS))
def test_lookup_finds_every_name_in_the_installed_version(name: str) -> None:
    found = compat.lookup(name)
    assert getattr(found, "__name__", name) == name


def test_lookup_takes_the_newest_module_that_has_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that exists without the name is passed over, and so is one whose package does not exist."""
    places = ("no_such_package.module", "json.no_such_module", "json.decoder", "json")
    monkeypatch.setitem(compat.LOCATIONS, "loads", places)
    import json

    assert compat.lookup("loads") is json.loads


def test_a_name_that_no_module_has_is_an_error_that_tells_where_it_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.LOCATIONS, "build_app", ("vllm.no_such_module", "vllm.version"))
    with pytest.raises(compat.VllmNotUsableError, match=r"has no build_app .*vllm\.no_such_module, vllm\.version"):
        compat.lookup("build_app")


def test_a_missing_vllm_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.LOCATIONS, "build_app", ("no_such_package.app",))
    monkeypatch.setattr(compat, "is_installed", lambda: False)
    with pytest.raises(compat.VllmNotUsableError, match=r"not installed: pip install 'vitray\[gpu\]'"):
        compat.lookup("build_app")


def test_an_import_that_fails_inside_a_module_is_not_taken_for_a_missing_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a missing dependency of vLLM would read as an unsupported version."""
    (tmp_path / "half_installed.py").write_text("import a_dependency_that_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(compat.LOCATIONS, "build_app", ("half_installed",))
    with pytest.raises(ModuleNotFoundError, match="a_dependency_that_is_missing"):
        compat.lookup("build_app")


def test_arguments_of_both_kinds_are_accepted_where_they_belong() -> None:
    compat.check_args(
        {"max_model_len": 1024, "tensor_parallel_size": 2, "trust_remote_code": False, "load_format": "bitsandbytes"},
        {"tool_call_parser": "hermes", "enable_auto_tool_choice": True, "chat_template": None},
    )


def test_the_source_names_the_arguments_that_vllm_has() -> None:
    """Read in place of an import, so that the application is built without vLLM's 12 s."""
    engine = {field.name for field in dataclasses.fields(compat.lookup("AsyncEngineArgs"))}
    server = {*vars(compat.default_server_args())} - engine
    assert compat.source_fields("AsyncEngineArgs", "EngineArgs") == engine
    found = compat.source_fields("make_arg_parser", "FrontendArgs") - engine
    assert found <= server
    assert len(server - found) < 10, "options of `vllm serve` itself, which are looked up in vLLM"


def test_an_application_is_built_without_importing_vllm() -> None:
    program = "\n".join(
        [
            "import sys",
            "from configs.resolve import ClusterFacts",
            "from deployments import app",
            "app.cluster_facts = lambda: ClusterFacts(has_gpu=False)",
            "llm = {'engine_args': {'max_model_len': 1024}, 'server_args': {'tool_call_parser': 'hermes'}}",
            "app.build_app({'model': 'models/scenes-8m', 'llm': llm})",
            "assert 'vllm' not in sys.modules",
        ]
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=PROJECT_ROOT)


def test_an_engine_with_its_own_tower_may_have_a_processor_cache_and_gets_no_connector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, JsonValue] = {"mm_processor_cache_gb": 1}
    compat.check_args(given, {}, own_tower=True)
    started, disabled = [], []

    def start(arguments: object, *, usage_context: str, **_: object) -> None:
        assert usage_context == "server"
        started.append(arguments)
        disabled.append(os.environ.get("TORCHDYNAMO_DISABLE"))

    fakes = {
        "AsyncEngineArgs": lambda **arguments: arguments,
        "AsyncLLM": type("FakeLLM", (), {"from_engine_args": start}),
        "UsageContext": SimpleNamespace(OPENAI_API_SERVER="server"),
    }
    monkeypatch.setattr(compat, "lookup", fakes.__getitem__)
    monkeypatch.setattr(compat, "check_args", lambda *_, own_tower: None)
    monkeypatch.setattr(compat, "default_server_args", Namespace)
    compat.start_engine("m", given, {}, cpu_kv_cache_gib=None, stats=EngineStats(), link=None)
    assert started == [{"load_format": "safetensors", "model": "m", "mm_processor_cache_gb": 1}]
    for name in ("VLLM_CPU_KVCACHE_SPACE", "TORCHDYNAMO_DISABLE"):
        monkeypatch.setenv(name, "")  # restored at the end
        monkeypatch.delenv(name)
    for eager in (False, True):
        given = {"enforce_eager": eager}
        compat.start_engine("m", given, {}, cpu_kv_cache_gib=3, stats=EngineStats(), link=None)
        assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "3"
        assert disabled[-1] == ("1" if eager else None)
        assert "TORCHDYNAMO_DISABLE" not in os.environ, "only for the engine's processes"


@pytest.mark.parametrize(
    ("engine_args", "server_args", "told"),
    [
        ({"max_modle_len": 1}, {}, r"llm\.engine_args: unknown key 'max_modle_len': did you mean 'max_model_len'"),
        ({}, {"tool_parser": 1}, r"llm\.server_args: unknown key 'tool_parser': did you mean 'tool_call_parser'"),
        ({"tool_call_parser": "hermes"}, {}, r"llm\.engine_args: 'tool_call_parser' belongs under llm\.server_args"),
        ({}, {"max_model_len": 1}, r"llm\.server_args: 'max_model_len' belongs under llm\.engine_args"),
        ({"model": "x"}, {}, r"llm\.engine_args: 'model' is set by vitray"),
        ({"enable_mm_embeds": False}, {}, r"llm\.engine_args: 'enable_mm_embeds' is set by vitray"),
        ({"mm_processor_cache_type": "shm"}, {}, r"llm\.engine_args: 'mm_processor_cache_type' is set by vitray"),
        ({"mm_processor_cache_gb": 4}, {}, r"'mm_processor_cache_gb' is set by vitray .*encoder_replica\.cache_bytes"),
        (
            {"data_parallel_size": 2},
            {},
            r"llm\.engine_args: 'data_parallel_size' is 2, the limit is 1",
        ),
        ({"trust_remote_code": True}, {}, r"llm\.engine_args: 'trust_remote_code' would run whatever code"),
        ({"load_format": "pt"}, {}, r"llm\.engine_args: 'load_format' 'pt' may unpickle weights"),
        ({"load_format": "auto"}, {}, r"use 'safetensors'"),
        ({}, {"api_key": ["secret"]}, r"llm\.server_args: 'api_key' would lock everybody out"),
        ({}, {"model": "x"}, r"llm\.server_args: 'model' belongs under"),
        ({"max-model-len": 1}, {}, r"llm\.engine_args: unknown key 'max-model-len': did you mean 'max_model_len'"),
    ],
)
def test_arguments_are_refused(engine_args: dict[str, Any], server_args: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        compat.check_args(engine_args, server_args)


def test_the_installed_vllm_tells_what_its_engine_has_to_do() -> None:
    """Through vLLM's own adapter and with its own numbers; the keyword is what `start_engine` passes."""
    assert {"stat_loggers", "usage_context"} <= inspect.signature(
        compat.lookup("AsyncLLM").from_engine_args
    ).parameters.keys()
    loggers = importlib.import_module("vllm.v1.metrics.loggers")
    scheduler = importlib.import_module("vllm.v1.metrics.stats").SchedulerStats
    stats = EngineStats()
    assert stats.load() == EngineLoad()
    adapter = loggers.PerEngineStatLoggerAdapter(None, [0], stats.logger)
    adapter.log_engine_initialized()
    told = scheduler(num_running_reqs=5, num_waiting_reqs=2, num_skipped_waiting_reqs=1, kv_cache_usage=0.5)
    adapter.record(told, None, None, 0)
    adapter.record(None, None, engine_idx=0)
    adapter.record_sleep_state(0, 0)
    adapter.log()
    assert stats.load() == EngineLoad(5, 3, 0.5)
    assert stats.load(num_excluded=2) == EngineLoad(5, 1, 0.5)
    assert stats.load(num_excluded=4) == EngineLoad(4, 0, 0.5), "one of them is being read"
    assert stats.load(num_excluded=9) == EngineLoad(0, 0, 0.5)


def test_the_installed_vllm_has_defaults_of_its_server_for_what_start_engine_passes() -> None:
    """On an H100 8,192 tokens a step and 1,024 sequences; an engine of no server gets 2,048 and 128."""
    contexts = compat.lookup("UsageContext")
    for defaults in compat.lookup("AsyncEngineArgs").get_batch_defaults(1):
        assert contexts.OPENAI_API_SERVER in defaults
        assert contexts.ENGINE_CONTEXT not in defaults


def test_the_installed_source_tree_passes_the_static_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_vllm_imports.main([str(INSTALLED)]) == 0
    assert f"all {len(compat.LOCATIONS)} names" in capsys.readouterr().out


def test_the_static_check_reads_the_table_that_lookup_uses() -> None:
    assert check_vllm_imports.locations() == compat.LOCATIONS


SOURCES = {
    "vllm/__init__.py": "",
    "vllm/envs.py": (
        "variables = {'VLLM_MEDIA_CONNECTOR': 1, 'VLLM_CPU_KVCACHE_SPACE': 2, 'VLLM_USE_V2_MODEL_RUNNER': 3}"
    ),
    "vllm/entrypoints/openai/api_server.py": (
        "def build_app(args, tasks=None, model_config=None): ...\n"
        "async def init_app_state(engine, state, args, tasks=None): ...\n"
    ),
    "vllm/entrypoints/openai/cli_args.py": "if True:\n    def make_arg_parser(parser): ...\n",
    "vllm/utils/argparse_utils.py": "class FlexibleArgumentParser: ...\n",
    "vllm/engine/arg_utils.py": (
        "class EngineArgs:\n    model: str\n    enable_mm_embeds: bool = False\n    skip_mm_profiling: bool = False\n"
        "    mm_processor_cache_gb: float = 4\n    load_format: str = ''\n    ec_transfer_config: object = None\n"
        "    served_model_name: str = ''\n    scheduler_cls: object = None\n"
        "class AsyncEngineArgs(EngineArgs): ...\n"
    ),
    "vllm/v1/engine/async_llm.py": (
        "from ..base import Base\n"
        "class AsyncLLM(Base):\n    def from_engine_args(cls): ...\n    async def generate(self): ...\n"
        "    def __init__(self): self.renderer = None\n"
        "    async def get_supported_tasks(self): ...\n    def check_health(self): ...\n"
    ),
    "vllm/config/__init__.py": "from vllm.config.ec_transfer import ECTransferConfig\n",
    "vllm/config/ec_transfer.py": (
        "class ECTransferConfig:\n    ec_connector: str\n    ec_role: str\n    ec_connector_module_path: str\n"
        "    ec_connector_extra_config: dict\n    def get_from_extra_config(self, key, default): ...\n"
    ),
    "vllm/distributed/ec_transfer/ec_connector/base.py": (
        "class ECConnectorMetadata: ...\nclass ECConnectorRole: ...\nclass ECConnectorBase:\n"
        "    def ensure_cache_available(self, request, computed): ...\n    def has_cache_item(self, identifier): ...\n"
        "    def update_state_after_alloc(self, request, index): ...\n    def build_connector_meta(self, output): ...\n"
        "    def request_finished(self, request): ...\n    def start_load_caches(self, cache, **kwargs): ...\n"
        "    def save_caches(self, cache, mm_hash): ...\n    def shutdown(self): ...\n"
    ),
    "vllm/v1/core/sched/scheduler.py": "class Scheduler:\n    def _try_schedule_encoder_inputs(self): ...\n",
    "vllm/usage/usage_lib.py": "class UsageContext:\n    OPENAI_API_SERVER = 'OPENAI_API_SERVER'\n",
    "vllm/v1/base.py": "class Base:\n    def shutdown(self): ...\n",
    "vllm/multimodal/media/__init__.py": "from .connector import MEDIA_CONNECTOR_REGISTRY\n",
    "vllm/multimodal/media/connector.py": "MEDIA_CONNECTOR_REGISTRY = object()\n",
}


def write_tree(folder: Path, changes: dict[str, tuple[str, str]]) -> Path:
    """A stand-in for vLLM's sources, with one text replaced in each file that `changes` names."""
    for path, source in SOURCES.items():
        old, new = changes.get(path, ("", ""))
        assert old in source
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(source.replace(old, new) if old else source)
    return folder


def test_the_static_check_passes_a_tree_that_has_everything(tmp_path: Path) -> None:
    assert check_vllm_imports.problems(write_tree(tmp_path, {})) == []


@pytest.mark.parametrize(
    ("path", "old", "new", "told"),
    [
        ("vllm/entrypoints/openai/api_server.py", "build_app", "make_app", "build_app is in none of"),
        ("vllm/entrypoints/openai/cli_args.py", "if True:", "def f():",
         "make_arg_parser is in none of"),
        ("vllm/entrypoints/openai/api_server.py", "tasks=None, model_config=None", "tasks",
         "build_app does not take 3 positional arguments"),
        ("vllm/entrypoints/openai/api_server.py", "state, args, tasks=None", "state, args, tasks, more",
         "init_app_state does not take 4 positional arguments"),
        ("vllm/entrypoints/openai/api_server.py", "tasks=None, model_config=None", "tasks=None, m=None, *, more",
         "build_app does not take 3 positional arguments"),
        ("vllm/entrypoints/openai/api_server.py", "def build_app(args, tasks=None, model_config=None): ...",
         "build_app = None", "build_app does not take 3 positional arguments"),
        ("vllm/engine/arg_utils.py", "skip_mm_profiling", "renamed", "AsyncEngineArgs has no skip_mm_profiling"),
        ("vllm/v1/base.py", "shutdown", "stop", "AsyncLLM has no shutdown"),
        ("vllm/v1/engine/async_llm.py", "generate", "produce", "AsyncLLM has no generate"),
        ("vllm/multimodal/media/connector.py", "MEDIA_CONNECTOR_REGISTRY", "X", "MEDIA_CONNECTOR_REGISTRY is in none"),
        ("vllm/distributed/ec_transfer/ec_connector/base.py", "ensure_cache_available", "wait",
         "ECConnectorBase has no ensure_cache_available"),
        ("vllm/v1/core/sched/scheduler.py", "_try_schedule", "_schedule",
         "Scheduler has no _try_schedule_encoder_inputs"),
        ("vllm/envs.py", "VLLM_MEDIA_CONNECTOR", "X", "vllm.envs does not know VLLM_MEDIA_CONNECTOR"),
    ],
)  # fmt: skip
def test_the_static_check_tells_what_is_missing(tmp_path: Path, path: str, old: str, new: str, told: str) -> None:
    missing = check_vllm_imports.problems(write_tree(tmp_path, {path: (old, new)}))
    assert len(missing) == 1
    assert told in missing[0]


def test_the_static_checks_status_tells_missing_names_from_a_missing_tree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        check_vllm_imports.main([str(tmp_path)])
    assert ended.value.code == 2
    assert "has no folder vllm" in capsys.readouterr().err
    assert check_vllm_imports.main([str(write_tree(tmp_path, {"vllm/v1/base.py": ("shutdown", "stop")}))]) == 1


@pytest.mark.parametrize(
    ("engine_args", "told"),
    [
        ({"ec_transfer_config": {"ec_connector": "Other"}}, "ec_transfer_config"),
        ({"kv_transfer_config": {"kv_connector": "Other"}}, "kv_transfer_config"),
        ({"pipeline_parallel_size": 2}, "first stage"),
        ({"mm_processor_kwargs": {"max_pixels": 1}}, "mm_processor_kwargs"),
        ({"enable_lora": True, "enable_tower_connector_lora": True}, "enable_tower_connector_lora"),
        ({"video_pruning_rate": 0.5}, "video_pruning_rate"),
        ({"tokenizer_mode": "mistral"}, "opens images itself"),
    ],
)
def test_an_engine_that_cannot_load_embeddings_by_itself(engine_args: dict[str, Any], told: str) -> None:
    assert told in (compat.engine_load_unsupported_reason(engine_args) or "")
    accepted: dict[str, Any] = {
        "tensor_parallel_size": 2,
        "enable_lora": True,
        "video_pruning_rate": 0,
        "tokenizer_mode": "hf",
    }
    assert compat.engine_load_unsupported_reason(accepted) is None


@pytest.mark.parametrize(
    ("engine_args", "told"),
    [
        ({"scheduler_cls": "their.own"}, "scheduler_cls"),
        ({"speculative_config": {"method": "ngram"}}, "speculative_config"),
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill"),
    ],
)
def test_an_engine_that_cannot_read_a_prompt_before_all_is_there(engine_args: dict[str, Any], told: str) -> None:
    assert told in (compat.early_prefill_unsupported_reason(engine_args) or "")
    assert compat.early_prefill_unsupported_reason({"enable_chunked_prefill": True}) is None


def test_a_newer_model_runner_that_cannot_is_left_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.26 takes its older one by itself where its engine has a connector, unless it is told not to."""
    monkeypatch.setattr(compat, "V2_RUNNER_CONNECTOR", "vllm.no_such_module")
    monkeypatch.delenv(compat.V2_RUNNER_VARIABLE, raising=False)
    assert compat.engine_load_unsupported_reason({}) is None
    monkeypatch.setenv(compat.V2_RUNNER_VARIABLE, "1")
    assert "V2 model runner of this vLLM cannot" in (compat.engine_load_unsupported_reason({}) or "")


@pytest.mark.parametrize(("salt", "expected"), [("ours", "ours"), (None, "theirs")])
def test_an_engine_gets_the_salt_and_a_name_of_the_request(
    salt: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.26 reads no `cache_salt` from the bodies of /v1/messages: tenants would share its prefix cache there."""

    async def generate(
        prompt: dict[str, Any], sampling_params: None, request_id: str
    ) -> AsyncGenerator[SimpleNamespace, None]:
        yield SimpleNamespace(told=(prompt["cache_salt"], request_id), finished=True)

    engine = start_fake_engine(monkeypatch, generate, {})

    async def generated(clock: compat.FirstTokenClock | None) -> list[tuple[str, str]]:
        compat.cache_salt.set(salt)
        compat.first_token_clock.set(clock)
        asked = engine.generate({"cache_salt": "theirs"}, None, request_id="r" * 66_000)
        return [output.told async for output in asked]

    assert asyncio.run(generated(None)) == [(expected, "r" * 66_000)]
    one, other = compat.FirstTokenClock(), compat.FirstTokenClock()
    names = [name for _ in range(2) for _, name in asyncio.run(generated(one))]
    assert [(name.startswith(one.token), "r" in name) for name in names] == [(True, False)] * 2
    assert len({*names, one.token, other.token, ""}) == 5
