"""Which encoder identity an ingress replica makes digests with."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.serve.handle import DeploymentHandle

from deployments.common.api_error import ApiError
from deployments.common.messages import PROTOCOL_VERSION
from deployments.common.replica_errors import VersionGoneError
from deployments.ingress.failures import Failures
from deployments.routing import replica_identity
from deployments.routing.replica_identity import POLL_S, FleetIdentity
from deployments.telemetry.metrics import Counters
from encoder.images.generic_identity import GenericIdentity, Identity
from encoder.images.identity import EncoderIdentity
from tests.unit.deployments.samples import IDENTITY
from tests.unit.deployments.stand_ins import StandIns

FUSED = dataclasses.replace(IDENTITY, forward="fused")


OTHER_TOWER = dataclasses.replace(IDENTITY, weights="others")


def fleet_of(encoders: StandIns, llms: StandIns | None = None) -> FleetIdentity:
    failures = Failures(Counters(), retry_after_s=1, overloaded_retry_s=lambda: 1)
    return FleetIdentity(
        cast(DeploymentHandle[Any], encoders), cast(DeploymentHandle[Any], llms or encoders), failures.to_client_error
    )


def test_the_majority_decides_and_on_a_tie_nothing_changes() -> None:
    stand_ins = StandIns()
    fleet = fleet_of(stand_ins)
    found = []
    for encoders in ("eef", "ef", "ff", "ef", "", "eef"):
        stand_ins.run(*[IDENTITY if one == "e" else FUSED for one in encoders])
        found.append(cast(EncoderIdentity, asyncio.run(fleet.get())).forward)
    assert found == ["eager", "eager", "fused", "fused", "fused", "eager"]


def test_the_first_encoder_is_waited_for() -> None:
    """By a call, for which Serve starts an encoder where there is none: without, an application whose encoders had been
    scaled to zero did not answer its first image."""

    async def started() -> Identity:
        stand_ins = StandIns()
        stand_ins.run()
        waiting = asyncio.create_task(fleet_of(stand_ins).get())
        await asyncio.sleep(POLL_S)
        assert not waiting.done()
        (call,) = stand_ins.reports
        cancelled = [call.cancelled]
        stand_ins.run(FUSED)
        found = await waiting
        assert [*cancelled, call.cancelled] == [False, True]
        return found

    assert asyncio.run(started()) == FUSED


def test_language_models_decide_which_towers_are_of_use() -> None:
    """All encoders were updated before the first language model, which was sent embeddings of another tower."""

    async def updated() -> list[Identity]:
        encoders, llms = StandIns(), StandIns()
        fleet = fleet_of(encoders, llms)
        found = [await fleet.get()]
        encoders.run(IDENTITY, OTHER_TOWER, OTHER_TOWER)
        found.append(await fleet.get())
        encoders.run(OTHER_TOWER)
        waiting = asyncio.create_task(fleet.get())
        await asyncio.sleep(POLL_S)
        assert not waiting.done()
        llms.run(IDENTITY, OTHER_TOWER)
        return [*found, await waiting]

    assert asyncio.run(updated()) == [IDENTITY, IDENTITY, OTHER_TOWER]


def joined(
    monkeypatch: pytest.MonkeyPatch,
    handles: dict[str, StandIns],
    deployment: str,
    tower: str | None = None,
    *,
    timeout: float,
) -> bool:
    """Whether it is the turn of a new replica of the deployment, within `timeout` seconds."""
    context = SimpleNamespace(app_name="app")
    handle_of = lambda name, app: handles[name]  # noqa: E731
    stand_in = SimpleNamespace(get_replica_context=lambda: context, get_deployment_handle=handle_of)
    monkeypatch.setattr(replica_identity, "serve", stand_in)
    monkeypatch.setattr(replica_identity, "FIRST_UPDATE_S", 0)

    async def scenario() -> bool:
        turn = asyncio.create_task(replica_identity.wait_for_rollout_turn(deployment, tower))
        await asyncio.wait([turn], timeout=timeout)
        return turn.done()

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("encoders", "llms", "joins"),
    [
        ("oo", "oo", False),
        ("oo", "on", True),
        ("ooon", "oooooooon", False),
        ("ooon", "oonn", True),
        ("ooon", "oon", False),
        ("n", "n", True),
        ("", "", True),
        ("o", "", True),
    ],
)
def test_new_encoders_join_as_their_language_models_do(
    encoders: str, llms: str, joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`o` and `n`: replicas of the old and the new tower. Where no encoder or no language model runs, all may."""
    handles = {"Encoder": StandIns(), "LLM": StandIns()}
    for name, running in (("Encoder", encoders), ("LLM", llms)):
        handles[name].run(*[IDENTITY if one == "o" else OTHER_TOWER for one in running])
    assert joined(monkeypatch, handles, "Encoder", OTHER_TOWER.tower, timeout=5 if joins else 3 * POLL_S) == joins


@pytest.mark.parametrize(
    ("ingresses", "llms", "joins"),
    [
        ("oo", "oo", False),
        ("oo", "on", True),
        ("o", "on", True),
        ("n", "onnn", False),
        ("n", "nnnn", True),
        ("oo", "", True),
    ],
)
def test_new_ingresses_join_as_language_models_of_their_version_do(
    ingresses: str, llms: str, joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`o` and `n`: replicas of another version of the messages, which get no calls, and of this one."""
    handles = {"Ingress": StandIns(), "LLM": StandIns()}
    for name, running in (("Ingress", ingresses), ("LLM", llms)):
        handles[name].run(*[IDENTITY] * len(running))
        router = handles[name]._router._asyncio_router._request_router
        router.known_replicas = list(router.curr_replicas.values())
        for replica, version in zip(router.known_replicas, running, strict=True):
            replica.replica_metadata["protocol"] = str(PROTOCOL_VERSION - (version == "o"))
        router.curr_replicas = {}
    assert joined(monkeypatch, handles, "Ingress", timeout=5 if joins else 3 * POLL_S) == joins


def test_an_ingress_of_a_version_that_is_gone_says_so() -> None:
    encoders, llms = StandIns(), StandIns()
    encoders.run()
    llms._router._asyncio_router._request_router.refusal = VersionGoneError
    with pytest.raises(ApiError, match="being updated to another version; try again") as raised:
        asyncio.run(fleet_of(encoders, llms).get())
    assert (raised.value.status, raised.value.retry_after_s) == (503, 1)


def test_language_models_that_run_the_tower_publish_its_identity() -> None:
    """In an update, others without an identity of an encoder run beside them."""
    engine = GenericIdentity("checkpoint", "", ((4,) * 4,) * 4, in_engine=True)
    stand_ins = StandIns()
    stand_ins.run(engine)
    replicas = stand_ins._router._asyncio_router._request_router.curr_replicas
    for number in range(2):
        replicas[f"old {number}"] = SimpleNamespace(replica_metadata=replica_identity.llm_metadata("tower", "h"))
    assert asyncio.run(fleet_of(stand_ins).get()) == engine
