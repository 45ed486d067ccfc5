"""Ray's private API as `deployments/common/ray_private.py` uses it: another version of Ray fails here by name."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from ray._private.state import GlobalState
from ray.serve import context, handle
from ray.serve._private import client, common, replica_result, router, tracing_utils
from ray.serve._private.request_router import replica_wrapper, request_router
from ray.serve.config import HTTPOptions

from deployments.common import ray_private

CALLS = {
    GlobalState.get_max_resources_from_cluster_config: ["self"],
    context._get_global_client: ["raise_if_no_controller_running"],
    context._set_request_context: ["route", "request_id", "_internal_request_id", "app_name", "multiplexed_model_id"],
    client.ServeControllerClient.get_serve_details: ["self"],
    handle.DeploymentResponse._to_object_ref: ["self"],
    tracing_utils.is_tracing_enabled: [],
    replica_result.ReplicaResult.add_done_callback: ["self", "callback"],
    replica_result.ReplicaResult.get_rejection_response: ["self"],
    replica_result.ReplicaResult.cancel: ["self"],
    request_router.RequestRouter._choose_replica_for_request: ["self", "pending_request", "is_retry"],
    request_router.RequestRouter._fulfill_next_pending_request: ["self", "replica", "request_metadata"],
    request_router.RequestRouter._get_pending_request_matching_internal_request_id: ["self", "request_metadata"],
    request_router.RequestRouter._remove_pending_request_from_indices: ["self", "pending_request"],
    request_router.RequestRouter.on_request_completed: ["self", "replica_id", "internal_request_id"],
    request_router.RequestRouter.on_replica_actor_died: ["self", "replica_id"],
}
"""The parameters of what is called or overridden."""

ATTRIBUTES: dict[type, tuple[str, ...]] = {
    client.ServeControllerClient: ("http_config",),
    HTTPOptions: ("host",),
    context.ReplicaContext: ("_deployment_config",),
    handle.DeploymentHandle: ("_router",),
    router.SingletonThreadRouter: ("_asyncio_router",),
    router.CurrentLoopRouter: ("_asyncio_router",),
    router.AsyncioRouter: ("_deployment_available", "_request_router", "_event_loop"),
    replica_wrapper.RunningReplica: ("_actor_handle",),
    ray.ObjectRef: ("_ready",),
    common.RequestMetadata: ("_by_reference", "internal_request_id", "session_id"),
    common.RunningReplicaInfo: ("replica_metadata", "routing_stats"),
    common.ReplicaQueueLengthInfo: ("accepted", "num_ongoing_requests"),
    request_router.RequestRouter: ("_deployment_id", "_pending_requests_to_fulfill", "curr_replicas"),
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
    private = {name for name in used if name.startswith("_")} - {"_private"}
    checked = (
        {"_is_batching_task_alive"}
        | {function.__name__ for function in CALLS}
        | {name for names in ATTRIBUTES.values() for name in names}
    )
    assert private <= checked


def test_the_cluster_state_is_where_it_was() -> None:
    assert isinstance(ray._private.state.state, GlobalState), f"ray {ray.__version__}"


def test_a_batched_method_tells_whether_its_task_runs() -> None:
    @serve.batch
    async def batched(items: list[int]) -> list[int]:
        return items

    alive = batched._is_batching_task_alive  # type: ignore[attr-defined]
    assert not inspect.signature(alive).parameters, f"ray {ray.__version__}"
