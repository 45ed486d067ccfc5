"""Identities and hosts that replicas publish once, and the encoder identity with which an ingress replica computes
digests.

Serve calls a started replica's `record_replica_metadata`, and its controller sends the result to all routers. Replicas
of different identities can run side by side: a call that names an identity reaches no other replica. Those of another
version of the messages get no calls at all (`replica_router.py`).
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

from deployments.common import messages, names
from deployments.common.ray_private import is_available, known_replicas, refusal, running_replicas
from encoder.images.generic_identity import Identity, identity_from_json

IDENTITY = "identity"
"""Key of the identity in a replica's metadata. All values are strings, since the controller unpickles them."""
HOST = "host"
"""Key of the host in a replica's metadata, `unix_socket.host_id`."""
_PROTOCOL = "protocol"
_TOWER = "tower"
_ENCODER = "encoder"
POLL_S = 0.05
FIRST_UPDATE_S = 1.0
"""Time for Serve's controller to send the running replicas; if there are none by then, the application is starting."""


def version_metadata() -> dict[str, str]:
    return {_PROTOCOL: str(messages.PROTOCOL_VERSION)}


def encoder_metadata(identity: Identity, host: str) -> dict[str, str]:
    encoder = {IDENTITY: identity.fingerprint, _TOWER: identity.tower, _ENCODER: identity.to_json(), HOST: host}
    return version_metadata() | encoder


def llm_metadata(tower: str, host: str) -> dict[str, str]:
    """`tower`: identity of the vision tower whose embeddings the language model accepts. One that runs the tower itself
    publishes `encoder_metadata`."""
    return version_metadata() | {IDENTITY: tower, _TOWER: tower, HOST: host}


def published(replica: RunningReplica, key: str) -> str:
    """Returns a value of the replica's metadata, empty if it published none."""
    return str(replica.replica_metadata.get(key, ""))


def has_same_protocol(replica: RunningReplica) -> bool:
    """Whether the replica has the version of the messages of this process."""
    return published(replica, _PROTOCOL) == str(messages.PROTOCOL_VERSION)


async def wait_for_rollout_turn(deployment: str, tower: str | None = None) -> None:
    """Returns when a replica of `deployment`, an encoder with this tower or an ingress, may join the running ones.

    In a rolling update, Serve replaces the replicas of all deployments concurrently, and stops an old one before its
    successor starts. Encoders and ingresses start sooner than language models, so old language models would be left
    without an encoder, or without an ingress that may call them. Therefore a replica with a new version of the messages
    or a new tower joins only if the share of such replicas then does not exceed that of such language models.
    """
    app = serve.get_replica_context().app_name
    own, llm = (serve.get_deployment_handle(name, app).options() for name in (deployment, names.LLM))
    starting_until = time.monotonic() + FIRST_UPDATE_S

    def is_new(replica: RunningReplica) -> bool:
        return has_same_protocol(replica) and (tower is None or published(replica, _TOWER) == tower)

    while True:
        running, llms = ([is_new(one) for one in known_replicas(handle)] for handle in (own, llm))
        if running and llms:
            if sum(llms) / len(llms) >= (sum(running) + 1) / (len(running) + 1):
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

        Raises ApiError if the deployment has failed, or an update has replaced this version of the messages.
        """
        waiting: DeploymentResponse[Any] | None = None
        try:
            while (chosen := self._choose()) is None:
                if not is_available(self._encoder):
                    raise self._to_client_error(DeploymentUnavailableError(self._encoder.deployment_id))
                if error := refusal(self._encoder) or refusal(self._llm):
                    raise self._to_client_error(error)
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
