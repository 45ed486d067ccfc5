"""Identities and hosts that replicas publish once, and the encoder identity with which an ingress replica computes
digests.

Serve calls a started replica's `record_replica_metadata`, and its controller sends the result to all routers. Replicas
of different identities can run side by side: a call that names an identity reaches no other replica.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponse
from ray.serve.request_router import RunningReplica

from deployments.common import names
from deployments.common.ray_private import is_available, running_replicas
from encoder.images.generic_identity import Identity, identity_from_json

IDENTITY = "identity"
"""Key of the identity in a replica's metadata. All values are strings, since the controller unpickles them."""
HOST = "host"
"""Key of the host in a replica's metadata, `unix_socket.host_id`."""
_TOWER = "tower"
_ENCODER = "encoder"
POLL_S = 0.05
FIRST_UPDATE_S = 1.0
"""Time for Serve's controller to send the running replicas; if there are none by then, the application is starting."""


def encoder_metadata(identity: Identity, host: str) -> dict[str, str]:
    return {IDENTITY: identity.fingerprint, _TOWER: identity.tower, _ENCODER: identity.to_json(), HOST: host}


def llm_metadata(tower: str, host: str) -> dict[str, str]:
    """`tower`: identity of the vision tower whose embeddings the language model accepts. One that runs the tower itself
    publishes `encoder_metadata`."""
    return {IDENTITY: tower, _TOWER: tower, HOST: host}


def published(replica: RunningReplica, key: str) -> str:
    """Returns a value of the replica's metadata, empty if it published none."""
    return str(replica.replica_metadata.get(key, ""))


async def wait_for_rollout_turn(tower: str) -> None:
    """Returns when an encoder with this tower may join the running ones.

    In a rolling update, Serve replaces the replicas of all deployments concurrently, and stops an old one before its
    successor starts. Encoders start sooner than language models, so old language models would be left without an
    encoder. Therefore the share of encoders with a new tower never exceeds that of the language models that expect it.
    """
    app = serve.get_replica_context().app_name
    encoder, llm = (serve.get_deployment_handle(name, app).options() for name in (names.ENCODER, names.LLM))
    starting_until = time.monotonic() + FIRST_UPDATE_S
    while True:
        encoders, llms = _towers(encoder), _towers(llm)
        if encoders and llms:
            if tower in llms and llms.count(tower) / len(llms) >= encoders.count(tower) / len(encoders):
                return
        elif time.monotonic() > starting_until:
            return
        await asyncio.sleep(POLL_S)


class FleetIdentity:
    """The encoder identity of one ingress replica. Used on one event loop.

    identity = await fleet.get()
    job = ImageJob(..., digest=identity.digest(file, bounds), identity=identity.fingerprint)
    """

    def __init__(
        self,
        encoder: DeploymentHandle[Any],
        llm: DeploymentHandle[Any],
        to_client_error: Callable[[Exception], Exception],
    ) -> None:
        """`encoder`: the deployment that encodes images, which may be `llm`. `to_client_error` converts an error to
        the one that the client gets."""
        self._encoder = encoder
        self._llm = llm
        self._to_client_error = to_client_error
        self._current: Identity | None = None

    async def get(self) -> Identity:
        """Returns the most frequent identity of the running encoders whose tower a running language model expects; on a
        tie, the one returned last. Waits for the first encoder, and for a tower that both deployments have.

        Raises ApiError if the deployment has failed.
        """
        waiting: DeploymentResponse[Any] | None = None
        try:
            while (chosen := self._choose()) is None:
                if not is_available(self._encoder):
                    raise self._to_client_error(DeploymentUnavailableError(self._encoder.deployment_id))
                if waiting is None and not running_replicas(self._encoder):
                    # A waiting call makes Serve scale a deployment up from zero replicas.
                    called = self._encoder.options(method_name="report").remote()
                    waiting = cast(DeploymentResponse[Any], called)
                await asyncio.sleep(POLL_S)
        finally:
            if waiting is not None:
                waiting.cancel()
        return chosen

    def _choose(self) -> Identity | None:
        encoders, towers = running_replicas(self._encoder), _towers(self._llm)
        replicas = [one for one in encoders if not towers or one.replica_metadata.get(_TOWER) in towers]
        if encoders and not replicas:
            return None
        described = [replica for replica in replicas if _ENCODER in replica.replica_metadata]
        counts = Counter(published(replica, IDENTITY) for replica in described)
        current = self._current.fingerprint if self._current else ""
        most_frequent = max(
            counts, key=lambda identity: (counts[identity], identity == current, identity), default=current
        )
        if most_frequent != current:
            chosen = next(replica for replica in described if published(replica, IDENTITY) == most_frequent)
            self._current = identity_from_json(chosen.replica_metadata[_ENCODER])
        return self._current


def _towers(handle: DeploymentHandle[Any]) -> list[str]:
    """Returns the towers of the deployment's running replicas."""
    return [replica.replica_metadata.get(_TOWER, "") for replica in running_replicas(handle)]
