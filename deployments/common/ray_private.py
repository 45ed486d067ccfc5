"""Ray's private API; no other module uses it. `tests/unit/deployments/common/test_ray_private.py` checks each use.

pyproject.toml bounds Ray's version to those that this module was checked against.
"""

from __future__ import annotations

import asyncio
import contextvars
import uuid
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar, cast

import ray
from ray import serve
from ray._private.resource_and_label_spec import ResourceAndLabelSpec
from ray._private.utils import get_num_cpus
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from ray.serve._private.common import ReplicaQueueLengthInfo, RequestMetadata, RunningReplicaInfo
from ray.serve._private.replica import Replica
from ray.serve._private.replica_result import ReplicaResult
from ray.serve._private.tracing_utils import is_tracing_enabled
from ray.serve.context import ReplicaContext, _get_global_client, _set_request_context
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponse
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

__all__ = ["ReplicaQueueLengthInfo", "ReplicaResult", "RunningReplicaInfo", "is_tracing_enabled"]

T = TypeVar("T")

KV_NAMESPACE = "vitray"
"""Namespace of this application's keys in Ray's internal key-value store."""


def autoscaler_resources() -> dict[str, int]:
    """Returns the most of each resource that the cluster's autoscaler can provide; empty without an autoscaler."""
    return ray._private.state.state.get_max_resources_from_cluster_config() or {}


def num_cpus() -> int:
    """Returns the CPUs of this node as a Ray that starts here counts them: those that its container may use."""
    return int(get_num_cpus(override_docker_cpu_warning=True))


def num_gpus() -> int:
    """Returns the GPUs of this node as a Ray that starts here counts them: those of CUDA_VISIBLE_DEVICES."""
    manager, number = ResourceAndLabelSpec._get_current_node_accelerator(None, {})
    return int(number) if manager is not None and manager.get_resource_name() == "GPU" else 0


def serve_host() -> str | None:
    """Returns the host of Serve's `http_options`; None if it is unknown, for instance outside Serve."""
    if not ray.is_initialized():
        return None
    try:
        client = _get_global_client(raise_if_no_controller_running=False)
        return None if client is None else client.http_config.host
    except (AttributeError, ray.exceptions.RayError):
        return None


def serve_details(timeout_s: float) -> dict[str, Any] | None:
    """Returns the state of all applications from Serve's controller; None without a controller. Blocks up to
    `timeout_s`, then raises GetTimeoutError: the node of a controller that does not answer may be lost."""
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return None
    return cast("dict[str, Any]", ray.get(client._controller.get_serve_instance_details.remote(), timeout=timeout_s))


def get_or_store(key: str, new: bytes) -> bytes:
    """Returns the value of `key` in Ray's internal key-value store, which is `new` for the first caller in the cluster;
    `new` outside Ray. Blocks."""
    if not ray.is_initialized():
        return new
    _internal_kv_put(key, new, overwrite=False, namespace=KV_NAMESPACE)
    return _internal_kv_get(key, namespace=KV_NAMESPACE)


def replica_context() -> ReplicaContext | None:
    """Returns Serve's context of the current replica; None outside Serve."""
    try:
        return serve.get_replica_context()
    except RayServeException:
        return None


def max_ongoing_requests() -> int:
    """Returns the limit of the current deployment; 0 outside Serve."""
    return context._deployment_config.max_ongoing_requests if (context := replica_context()) else 0


def refuse_calls(is_refused: Callable[[str], bool]) -> None:
    """Makes the current replica reject calls for whose session id `is_refused` returns True, as Serve rejects those
    over `max_ongoing_requests`: the router of each chooses again. Does nothing outside Serve.

    `is_refused` is called on the replica's event loop, which is not that of the deployment's methods.
    """
    if replica_context() is None:
        return
    can_accept = Replica._can_accept_request

    def accepts(replica: Replica, metadata: RequestMetadata) -> bool:
        return can_accept(replica, metadata) and not is_refused(metadata.session_id)

    Replica._can_accept_request = accepts  # type: ignore[method-assign, assignment]


def start_detached(start: Callable[[], T]) -> T:
    """Starts a call that outlives the HTTP request for which it is started, because other requests may share it.

    Serve cancels calls that were made for a request whose client has disconnected.
    """

    def alone() -> T:
        _set_request_context(_internal_request_id=uuid.uuid4().hex)
        return start()

    return contextvars.copy_context().run(alone)


def is_available(handle: DeploymentHandle[Any]) -> bool:
    """Returns False once the deployment has failed. `options` of the handle must have been called. Thread-safe."""
    return bool(_router(handle)._deployment_available)


def running_replicas(handle: DeploymentHandle[Any]) -> list[RunningReplica]:
    """Returns the running replicas of a deployment as the router of `handle` knows them, without a call.

    Serve's controller sends them to every router whenever they change. `options` of the handle must have been called.
    Thread-safe.
    """
    router = _router(handle)._request_router
    # None until the controller has sent the deployment's configuration.
    return list(router.curr_replicas.values()) if is_available(handle) and router is not None else []


def known_replicas(handle: DeploymentHandle[Any]) -> list[RunningReplica]:
    """Like `running_replicas`, with those that the deployment's `ReplicaRouter` does not route to."""
    router = _router(handle)._request_router
    return list(getattr(router, "known_replicas", ())) or running_replicas(handle)


def refusal(handle: DeploymentHandle[Any]) -> Exception | None:
    """Returns the error of all calls of the handle that no replica will take; None if replicas take them or will."""
    refuse: Callable[[], Exception | None] | None = getattr(_router(handle)._request_router, "refusal", None)
    return refuse() if refuse else None


async def choose_replica(handle: DeploymentHandle[Any], session_id: str) -> tuple[str, dict[str, str]]:
    """Returns the unique id and the metadata of the replica that the router chooses, without reserving a slot of it.
    Waits while no replica runs."""
    async with handle.options(session_id=session_id).choose_replica(_reserve=False) as selection:
        return selection.replica_id, selection.replica_metadata


def exclude(handle: DeploymentHandle[Any], name: str) -> None:
    """Excludes the replica with this unique id from calls of this process. The deployment must have a
    `ReplicaRouter`."""
    router = _router(handle)
    router._event_loop.call_soon_threadsafe(router._request_router.exclude, name)


def _router(handle: DeploymentHandle[Any]) -> Any:  # noqa: ANN401 - Serve's AsyncioRouter, which is not typed
    return cast(Any, handle._router)._asyncio_router


async def routing_stats(replica: RunningReplica) -> dict[str, Any]:
    """Returns the replica's current `record_routing_stats`."""
    stats: dict[str, Any] = await replica._actor_handle.record_routing_stats.remote()
    return stats


def is_by_reference(pending: PendingRequest) -> bool:
    """Whether the call is made through Ray; other calls use gRPC."""
    return bool(pending.metadata._by_reference)


async def is_batching_task_alive(batched: object) -> bool:
    """Whether the task of a `@serve.batch` method is alive; Serve has only a private attribute for it."""
    return bool(await batched._is_batching_task_alive())  # type: ignore[attr-defined]


async def object_ref(response: DeploymentResponse[Any]) -> ray.ObjectRef[Any]:
    """Returns the reference to the result once a replica has accepted the call, which outlives a cancelled wait."""
    assigned = asyncio.ensure_future(response._to_object_ref())
    assigned.add_done_callback(lambda done: done.cancelled() or done.exception())  # raised to the remaining waiters
    try:
        return await asyncio.shield(assigned)
    finally:
        del assigned  # or its error, whose traceback has this frame, would refer to itself


async def wait_until_ready(reference: ray.ObjectRef[Any]) -> None:
    """Waits for the object without transferring it."""
    await reference._ready()


class ResultReference:
    """A reference to the result of a call, to be awaited. Any message can carry it, by gRPC too; Ray takes references
    of its own only in its calls.

    Ray does not know of the copy that is sent: the sender must hold the result until the receiver has it.
    """

    def __init__(self, reference: ray.ObjectRef[Any]) -> None:
        self.reference = reference

    def __await__(self) -> Generator[Any, None, Any]:
        return self.reference.__await__()

    def __reduce__(self) -> tuple[Callable[..., ResultReference], tuple[bytes, ...]]:
        _, owner, status = _core_worker().serialize_object_ref(self.reference)
        return _received, (self.reference.binary(), owner, status)


def _received(reference: bytes, owner: bytes, status: bytes) -> ResultReference:
    """`status` has the result if there was one."""
    received = ResultReference(ray.ObjectRef(reference, owner))  # type: ignore[arg-type]
    _core_worker().deserialize_and_register_object_ref(reference, ray.ObjectRef.nil(), owner, status)
    return received


def _core_worker() -> Any:  # noqa: ANN401 - it is not typed
    return cast(Any, ray)._private.worker.global_worker.core_worker


class PrivateRequestRouter(RequestRouter):
    """Serve's request router with hooks for decisions of its private methods."""

    known_replicas: Sequence[RunningReplica] = ()
    """All that Serve's controller has sent."""

    @property
    def deployment_name(self) -> str:
        return self._deployment_id.name

    def replica_id(self, name: str) -> ReplicaID:
        """`name`: the replica's unique id."""
        return ReplicaID(name, self._deployment_id)

    def try_assign(self, pending: PendingRequest, replica: RunningReplica) -> bool:
        """Whether the call is assigned to the replica chosen for it; if not, Serve chooses again."""
        return True

    def fail(self, pending: PendingRequest, error: Exception) -> None:
        """Fails a call that waits for a replica."""
        if not pending.future.done():
            pending.future.set_exception(error)
            self._remove_pending_request_from_indices(pending)
            self.forget(pending)

    def _get_pending_request_matching_internal_request_id(
        self, request_metadata: RequestMetadata | None = None
    ) -> PendingRequest | None:
        """Returns the call for which a replica was chosen.

        Serve finds it by the id of the HTTP request, which all calls of that request share. One of them would be
        assigned another's replica, and the other would wait for ever.
        """
        for pending in self._pending_requests_to_fulfill:
            if pending.metadata is request_metadata and not pending.future.done():
                return pending
        return None

    def _fulfill_next_pending_request(
        self, replica: RunningReplica, request_metadata: RequestMetadata | None = None
    ) -> None:
        pending = self._get_pending_request_matching_internal_request_id(request_metadata)
        if pending is not None and self.try_assign(pending, replica):
            super()._fulfill_next_pending_request(replica, request_metadata)
            self.forget(pending)

    async def wait_for_place(self, timeout_s: float) -> None:
        """Waits in a call's routing task before full replicas are tried again."""
        await asyncio.sleep(timeout_s)

    async def _backoff(self, attempt: int) -> None:
        await self.wait_for_place(self._compute_backoff_s(attempt))

    def forget(self, pending: PendingRequest) -> None:
        """Removes a call that no longer waits, which Serve does only once all before it have ended."""
        at = next((at for at, one in enumerate(self._pending_requests_to_fulfill) if one is pending), None)
        if at is not None:
            del self._pending_requests_to_fulfill[at]

    def refusal(self) -> Exception | None:
        """Returns the error of calls that no replica will take; None if they wait for one."""
        return None

    def refuse_pending(self) -> None:
        """Fails the calls that wait for a replica if none will take them."""
        if error := self.refusal():
            for pending in list(self._pending_requests_to_fulfill):
                self.fail(pending, error)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        if error := self.refusal():
            raise error
        try:
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        except asyncio.CancelledError:
            self.forget(pending_request)
            future = pending_request.future
            # A call that was just assigned: Serve will not report its completion.
            if future.done() and not future.cancelled() and not future.exception():
                self.on_request_completed(future.result().replica_id, pending_request.metadata.internal_request_id)
            raise
