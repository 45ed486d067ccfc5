"""Ray's private API as `deployments/common/ray_private.py` uses it: another version of Ray fails here by name."""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from ray._private.accelerators import NvidiaGPUAcceleratorManager
from ray._private.resource_and_label_spec import ResourceAndLabelSpec
from ray._private.state import GlobalState
from ray._private.utils import get_num_cpus
from ray._private.worker import Worker
from ray._raylet import CoreWorker  # type: ignore[attr-defined]
from ray.experimental import internal_kv
from ray.serve import context, handle
from ray.serve._private import client, common, controller, replica, replica_result, router, tracing_utils
from ray.serve._private.request_router import replica_wrapper, request_router
from ray.serve.config import HTTPOptions

from deployments.common import ray_private

CALLS = {
    ResourceAndLabelSpec._get_current_node_accelerator: ["num_gpus", "resources"],
    get_num_cpus: ["override_docker_cpu_warning", "truncate"],
    GlobalState.get_max_resources_from_cluster_config: ["self"],
    context._get_global_client: ["raise_if_no_controller_running"],
    context._set_request_context: ["route", "request_id", "_internal_request_id", "app_name", "multiplexed_model_id"],
    controller.ServeController.get_serve_instance_details: ["self", "source"],
    handle.DeploymentResponse._to_object_ref: ["self"],
    handle.DeploymentHandle.choose_replica: ["self", "args", "kwargs"],
    internal_kv._internal_kv_put: ["key", "value", "overwrite", "namespace"],
    internal_kv._internal_kv_get: ["key", "namespace"],
    tracing_utils.is_tracing_enabled: [],
    replica_result.ReplicaResult.add_done_callback: ["self", "callback"],
    replica_result.ReplicaResult.get_rejection_response: ["self"],
    replica_result.ReplicaResult.cancel: ["self"],
    replica.Replica._can_accept_request: ["self", "request_metadata"],
    request_router.RequestRouter._backoff: ["self", "attempt"],
    request_router.RequestRouter._compute_backoff_s: ["self", "attempt"],
    request_router.RequestRouter._choose_replica_for_request: ["self", "pending_request", "is_retry"],
    request_router.RequestRouter._fulfill_next_pending_request: ["self", "replica", "request_metadata"],
    request_router.RequestRouter._get_pending_request_matching_internal_request_id: ["self", "request_metadata"],
    request_router.RequestRouter._remove_pending_request_from_indices: ["self", "pending_request"],
    request_router.RequestRouter.on_request_completed: ["self", "replica_id", "internal_request_id"],
    request_router.RequestRouter.on_replica_actor_died: ["self", "replica_id"],
}
"""The parameters of what is called or overridden."""

ATTRIBUTES: dict[type, tuple[str, ...]] = {
    client.ServeControllerClient: ("http_config", "_controller"),
    HTTPOptions: ("host",),
    context.ReplicaContext: ("_deployment_config",),
    handle.DeploymentHandle: ("_router",),
    router.SingletonThreadRouter: ("_asyncio_router",),
    router.CurrentLoopRouter: ("_asyncio_router",),
    router.AsyncioRouter: ("_deployment_available", "_request_router", "_event_loop"),
    replica_wrapper.RunningReplica: ("_actor_handle",),
    replica_wrapper.ReplicaSelection: ("replica_id", "replica_metadata"),
    ray.ObjectRef: ("_ready",),
    CoreWorker: ("serialize_object_ref", "deserialize_and_register_object_ref"),
    Worker: ("core_worker",),
    common.RequestMetadata: ("_by_reference", "internal_request_id", "session_id"),
    common.RunningReplicaInfo: ("replica_metadata", "routing_stats"),
    common.ReplicaQueueLengthInfo: ("accepted", "num_ongoing_requests"),
    request_router.RequestRouter: (
        *("_deployment_id", "_pending_requests_to_fulfill", "curr_replicas", "initial_backoff_s"),
    ),
}
"""What is read of these classes: fields, properties, or what their methods set."""


@pytest.mark.parametrize("function", CALLS, ids=lambda one: one.__qualname__)
def test_what_is_called_or_overridden_takes_these_arguments(function: Any) -> None:
    assert list(inspect.signature(function).parameters) == CALLS[function], f"ray {ray.__version__}"


@pytest.mark.parametrize(
    ("owner", "name"),
    [(owner, name) for owner, names in ATTRIBUTES.items() for name in names],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_what_is_read_is_there(owner: type, name: str) -> None:
    fields = {field for one in owner.__mro__ for field in getattr(one, "__annotations__", {})}
    sources = (inspect.getsource(one) for one in owner.__mro__ if one.__module__.startswith("ray."))
    is_there = hasattr(owner, name) or name in fields or any(f"self.{name}" in source for source in sources)
    assert is_there, f"ray {ray.__version__} has no {owner}.{name}"


def test_every_private_name_of_the_module_is_checked() -> None:
    tree = ast.parse(Path(ray_private.__file__).read_text())
    used = {one.attr for one in ast.walk(tree) if isinstance(one, ast.Attribute) and one.attr.startswith("_")}
    used |= {alias.name for one in ast.walk(tree) if isinstance(one, ast.ImportFrom) for alias in one.names}
    private = {name for name in used if name.startswith("_") and not name.startswith("__")} - {"_private"}
    checked = (
        {"_is_batching_task_alive"}
        | {function.__name__ for function in CALLS}
        | {name for names in ATTRIBUTES.values() for name in names}
    )
    assert private <= checked


def test_a_replica_is_chosen_without_a_reservation() -> None:
    """Serve's router is driven with a request router alone: there is no replica on which it could reserve a slot."""
    chosen = SimpleNamespace(
        replica_id=SimpleNamespace(unique_id="a"),
        _replica_info=SimpleNamespace(node_ip="127.0.0.1", port=1),
        node_id="node",
        availability_zone=None,
        replica_metadata={"host": "h"},
    )

    async def ranks(pending: object) -> AsyncIterator[list[object]]:
        yield [chosen]

    async def choose() -> tuple[str, dict[str, str]]:
        ready = asyncio.Event()
        ready.set()

        async def resolved(pending: object) -> None: ...

        stand_in = SimpleNamespace(
            _deployment_available=True,
            _request_router_initialized=ready,
            _metrics_manager=SimpleNamespace(wrap_request_assignment=lambda metadata: nullcontext()),
            _resolve_args_with_metrics=resolved,
            _active_request_router=SimpleNamespace(_choose_replicas_with_backoff=ranks),
        )

        class Handle:
            def options(self, *, session_id: str) -> Handle:
                self.session_id = session_id
                return self

            def choose_replica(self, **arguments: Any) -> Any:
                metadata = common.RequestMetadata("1", "1", session_id=self.session_id)
                return router.AsyncioRouter.choose_replica(stand_in, metadata, **arguments)  # type: ignore[arg-type]

        return await ray_private.choose_replica(Handle(), "session")  # type: ignore[arg-type]

    assert asyncio.run(choose()) == ("a", {"host": "h"}), f"ray {ray.__version__}"


def test_a_call_is_refused_by_its_session_id_only_where_serve_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside Serve nothing is replaced. `tests/cluster/test_served_busy.py` has a replica that refuses."""
    before = replica.Replica._can_accept_request
    ray_private.refuse_calls(lambda _: True)
    assert replica.Replica._can_accept_request is before
    monkeypatch.setattr(serve, "get_replica_context", SimpleNamespace)
    monkeypatch.setattr(replica.Replica, "_can_accept_request", lambda self, metadata: self.has_slots)
    ray_private.refuse_calls(lambda session_id: session_id == "busy")
    for has_slots, session_id, accepted in ((True, "", True), (True, "busy", False), (False, "", False)):
        stand_in: Any = SimpleNamespace(has_slots=has_slots)
        metadata = common.RequestMetadata("1", "1", session_id=session_id)
        assert replica.Replica._can_accept_request(stand_in, metadata) is accepted


def test_serves_controller_is_waited_for_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, a thread of every poll of `/cluster` waited for the node of a lost controller."""
    given: list[dict[str, Any]] = []
    details = SimpleNamespace(remote=lambda: "reference")
    found = SimpleNamespace(_controller=SimpleNamespace(get_serve_instance_details=details))
    monkeypatch.setattr(ray_private, "_get_global_client", lambda **_: found)

    def get(reference: str, **options: Any) -> dict[str, str]:
        given.append(options)
        return {"of": reference}

    monkeypatch.setattr(ray, "get", get)
    assert ray_private.serve_details(2.0) == {"of": "reference"}
    assert given == [{"timeout": 2.0}]


@pytest.mark.parametrize(("visible", "number"), [(None, 4), ("0,2", 2), ("", 0)])
def test_gpus_are_counted_as_ray_counts_them(visible: str | None, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NvidiaGPUAcceleratorManager, "get_current_node_num_accelerators", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert ray_private.num_gpus() == number, f"ray {ray.__version__}"


def test_the_cluster_state_is_where_it_was() -> None:
    assert isinstance(ray._private.state.state, GlobalState), f"ray {ray.__version__}"


def test_a_batched_method_tells_whether_its_task_runs() -> None:
    @serve.batch
    async def batched(items: list[int]) -> list[int]:
        return items

    alive = batched._is_batching_task_alive  # type: ignore[attr-defined]
    assert not inspect.signature(alive).parameters, f"ray {ray.__version__}"


def test_cpus_are_those_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a node of 64 cores with a limit of one, the start was let through, and a replica waited for ever."""
    monkeypatch.delenv("RAY_USE_MULTIPROCESSING_CPU_COUNT", raising=False)
    monkeypatch.setattr("ray._private.utils._get_docker_cpus", lambda *_: 1.5)
    assert ray_private.num_cpus() == 1
