"""What the application counts, for Ray's metrics port: one table of definitions, in Prometheus as `ray_<name>`.

Serve adds the tags `deployment`, `replica` and `application` inside a replica. Only this file knows Ray's metrics. It
must not know when anything is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from ray.serve import metrics

from deployments.admission import Shed
from encoder.run_counts import RunCounts


class Count(Enum):
    """What only grows. The value says what it means."""

    IMAGES_ENCODED = "Images that the vision tower has encoded."
    IMAGES_ENCODED_LOCALLY = "Images that a language model replica encoded by itself, since no encoder was there."
    IMAGES_REFUSED = "Images that could not be decoded, or that the encoder refused."
    CACHE_HITS = "Images whose embedding was in a cache; the tag `tier` says which."
    CACHE_MISSES = "Images whose embedding was in no cache; those that joined an encoding under way are among them."
    GRAPH_REPLAYS = "Batches that replayed a CUDA graph."
    EAGER_RUNS = "Batches that ran without a graph; the tag `reason` says why."
    GRAPH_CAPTURES = "CUDA graphs that were captured."
    GRAPH_REFUSALS = "CUDA graphs that could not be captured, or that did not equal the eager run, and are not used."
    ENCODED_TOKENS = "Visual tokens that the vision tower has encoded, padding apart."
    REPLAYED_TOKENS = "Those of them that a graph was replayed for."
    PADDING_TOKENS = "Tokens of padding in replays."
    GRID_HITS = "Images of a size whose positions were known on the GPU."
    GRID_MISSES = "Images of a size whose positions had to be computed."
    PIXELS_PIPED = "Images that came from their decoder through a pipe, for want of room in shared memory."
    BATCHES_RETRIED = "Batches that failed and were tried again image by image."
    DEVICES_SICK = "GPUs that failed for good, whose replicas ask to be replaced; the tag `reason` says why."
    QUEUE_FULL = "Images refused because too many visual tokens waited already."
    ADMITTED_TOKENS = "Visual tokens of the requests whose turn at the ingress has come."
    SHED_TOKENS = "Visual tokens of the requests that were dropped at the ingress; the tag `reason` says why."
    SHED_REQUESTS = "Requests that were refused or dropped before they were worked on; the tag `reason` says why."
    CALLS_SPILLED = (
        "Calls that went elsewhere than to where their image or conversation is, or belongs, because that replica had "
        "too much to do; the tag `reason` says which deployment."
    )
    CALLS_UNTOLD = (
        "Replicas that did not tell in time what they have to do, before a long prompt was sent; the tag `reason` says "
        "of which deployment."
    )
    ENCODINGS_SHARED = "Images for which an ingress had a call to an encoder under way already."
    WHEREABOUTS_KNOWN = (
        "Images for which an ingress asked no encoder, since it knew where the embedding lies, or that vLLM had "
        "answered this conversation before."
    )
    WHEREABOUTS_OUTDATED = (
        "Requests whose encoders were asked after all: an embedding had gone from where it was, and vLLM needed it."
    )
    CALLS_BY_GRPC = "Requests that went to a language model by gRPC; the others went by Ray, which carries references."
    HEDGES = "Images that were sent to a second encoder because the first was slow."
    HEDGES_WON = "Those of them that the second encoder had ready first."
    TRIES_AGAIN = "Requests that were tried again because a replica was lost while it worked on them."
    REPLICAS_LOST = "Losses of a replica while it worked on a request."
    EMBEDDINGS_UNSHARED = (
        "Embeddings that could not be lent: no room in the encoder's shared memory, or NIXL is not installed there."
    )
    EMBEDDINGS_ARRIVED = (
        "Embeddings that came to a language model; the tag `reason` says how: engine_loads (a copy off the encoder's "
        "device and a copy onto the engine's), in_request (vLLM copies it between its processes as well), object_store "
        "(Ray copies it too), nixl (read from another host's memory, with no copy on either host beyond those two), "
        "local (the replica encoded it by itself)."
    )
    EMBEDDING_BYTES_ARRIVED = "Their bytes, those included that the engine had already; the tag `reason` says how."
    EMBEDDINGS_LOADED = "Embeddings that an engine's worker copied from shared memory to its device."
    EMBEDDING_BYTES_LOADED = "Their bytes."
    LOAD_MS = "Milliseconds from an embedding's being ready to its being on the worker's device, added up."
    EMBEDDINGS_SPARED = (
        "Embeddings that were neither encoded nor brought to a language model, since vLLM had the prompt up to their "
        "image's end in its prefix cache."
    )
    PROMPTS_BEGUN = "Requests that vLLM was given while embeddings of theirs were on their way."
    PROMPTS_BEGUN_IN_VAIN = (
        "Those of them that vLLM was given again when all had come; the tag `reason` says why: refused (an image was), "
        "unlike (an embedding was not what its file's header had said), not_loaded (not all could be loaded by the "
        "engine), unsent (one had gone from where it was)."
    )
    TRANSFERS_FAILED = (
        "Requests that were tried again because an embedding could not be had from shared memory or by NIXL."
    )
    REMOTE_WAYS_CHOSEN = (
        "Choices of how embeddings come from encoders on other hosts, whenever they change; the tag `reason` says what "
        "was chosen and why."
    )

    @property
    def metric(self) -> str:
        """The metric's name, to which Ray adds `ray_` in front and `_total` at the end."""
        return f"vitray_{self.name.lower()}"


WITH_REASON = (
    Count.EAGER_RUNS,
    Count.DEVICES_SICK,
    Count.CALLS_SPILLED,
    Count.CALLS_UNTOLD,
    Count.SHED_TOKENS,
    Count.SHED_REQUESTS,
    Count.EMBEDDINGS_ARRIVED,
    Count.EMBEDDING_BYTES_ARRIVED,
    Count.REMOTE_WAYS_CHOSEN,
    Count.PROMPTS_BEGUN_IN_VAIN,
)
WITH_TIER = (Count.CACHE_HITS,)


class Tier(Enum):
    """Where an embedding was found; the metrics' tag `tier`."""

    REPLICA = "replica"
    HOST = "host"
    """A language model of the same host read it from the encoder's memory, and no encoder was asked."""


class Level(Enum):
    """What goes up and down. The value says what it means."""

    QUEUED_TOKENS = "Visual tokens that wait for the GPU or are being encoded."
    WAITING_REQUESTS = "Requests at the ingress that no language model has accepted yet."
    WAITING_TOKENS = "Visual tokens of the requests at the ingress whose turn has not come."
    IN_FLIGHT_TOKENS = "Visual tokens whose turn has come and whose embeddings no language model has yet."

    @property
    def metric(self) -> str:
        return f"vitray_{self.name.lower()}"


class Distribution(Enum):
    """What takes now this long, now that. The value says what it means; all are in milliseconds."""

    FETCH_MS = "Reading, fetching and measuring a request's images, at the ingress."
    ADMISSION_MS = "A request's wait for its turn at the ingress, once its images are known."
    PREPROCESS_MS = "Decoding an image, and resizing it where the GPU does not; its wait for a decoder is part of it."
    QUEUE_MS = "An image's wait for the GPU."
    ENCODE_MS = "The vision tower's batch that an image was in, to the embedding in host memory."
    TRANSFER_MS = (
        "From a request's last embedding's being ready to its arrival at the language model; clocks of different hosts "
        "must agree."
    )
    FIRST_TOKEN_MS = "From the arrival at the language model to vLLM's first token."
    TTFT_MS = "From a request's arrival at the ingress to the first piece of its answer, where that is streamed."

    @property
    def metric(self) -> str:
        """The metric's name, to which Ray adds `ray_` in front, and `_bucket`, `_sum` and `_count` at the end."""
        return f"vitray_{self.name.lower()}"


BOUNDS_MS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 6e4)
"""Upper bounds of every distribution's buckets."""


def tag_of(count: Count) -> str | None:
    """What a counter is told apart by, beside Serve's own tags."""
    return "reason" if count in WITH_REASON else "tier" if count in WITH_TIER else None


class Counts:
    """The counters of one replica. Make it in the replica, where its tags come from; any thread may add."""

    def __init__(self) -> None:
        self._counters = {
            count: metrics.Counter(
                count.metric, description=count.value, tag_keys=(tag,) if (tag := tag_of(count)) else None
            )
            for count in Count
        }

    def add(self, count: Count, number: int = 1, *, reason: str | None = None, tier: Tier | None = None) -> None:
        """`reason` is for those in WITH_REASON, `tier` for those in WITH_TIER, which need one."""
        if reason is not None:
            self._counters[count].inc(number, {"reason": reason})
        elif tier is not None:
            self._counters[count].inc(number, {"tier": tier.value})
        else:
            self._counters[count].inc(number)


class Distributions:
    """The distributions of one replica. Make it in the replica; any thread may add."""

    def __init__(self) -> None:
        self._histograms = {
            one: metrics.Histogram(one.metric, description=one.value, boundaries=list(BOUNDS_MS))
            for one in Distribution
        }

    def add(self, distribution: Distribution, ms: float) -> None:
        """`ms` under 0, from the clocks of two hosts, counts as 0."""
        self._histograms[distribution].observe(max(ms, 0.0))


class RunMetrics:
    """Adds to the counters what an encoder has counted since the last call. For one thread."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self.told = RunCounts()
        """What was counted by the last call."""

    def __call__(self, now: RunCounts) -> None:
        before, self.told = self.told, now
        for count, new, old in (
            (Count.GRAPH_REPLAYS, now.replays, before.replays),
            (Count.GRAPH_CAPTURES, now.captures, before.captures),
            (Count.GRAPH_REFUSALS, now.refusals, before.refusals),
            (Count.ENCODED_TOKENS, now.tokens, before.tokens),
            (Count.REPLAYED_TOKENS, now.replayed_tokens, before.replayed_tokens),
            (Count.PADDING_TOKENS, now.padding_tokens, before.padding_tokens),
            (Count.GRID_HITS, now.grid_hits, before.grid_hits),
            (Count.GRID_MISSES, now.grid_misses, before.grid_misses),
        ):
            if new > old:
                self._counts.add(count, new - old)
        for reason, new in now.eager_runs.items():
            if new > before.eager_runs.get(reason, 0):
                self._counts.add(Count.EAGER_RUNS, new - before.eager_runs.get(reason, 0), reason=reason)


class AdmissionMetrics:
    """Counts what is admitted and what is not. Make it in the replica."""

    def __init__(self) -> None:
        self._counts = Counts()
        self._requests, self._waiting, self._in_flight = map(
            gauge, (Level.WAITING_REQUESTS, Level.WAITING_TOKENS, Level.IN_FLIGHT_TOKENS)
        )

    def levels(self, *, requests: int, tokens_waiting: int, tokens_in_flight: int) -> None:
        self._requests(requests)
        self._waiting(tokens_waiting)
        self._in_flight(tokens_in_flight)

    def admitted(self, tokens: int) -> None:
        if tokens:  # text that comes back after its replica was lost has none
            self._counts.add(Count.ADMITTED_TOKENS, tokens)

    def shed(self, reason: Shed, tokens: int) -> None:
        """`tokens`: 0 where they were not counted yet."""
        self._counts.add(Count.SHED_REQUESTS, reason=reason.value)
        if tokens:
            self._counts.add(Count.SHED_TOKENS, tokens, reason=reason.value)


def gauge(level: Level) -> Callable[[int], None]:
    """A function that sets the level, from any thread. Make it in the replica."""
    made = metrics.Gauge(level.metric, description=level.value)

    def put(value: int) -> None:
        made.set(value)

    return put
