"""Ingresses, encoders and language models on several hosts, in virtual time: where images are encoded, how long they
wait, and what is sent between hosts.

The decisions are the application's: choice and load bound (`routing.affinity`, `routing.choices`), probes of pending
prefill (`routing.prefill_load`), admission, coalescing and directory of the ingress, and what `host_nodes.py` uses of
the encoder. `_Ingress` follows the order of `deployments/ingress/attempt.py`: admission, choice of a language model,
encodings near it, its call.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from benchmarks.simulation import virtual_time
from benchmarks.simulation.affinity_replay import BYTES_PER_TOKEN, Image
from benchmarks.simulation.conversations import Turn
from benchmarks.simulation.host_nodes import EncoderNode, LanguageModelNode, Link, Prompt, Source, Speeds
from benchmarks.simulation.virtual_time import now_s
from configs.schema import IngressConfig
from deployments.common.api_error import OverloadedError, Shed
from deployments.common.messages import EncodeTimings, SharedEmbedding
from deployments.ingress.admission import Admission
from deployments.ingress.coalescing import SharedCalls
from deployments.ingress.embedding_directory import EmbeddingDirectory
from deployments.routing.affinity import Affinity, Call
from deployments.routing.choices import Choices
from deployments.routing.prefill_load import EARLIER_IMAGE_COST, choose_probed, rank_by_pending_prefill
from deployments.telemetry.metrics import AdmissionMetrics

_TIMINGS = EncodeTimings(0.0, 0.0, 0.0, 0.0, cached=True)
_WIDTH = BYTES_PER_TOKEN // 2
SHARED = "shared"
"""Host of an oracle's replicas: every host is near."""
PROBE_MIN_TOKENS = 2048
"""As `LLMConfig.load_probe_min_tokens`."""


@dataclass(frozen=True)
class Layout:
    """Replicas on each host."""

    encoders: tuple[int, ...]
    models: tuple[int, ...]
    ingresses: int

    @classmethod
    def even(cls, hosts: int, encoders: int, models: int, ingresses: int) -> Layout:
        """Spreads the replicas evenly; the first hosts have one more encoder, the last ones one more model."""
        return cls(_spread(encoders, hosts), _spread(models, hosts)[::-1], ingresses)


def _spread(number: int, hosts: int) -> tuple[int, ...]:
    return tuple(number // hosts + (host < number % hosts) for host in range(hosts))


class Placement(Enum):
    """How replicas are chosen."""

    NEAR = "near"
    """By the application's rule."""
    ANYWHERE = "anywhere"
    """By the application's rule, but an encoder on any host, before a language model is considered."""
    RANDOM = "random"
    """Any language model, any encoder of its host."""
    ROUND_ROBIN = "round robin"
    """The next language model of the ingress, the next encoder of its host."""
    ORACLE = "oracle"
    """One queue and one cache for all encoders, one queue for all language models; nothing is sent between hosts."""
    ENCODER_ORACLE = "encoder oracle"
    """As the oracle, but language models are chosen by the application's rule."""


@dataclass(frozen=True)
class Rule:
    """A policy under test."""

    placement: Placement = Placement.NEAR
    max_backlog_s: float | None = None
    """An encoder with more work before an image refuses it; None: never."""
    load_factor: float = 1.25
    earlier_image_cost: int = EARLIER_IMAGE_COST
    """As the constant."""
    directory_entries: int = 65_536


@dataclass
class Outcome:
    """Counts of images unless stated otherwise, of the turns that arrive in the measured time."""

    images: dict[Source, int] = field(default_factory=lambda: dict.fromkeys(Source, 0))
    encoder_calls: int = 0
    refusals: int = 0
    spills: int = 0
    """Calls that the ingress's bound kept from the best encoder of their image."""
    stale: int = 0
    """Locations in an ingress's directory that held nothing."""
    later_turns: int = 0
    moved_turns: int = 0
    """Turns of a conversation whose turn before was answered on another host."""
    shed: int = 0
    """Requests that admission refused."""
    bytes_on_host: int = 0
    bytes_between: int = 0
    """Bytes of embeddings by whether encoder and language model are on one host."""
    waits_s: list[float] = field(default_factory=list)
    """For each encoding, the time from the first call until a device had the image, without decoding and one call."""
    ttfts_s: list[float] = field(default_factory=list)
    """Time to first token of each request."""
    ready_s: list[float] = field(default_factory=list)
    """Time until all embeddings of a request were at its language model."""
    encoder_utilization: float = 0.0
    model_utilization: float = 0.0
    busiest_over_mean: float = 0.0
    """Busy time of the busiest encoder over the mean."""
    last_s: float = 0.0
    """When the last measured prompt was prefilled."""

    @property
    def hit_rate(self) -> float:
        return 1 - self.images[Source.ENCODED] / max(sum(self.images.values()), 1)


class HostFleet:
    """One run: `HostFleet(layout, rule, ...).run(turns)`."""

    def __init__(
        self,
        layout: Layout,
        rule: Rule,
        speeds: Speeds,
        *,
        cache_bytes: int,
        prefix_tokens: int = 0,
        measure_from_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        """`cache_bytes`: of each encoder. `prefix_tokens`: prefix cache of each language model."""
        self._layout, self.rule, self.speeds = layout, rule, speeds
        self._cache_bytes, self._prefix_tokens = cache_bytes, prefix_tokens
        self._measure_from_s, self._seed = measure_from_s, seed

    def run(self, turns: Sequence[Turn]) -> Outcome:
        """Plays the turns until each has its first token."""
        return virtual_time.run(self._run(turns))

    async def _run(self, turns: Sequence[Turn]) -> Outcome:
        self.found = Outcome()
        self.chance = random.Random(self._seed)
        self.answered_on: dict[str, str] = {}
        self._make_nodes()
        self._ingresses = [_Ingress(self) for _ in range(self._layout.ingresses)]
        busy = asyncio.create_task(self._measure_utilization(turns[-1].at_s))
        async with asyncio.TaskGroup() as serving:
            for turn in turns:
                await asyncio.sleep(turn.at_s - now_s())
                measured = turn.at_s >= self._measure_from_s
                serving.create_task(self.chance.choice(self._ingresses).serve(turn, measured=measured))
        await busy
        return self.found

    def _make_nodes(self) -> None:
        layout, speeds = self._layout, self.speeds
        shares_encoders = self.rule.placement in (Placement.ORACLE, Placement.ENCODER_ORACLE)
        num_encoders, num_models = sum(layout.encoders), sum(layout.models)
        if shares_encoders:
            size = self._cache_bytes * num_encoders
            encoders = [EncoderNode("encoder", SHARED, size, speeds, devices=num_encoders)]
        else:
            encoders = [
                EncoderNode(f"encoder {host} {number}", f"host {host}", self._cache_bytes, speeds)
                for host, count in enumerate(layout.encoders)
                for number in range(count)
            ]
        if self.rule.placement is Placement.ORACLE:
            models = [LanguageModelNode("model", SHARED, self._prefix_tokens * num_models, speeds, devices=num_models)]
        else:
            models = [
                LanguageModelNode(f"model {host} {number}", f"host {host}", self._prefix_tokens, speeds)
                for host, count in enumerate(layout.models)
                for number in range(count)
            ]
        self.num_encoders, self.num_models = num_encoders, num_models
        self.encoders = {node.name: node for node in encoders}
        self.models = {node.name: node for node in models}
        nodes: list[EncoderNode | LanguageModelNode] = [*encoders, *models]
        hosts = {node.host for node in nodes}
        self._links = {host: (Link(speeds.link_bytes_per_s), Link(speeds.link_bytes_per_s)) for host in hosts}

    async def transfer(self, image: Image, source: str, target: str, *, measured: bool) -> None:
        """Waits until an embedding has been read on `target`."""
        if source in (target, SHARED):
            self.found.bytes_on_host += image.num_bytes * measured
            await asyncio.sleep(self.speeds.shared_memory_s)
            return
        self.found.bytes_between += image.num_bytes * measured
        sent_s, received_s = self._links[source][0].add(image.num_bytes), self._links[target][1].add(image.num_bytes)
        await asyncio.sleep(max(sent_s, received_s) + self.speeds.connect_s - now_s())

    async def _measure_utilization(self, until_s: float) -> None:
        """Measures from the measured turns' first arrival until the last turn's."""
        await asyncio.sleep(self._measure_from_s)
        nodes: list[EncoderNode | LanguageModelNode] = [*self.encoders.values(), *self.models.values()]
        before = {node: node.busy_s for node in nodes}
        await asyncio.sleep(until_s - now_s())
        span_s = until_s - self._measure_from_s
        busy = [node.busy_s - before[node] for node in self.encoders.values()]
        self.found.encoder_utilization = sum(busy) / span_s / self.num_encoders
        self.found.busiest_over_mean = max(busy) * len(busy) / (sum(busy) or 1.0)
        models = sum(node.busy_s - before[node] for node in self.models.values())
        self.found.model_utilization = models / span_s / self.num_models


class _ShedCount(AdmissionMetrics):
    """Counts the requests that an ingress's admission refuses."""

    def __init__(self, found: Outcome) -> None:
        self._found = found

    def levels(self, *, requests: int, tokens_waiting: int, tokens_in_flight: int) -> None: ...

    def admitted(self, tokens: int) -> None: ...

    def shed(self, reason: Shed, tokens: int) -> None:
        self._found.shed += 1


class _Ingress:
    def __init__(self, fleet: HostFleet) -> None:
        rule = fleet.rule
        self._fleet, self._found, self._speeds = fleet, fleet.found, fleet.speeds
        self.encoders = Affinity(load_factor=rule.load_factor, separate_cache_hits=True)
        self.encoders.set_replicas(fleet.encoders, hosts={name: node.host for name, node in fleet.encoders.items()})
        self._models = Affinity(load_factor=1.25)
        self._models.set_replicas(fleet.models, hosts={name: node.host for name, node in fleet.models.items()})
        self._choices = Choices(self._models, clock=now_s)
        self._admission = Admission(IngressConfig(), _ShedCount(fleet.found), clock=now_s)
        self._directory = EmbeddingDirectory(rule.directory_entries, clock=now_s)
        self._calls: SharedCalls[asyncio.Task[str]] = SharedCalls()
        self._requests = itertools.count()
        self._next_model = itertools.cycle(fleet.chance.sample(list(fleet.models), len(fleet.models)))
        self._next_encoder = itertools.count(fleet.chance.randrange(1000))
        hosts = {node.host for node in fleet.models.values()} | {node.host for node in fleet.encoders.values()}
        self._by_host = {host: [node.name for node in fleet.encoders.values() if node.host == host] for host in hosts}

    async def serve(self, turn: Turn, *, measured: bool) -> None:
        """Serves a turn until its first token; its answer goes on as load of the language model."""
        arrived_s, request = now_s(), str(next(self._requests))
        try:
            visit = self._admission.arrive()
            new = turn.images[turn.num_earlier :]
            visit.request(sum(image.num_tokens for image in new), len(new))
        except OverloadedError:
            return
        await visit.wait_until_admitted()
        earlier_tokens = sum(image.num_tokens for image in turn.images[: turn.num_earlier])
        leaving_cost = self._fleet.rule.earlier_image_cost * earlier_tokens
        call = await self._choose(Call(turn.conversation, cost=turn.prompt_tokens, leaving_cost=leaving_cost), request)
        model = self._fleet.models[call.replica]
        num_tokens, num_images = model.prefixes.get(turn.conversation) or (0, 0)
        images = turn.images[num_images:]
        self._found.images[Source.PREFIX] += num_images * measured
        tokens = [image.num_tokens for image in images]
        text_tokens = max(turn.prompt_tokens - num_tokens - sum(tokens), 1)
        before = self._fleet.answered_on.get(turn.conversation)
        self._fleet.answered_on[turn.conversation] = model.host
        self._found.later_turns += measured and before is not None
        self._found.moved_turns += measured and before not in (None, model.host)
        self._choices.end(request)
        active = self._models.begin(model.name, call, bounded=False)
        assert active is not None
        with model.load.track(call) as tracked:
            prompt = model.add([*tokens, text_tokens], [*(False for _ in images), True])
            tokens_before = itertools.accumulate(tokens, initial=0)
            await asyncio.gather(
                *(
                    self._get(image, number, count, model, prompt, measured)
                    for number, (image, count) in enumerate(zip(images, tokens_before, strict=False))
                )
            )
            visit.accept()
            ready_s = now_s()
            await prompt.done
            model.load.finish_prefill(tracked)
            model.prefixes.put(turn.conversation, (turn.prompt_tokens, len(turn.images)), turn.prompt_tokens)
            if measured:
                self._found.ready_s.append(ready_s - arrived_s)
                self._found.ttfts_s.append(now_s() - arrived_s)
                self._found.last_s = now_s()
            await asyncio.sleep(turn.output_tokens * self._speeds.output_token_s)
        self._models.end(active)

    async def _choose(self, call: Call, request: str) -> Call:
        """Returns the call with its language model, whose load it counts as from now on."""
        placement, models = self._fleet.rule.placement, self._fleet.models
        if placement is Placement.RANDOM:
            name = self._fleet.chance.choice(list(models))
        elif placement is Placement.ROUND_ROBIN:
            name = next(self._next_model)
        else:
            self._choices.expire(request)
            if call.cost >= PROBE_MIN_TOKENS and len(models) > 1:
                probed = choose_probed(self._models.rank(call), {name: node.host for name, node in models.items()})
                await asyncio.sleep(self._speeds.call_s)
                stats = {name: models[name].load.routing_stats() for name in probed}
                name = rank_by_pending_prefill(call, stats, probed)[0]
            else:
                name = self._models.candidates(call)[0]
            self._choices.begin(request, name, call)
        return dataclasses.replace(call, replica=name, host=models[name].host)

    async def _get(
        self, image: Image, number: int, tokens_before: int, model: LanguageModelNode, prompt: Prompt, measured: bool
    ) -> None:
        """Gets an embedding to the language model."""
        location = self._directory.get(model.host, image.digest)
        if location is not None and self._fleet.encoders[location.timings.replica].cache.get(image.digest):
            self._found.images[Source.DIRECTORY] += measured
            await self._fleet.transfer(image, model.host, model.host, measured=measured)
            model.set_ready(prompt, number)
            return
        if location is not None:
            self._directory.discard(location)
            self._found.stale += measured
            await asyncio.sleep(2 * self._speeds.call_s)  # the language model asks the ingress for it
        key = f"{image.digest} {model.host}"
        call, shared = self._calls.acquire(
            key, lambda: asyncio.create_task(self._call_encoder(image, tokens_before, model.host, measured))
        )
        self._found.images[Source.JOINED] += shared and measured
        name = await call.response
        self._calls.release(call, share=False)
        encoder = self._fleet.encoders[name]
        await self._fleet.transfer(image, encoder.host, model.host, measured=measured)
        if encoder.host in (model.host, SHARED):
            timings = dataclasses.replace(_TIMINGS, replica=name)
            shape = image.num_tokens, _WIDTH
            self._directory.put(SharedEmbedding(image.digest, "bfloat16", shape, timings, f"{model.host}/{name}"))
        model.set_ready(prompt, number)

    async def _call_encoder(self, image: Image, tokens_before: int, host: str, measured: bool) -> str:
        """Returns the encoder that has the embedding."""
        rule, found, started_s = self._fleet.rule, self._found, now_s()
        near = "" if rule.placement is Placement.ANYWHERE else host
        call = Call(image.digest, image.num_tokens, cost=tokens_before + image.num_tokens, host=near)
        best = self.encoders.rank(call)[0] if measured else ""
        while True:
            name = self._choose_encoder(call, host)
            active = self.encoders.begin(name, call, bounded=False)
            assert active is not None
            found.encoder_calls += measured
            await asyncio.sleep(self._speeds.call_s)
            encoder = self._fleet.encoders[name]
            sent = dataclasses.replace(call, refusable=self.encoders.is_refusable(call))
            if rule.max_backlog_s is None or not encoder.is_too_busy(sent, rule.max_backlog_s):
                break
            self.encoders.end(active)
            found.refusals += measured
            call = dataclasses.replace(call, refused_by=(*call.refused_by, name))
        source, began_s = await encoder.encode(image, tokens_before)
        self.encoders.end(active)
        if measured:
            found.images[source] += 1
            found.spills += name != best
            if source is Source.ENCODED:
                found.waits_s.append(began_s - started_s - self._speeds.call_s - self._speeds.decode_s)
        return name

    def _choose_encoder(self, call: Call, host: str) -> str:
        placement = self._fleet.rule.placement
        if placement is Placement.RANDOM:
            return self._fleet.chance.choice(self._by_host[host])
        if placement is Placement.ROUND_ROBIN:
            names = self._by_host[host]
            return names[next(self._next_encoder) % len(names)]
        return self.encoders.candidates(call)[0]
