"""Two replicas of everything on a real Ray Serve: calls go where their image or conversation is; faults go unnoticed.

The language model is a stand-in that answers with the norm of what it was given (`stand_in_llm.py`). The tests stand in
an order: the last ones kill a replica and break another's GPU.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from ray.exceptions import RayActorError

from deployments.common.messages import ImageJob
from deployments.common.ray_private import running_replicas
from deployments.encoder_replica.busy import MAX_BACKLOG_S
from deployments.routing.affinity import Affinity, Call
from deployments.routing.replica_identity import IDENTITY, published
from deployments.scaling.encoder_scaler import BACKLOG_TOKENS, TOKENS_PER_S
from deployments.telemetry.metrics import Counter, Counters
from encoder.encoder import Encoder
from tests.cluster.served import START_S, Cluster, ServedApp, deploy
from tests.cluster.test_served_images import REQUEST_S, added, ask, ask_all, chat
from tests.serve.asking import settled
from tests.unit.deployments.samples import png
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]

MANY = [png(64, 64, (number, 120, 7)) for number in range(0, 240, 15)]


@pytest.fixture(scope="module")
def pair(cluster: Cluster, checkpoints: dict[str, Path]) -> Iterator[ServedApp]:
    from ray import serve

    yield deploy(cluster, checkpoints["qwen3_vl"], "pair", replicas=2, max_queued_tokens=10_000)
    serve.delete("pair")


@pytest.fixture(autouse=True)
def released(pair: ServedApp) -> Iterator[None]:
    """Nothing is left waiting at a gate."""
    yield
    pair.encoders("release")


def counts(pair: ServedApp) -> dict[str, int]:
    """Of both encoder replicas together."""
    return together(pair.encoders("counts"))


def at_the_door(pair: ServedApp) -> dict[str, int]:
    """Counts of both ingress replicas together."""
    return together(pair.ingresses("counts"))


def together(found: list[dict[str, int]]) -> dict[str, int]:
    assert len(found) == 2
    return {name: sum(replica[name] for replica in found) for name in found[0]}


def encoded(pair: ServedApp) -> dict[int, int]:
    """Images by replica."""
    return {state["pid"]: state["encoded"] for state in pair.encoders("state")}


def norms(answer: httpx.Response) -> list[float]:
    assert answer.status_code == 200, answer.text
    return [image["norm"] for image in answer.json()["images"]]


def test_images_are_spread_and_each_is_found_again(pair: ServedApp, checkpoints: dict[str, Path]) -> None:
    """By chance each image would be looked for at the other replica every second time."""
    before = encoded(pair)
    first = [norms(ask(pair, chat(file))) for file in MANY]
    after = encoded(pair)
    by_replica = [after[pid] - before[pid] for pid in before]
    assert sum(by_replica) == len(MANY)
    assert min(by_replica) >= 1
    counted = counts(pair)
    assert [norms(ask(pair, chat(file))) for file in MANY] == first
    until(lambda: added(counted, counts(pair)) == {"CACHE_HITS": len(MANY)}, "the encoders to hear of it")
    expected = Encoder.from_checkpoint(checkpoints["qwen3_vl"]).encode(MANY)
    for found, embedding in zip(first, expected, strict=True):
        assert found == [pytest.approx(float(torch.linalg.norm(embedding.tokens)), rel=1e-4)]


def test_the_images_of_one_request_each_find_their_replica(pair: ServedApp) -> None:
    """Serve knows the calls of one request by one name: one got another's replica, and that one waited for ever."""
    counted = counts(pair)
    assert norms(ask(pair, chat(*MANY))) == [norms(ask(pair, chat(file)))[0] for file in MANY]
    new: dict[str, int] = {}

    def all_counted() -> bool:
        new.update(added(counted, counts(pair)))
        return new.get("CACHE_HITS", 0) + new.get("CACHE_MISSES", 0) == 2 * len(MANY)

    until(all_counted, "the encoders to hear of it")
    assert new["CACHE_HITS"] >= len(MANY)


async def while_held(pair: ServedApp, files: list[bytes], arrived: Callable[[], object]) -> list[httpx.Response]:
    """One request for each file, all of them in before any encoder may begin."""
    await asyncio.to_thread(pair.encoders, "hold")
    async with httpx.AsyncClient(timeout=START_S) as client:
        url = f"{pair.url}/v1/chat/completions"
        tasks = [asyncio.create_task(client.post(url, json=chat(file))) for file in files]
        await asyncio.to_thread(until, arrived, "all arrivals")
        await asyncio.to_thread(pair.encoders, "release")
        return await asyncio.gather(*tasks)


def test_a_hot_image_is_encoded_once_by_all_together(pair: ServedApp) -> None:
    """Twenty clients at two ingresses: each of those sends it once, to the same encoder. The metrics say the same."""
    before, door = counts(pair), at_the_door(pair)
    exported = settled(lambda: pair.exported("Encoder").get("vitray_images_encoded_total", 0))

    def calls() -> int:
        return counts(pair)["CACHE_MISSES"] - before["CACHE_MISSES"]

    def arrived() -> bool:
        return calls() + at_the_door(pair)["COALESCED_ENCODES"] - door["COALESCED_ENCODES"] == 20

    answers = asyncio.run(while_held(pair, [png(96, 96, (250, 1, 1))] * 20, arrived))
    assert len({norms(answer)[0] for answer in answers}) == 1
    assert calls() <= 2
    assert added(before, counts(pair)) == {"CACHE_MISSES": calls(), "IMAGES_ENCODED": 1}
    until(lambda: pair.exported("Encoder")["vitray_images_encoded_total"] == exported + 1, "the metrics")


def test_no_encoder_has_much_more_to_do_than_the_other(pair: ServedApp) -> None:
    """Four tokens an image. At each ingress, an encoder gets an image with at most two more than the mean: of n images,
    at most (n + 5) / 2 go to one encoder. What a busy encoder refuses goes to the other one whatever the bound."""
    waiting: list[int] = []

    def arrived() -> bool:
        waiting[:] = [state["queued_tokens"] for state in pair.encoders("state")]
        return sum(waiting) == 4 * 24

    pair.encoders("refuse", refuses=False)
    try:
        answers = asyncio.run(while_held(pair, [png(64, 64, (251, 5, number)) for number in range(24)], arrived))
    finally:
        pair.encoders("refuse", refuses=True)
    assert all(answer.status_code == 200 for answer in answers)
    assert max(waiting) <= 4 * (24 + 2 * 5) / 2


def test_a_busy_encoder_refuses_images_and_the_other_takes_them(
    pair: ServedApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Called as an ingress calls, but with a weight under which the bound of the caller never acts, for images that
    all have one home. What is cached there is not refused."""
    counted: list[Counter] = []
    monkeypatch.setattr(Counters, "add", lambda _, count, *args, **labels: counted.append(count))
    handle = pair._encoder.options(method_name="encode", _by_reference=True)
    replicas = {one.replica_id.unique_id: one for one in running_replicas(handle)}
    ranking = Affinity()
    ranking.set_replicas(replicas)
    home, other = sorted(replicas)
    identity = published(replicas[home], IDENTITY)

    def images_of(replica: str) -> Iterator[int]:
        return (number for number in itertools.count() if ranking.rank(Call(digest(number)))[0] == replica)

    def digest(number: int) -> str:
        return hashlib.sha256(f"busy {number}".encode()).hexdigest()

    def send(number: int) -> Any:
        job = ImageJob(png(384, 384, (7, number >> 8, number & 255)), None, digest(number), identity, (384, 384), 144)
        call = Call(job.digest, 0, cost=144, identity=identity)
        return handle.options(session_id=call.to_session_id()).remote(job)

    def replica_of(answer: Any) -> str:
        return answer.result(timeout_s=START_S).timings.replica

    def stats() -> list[dict[str, float]]:
        return pair.encoders("record_autoscaling_stats")

    def have_arrived(images: int) -> bool:
        return sum(of[BACKLOG_TOKENS] for of in stats()) == 144 * images

    of_home, of_other = images_of(home), images_of(other)
    cached = next(of_home)
    known = replica_of(send(cached)), replica_of(send(next(of_other)))
    assert known[0] != known[1]
    assert all(of[TOKENS_PER_S] for of in stats())
    counted.clear()
    pair.encoders("hold")
    sent = []
    for count in range(1, 13):
        sent.append(send(next(of_home)))
        until(partial(have_arrived, count), "its arrival")
    assert send(cached).result(timeout_s=START_S).timings.cached
    pair.encoders("release")
    at_home = [replica_of(answer) for answer in sent].count(known[0])
    bound = max(MAX_BACKLOG_S * max(of[TOKENS_PER_S] for of in stats()), 144)
    assert 1 <= at_home <= bound / 144 + 1
    assert counted.count(Counter.ENCODER_REFUSALS) == 12 - at_home > 0


def test_small_images_are_sent_elsewhere_than_a_large_one(pair: ServedApp) -> None:
    """At the ingress of the large image, small ones that come later, and whose encoder it is, are routed elsewhere and
    counted."""
    large = [png(384, 384, (252, 5, 0))]
    small = [png(64, 64, (253, 5, number)) for number in range(20)]
    before = settled(lambda: pair.exported("Ingress").get("vitray_affinity_spills_total", 0))

    def arrived(tokens: int) -> bool:
        return sum(state["queued_tokens"] for state in pair.encoders("state")) == tokens

    async def asked() -> list[httpx.Response]:
        await asyncio.to_thread(pair.encoders, "hold")
        async with httpx.AsyncClient(timeout=START_S) as client:
            url, tasks = f"{pair.url}/v1/chat/completions", []
            for files, tokens in ((large, 144), (small, 144 + 20 * 4)):
                tasks += [asyncio.create_task(client.post(url, json=chat(file))) for file in files]
                await asyncio.to_thread(until, partial(arrived, tokens), "all images")
            await asyncio.to_thread(pair.encoders, "release")
            return await asyncio.gather(*tasks)

    assert all(answer.status_code == 200 for answer in asyncio.run(asked()))
    until(lambda: pair.exported("Ingress").get("vitray_affinity_spills_total", 0) > before, "the metrics")


def test_the_controller_sends_nothing_that_changes_with_the_load(pair: ServedApp) -> None:
    """It sends the routing stats that it polls to every router whenever they change."""
    ask(pair, chat(MANY[0]))
    for handle in (pair._encoder.options(method_name="state"), pair._llm.options(method_name="state")):
        until(partial(lambda one: len(running_replicas(one)) == 2, handle), "the replicas")
        assert [replica.routing_stats for replica in running_replicas(handle)] == [{}, {}]


def test_turns_of_a_conversation_go_to_one_language_model(pair: ServedApp) -> None:
    """Whichever ingress they come to; and conversations are spread."""
    calls = lambda: {state["pid"]: state["calls"] for state in pair.llms("state")}  # noqa: E731
    taken_by: set[int] = set()
    for number in range(20):
        body = chat(MANY[0], messages=[{"role": "system", "content": "Be brief."}])
        body["messages"].append({"role": "user", "content": f"Question {number}"})
        before = calls()
        for turn in range(3):
            assert ask(pair, body).status_code == 200
            body["messages"] += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": f"And {turn}?"}]
        (taker,) = [(pid, count - before[pid]) for pid, count in calls().items() if count != before[pid]]
        assert taker[1] == 3
        taken_by.add(taker[0])
    assert len(taken_by) == 2


def reading(pair: ServedApp) -> list[int]:
    return sorted(stats["work"] for stats in pair.llms("record_routing_stats"))


def test_long_prompts_go_to_the_language_model_with_less_to_read(pair: ServedApp) -> None:
    """Whichever ingress they come to: those do not know of each other. By chance ten are seldom five and five, pair by
    pair. A host so busy that a load is reported late routes by chance, so one of three tries has to be right."""
    assert any(are_spread(pair) for _ in range(3))


def are_spread(pair: ServedApp) -> bool:
    until(lambda: reading(pair) == [0, 0], "the end of what was before")
    long = "word " * 4000
    chunks: list[Iterator[bytes]] = []
    with ExitStack() as streams:
        for number in range(10):
            body = {"messages": [{"role": "user", "content": f"{number} {long}"}], "stream": True}
            stream = httpx.stream("POST", f"{pair.url}/v1/chat/completions", json=body, timeout=REQUEST_S)
            chunks.append(streams.enter_context(stream).iter_bytes())  # kept: one that goes ends its request
            next(chunks[-1])
            given = number + 1
            low, high = reading(pair)
            assert low + high == 768 * given
            if high - low != 768 * (given % 2):
                return False
    until(lambda: reading(pair) == [0, 0], "the end of all streams")
    return True


def test_a_dead_engine_answers_nobody_and_gets_no_more_calls(pair: ServedApp) -> None:
    """Its replica lives on until Serve has checked it some times. It answered with a 500, at once, and so had less to
    do than the other, and drew the calls of all. Images that it had asked about were encoded again, by the encoder that
    did not have them."""
    pair.llms("hold")
    before = {state["pid"]: state["calls"] for state in pair.llms("state")}

    def calls() -> int:
        return sum(state["calls"] for state in pair.llms("state")) - sum(before.values())

    async def ended() -> tuple[int, list[httpx.Response]]:
        async with httpx.AsyncClient(timeout=START_S) as client:
            url = f"{pair.url}/v1/chat/completions"
            bodies = [chat(png(64, 64, (number, 9, 200))) for number in range(12)]
            bodies += [{"messages": [{"role": "user", "content": f"{number}" * 50}]} for number in range(12)]
            tasks = [asyncio.create_task(client.post(url, json=body)) for body in bodies[:12]]
            await asyncio.to_thread(until, lambda: calls() == 12, "all requests at the engines")
            pid = await asyncio.to_thread(pair.llm, "end_engine")
            await asyncio.to_thread(pair.llms, "release")
            tasks += [asyncio.create_task(client.post(url, json=body)) for body in bodies[12:]]
            return pid, await asyncio.gather(*tasks)

    lost, encoders = at_the_door(pair), counts(pair)
    pid, answers = asyncio.run(ended())
    assert added(encoders, counts(pair))["IMAGES_ENCODED"] == 12
    assert [answer.status_code for answer in answers] == [200] * 24
    assert at_the_door(pair)["REQUEST_RETRIES"] > lost["REQUEST_RETRIES"]
    until(lambda: {pid}.isdisjoint(state["pid"] for state in running_llms(pair)), "a new language model")


def running_llms(pair: ServedApp) -> list[dict[str, Any]]:
    """Both; waits for as long as there are not two."""

    def both() -> list[dict[str, Any]] | None:
        try:
            states = pair.llms("state")
        except RayActorError:
            return None
        return states if len(states) == 2 else None

    states: list[dict[str, Any]] = until(both, "two language models")
    return states


def test_a_replica_killed_at_work_is_noticed_by_nobody(pair: ServedApp) -> None:
    """What it worked on and what it held is encoded again, what the other one holds is not."""
    files = MANY[:8]
    before = [norms(ask(pair, chat(file))) for file in files]
    lost = at_the_door(pair)
    fresh = [png(96, 64, (3, number, 251)) for number in range(4)]
    pair.encoders("hold")

    async def killed() -> tuple[int, list[httpx.Response]]:
        async with httpx.AsyncClient(timeout=START_S) as client:
            url = f"{pair.url}/v1/chat/completions"
            tasks = [asyncio.create_task(client.post(url, json=chat(file))) for file in fresh]

            def both_at_work() -> list[dict[str, Any]] | None:
                states: list[dict[str, Any]] = pair.encoders("state")
                return states if sum(state["flights"] for state in states) == len(fresh) else None

            states = await asyncio.to_thread(until, both_at_work, "all images at the encoders")
            doomed = max(states, key=lambda state: state["queued_tokens"])
            os.kill(doomed["pid"], signal.SIGKILL)
            await asyncio.to_thread(until, release_the_living, "the other one to go on")
            return doomed["pid"], await asyncio.gather(*tasks)

    def release_the_living() -> bool:
        try:
            return bool(pair.encoders("release"))
        except RayActorError:  # the call has found out that one is dead; the next goes to the others
            return False

    pid, answers = asyncio.run(killed())
    assert [norms(answer) for answer in answers] == [norms(ask(pair, chat(file))) for file in fresh]
    after = at_the_door(pair)
    assert after["REPLICAS_LOST"] > lost["REPLICAS_LOST"]
    assert after["REQUEST_RETRIES"] - lost["REQUEST_RETRIES"] == after["REPLICAS_LOST"] - lost["REPLICAS_LOST"]
    assert [norms(answer) for answer in ask_all(pair, [chat(file) for file in files])] == before
    until(lambda: len(pair.encoders("state")) == 2, "a new replica")
    assert pid not in encoded(pair)


def test_a_replica_whose_gpu_fails_is_replaced_and_noticed_by_nobody(pair: ServedApp) -> None:
    """It cannot encode, and a replica that fails at once has least to do: it drew all calls and failed them."""
    files = [png(64, 96, (4, number, 251)) for number in range(12)]
    before = set(encoded(pair))
    names = ("vitray_gpu_failures_total", "vitray_errors_logged_total")
    failures, errors = (pair.exported("Encoder").get(name, 0) for name in names)
    pair.encoder("break_device", told="CUDA error: an illegal memory access was encountered")
    answers = ask_all(pair, [chat(file) for file in files])
    found = [norms(answer) for answer in answers]
    until(lambda: len(pair.encoders("state")) == 2 and set(encoded(pair)) != before, "a new replica")
    assert len(before & set(encoded(pair))) == 1
    assert [norms(answer) for answer in ask_all(pair, [chat(file) for file in files])] == [
        pytest.approx(norm, rel=1e-4) for norm in found
    ]
    until(lambda: pair.exported("Encoder").get(names[0], 0) == failures + 1, "the failure in the metrics")
    until(lambda: pair.exported("Encoder").get(names[1], 0) >= errors + 1, "its error in the metrics")
