"""Metrics of the application: one table of definitions, exported by Ray's metrics agent as `ray_<name>`.

Inside a replica, Serve adds the labels `application`, `deployment` and `replica`. No other file uses Ray's metrics.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from ray.serve import metrics

from deployments.common.api_error import Shed
from deployments.telemetry.log_buffers import SERVE_LOGGER
from encoder.packing.run_counts import RunCounts

_DEPLOYMENTS = str(Path(__file__).parents[1])


class Definition(Enum):
    """A metric; the value is its help text."""

    @property
    def metric(self) -> str:
        """Name of the metric. Ray adds the prefix `ray_`, and `_total`, or `_bucket`, `_sum` and `_count`."""
        return f"vitray_{self.name.lower()}"


class Counter(Definition):
    """Monotonic counters."""

    IMAGES_ENCODED = "Images, sounds and videos encoded, or chunks of videos. `medium`: image, audio, video."
    IMAGES_REFUSED = (
        "Images, sounds and videos that could not be decoded, or that the encoder refused. "
        "`medium`: image, audio, video."
    )
    CACHE_HITS = "Images whose embedding was cached. `tier`: replica, host."
    CACHE_MISSES = "Images whose embedding was not cached, including images that joined an encode already in flight."
    GRAPH_REPLAYS = "Batches that replayed a CUDA graph."
    EAGER_RUNS = "Batches that ran without a CUDA graph. `reason` says why."
    GRAPH_CAPTURES = "CUDA graphs captured."
    GRAPH_CAPTURE_FAILURES = (
        "CUDA graphs that are not used because their capture failed or differed from the eager run."
    )
    FUSED_KERNEL_FALLBACKS = (
        "Encoders that run the eager tower because the fused kernels failed or differed from it. `reason` says which."
    )
    ENCODED_TOKENS = "Visual tokens encoded by the vision tower, without padding."
    GRAPH_TOKENS = "Visual tokens encoded by CUDA graph replays, without padding."
    GRAPH_PADDING_TOKENS = "Padding tokens in CUDA graph replays."
    GEOMETRY_CACHE_HITS = "Images whose positions were cached on the GPU, because an image of that size came before."
    GEOMETRY_CACHE_MISSES = "Images whose positions had to be computed, because no image of that size was cached."
    PIXEL_SHM_FALLBACKS = "Decoded images sent to the encoder through a pipe because pixel shared memory was full."
    DECODERS_LOST = "Decoder processes that ended while decoding. The file is retried once in another process."
    BATCHES_RETRIED = "Batches that failed and were retried image by image."
    GPU_FAILURES = "GPUs that failed permanently; their replicas ask to be replaced. `reason` says how the GPU failed."
    ENCODER_REJECTIONS = "Images rejected by an encoder because its queue of visual tokens was full."
    ADMITTED_TOKENS = "Visual tokens of requests that the ingress admitted."
    SHED_TOKENS = (
        "Visual tokens of requests that the ingress shed, where they were known: 0 for a rate limit. `reason` says why."
    )
    SHED_REQUESTS = "Requests that the ingress shed before a language model had accepted them. `reason` says why."
    AFFINITY_SPILLS = (
        "Calls routed away from the best replica for their image or conversation because it was overloaded. "
        "`target`: the deployment that was called."
    )
    ENCODER_REFUSALS = (
        "Images that an encoder refused because too much work was before them, and that were sent to another one."
    )
    CHOICES_NOT_CALLED = (
        "Language models chosen for a request with images but not called: no call followed within 5 s, a retry chose "
        "again, or another one was called because the chosen one was lost or full."
    )
    LOAD_PROBE_TIMEOUTS = (
        "Replicas that did not report their load in time before a long prompt was routed. "
        "`target`: the deployment that was probed."
    )
    CALL_ACCEPT_TIMEOUTS = (
        "Calls that a replica did not accept in time and that were routed to another replica. "
        "`target`: the deployment that was called."
    )
    EARLY_PREFILLS_DEFERRED = (
        "Requests that were returned to the ingress until their images were encoded, because half of the language "
        "model's slots were taken by requests that waited for encoders."
    )
    COALESCED_ENCODES = "Images that joined an encode call that their ingress replica already had in flight."
    EMBEDDING_DIRECTORY_HITS = "Images sent to no encoder, because the ingress knew where their embedding is stored."
    EMBEDDING_DIRECTORY_STALE = (
        "Images sent to an encoder after all, because the embedding, which vLLM needed, was no longer where the "
        "ingress' directory said."
    )
    GRPC_CALLS = "Requests sent to a language model by gRPC; requests over 2 MiB are sent by Ray."
    REQUEST_RETRIES = "Requests retried because a replica was lost while it worked on them."
    REPLICAS_LOST = "Replicas lost while they worked on a request, counted once for each such request."
    EMBEDDING_SHM_FALLBACKS = (
        "Embeddings read by TCP although encoder and language model may be on one host: the encoder's shared memory "
        "was full, or the language model could not open it, or its engine not map it."
    )
    EMBEDDINGS_RECEIVED = (
        "Embeddings received by a language model replica. `path`: engine_loads (shared memory, mapped by the engine's "
        "workers), and through the receive buffer: tcp, nixl."
    )
    EMBEDDING_BYTES_RECEIVED = (
        "Bytes of embeddings received by a language model replica, including embeddings that its engine already had. "
        "`path` as for embeddings received: engine_loads, tcp, nixl."
    )
    TCP_ERRORS = (
        "Transfers of embeddings by TCP and connections for them that failed, at either end. `reason`: authentication, "
        "timeout, connection (unreachable, or ended early), limit (too many connections), mismatch (another embedding)."
    )
    RDMA_FALLBACKS = "Embeddings read by TCP because their read by NIXL failed."
    RDMA_RESTARTS = (
        "Restarts of NIXL's process, of encoder and language model replicas; until then embeddings are read by TCP "
        "or from shared memory."
    )
    EMBEDDINGS_LOADED = "Embeddings that engine workers copied from shared memory to their device."
    EMBEDDING_BYTES_LOADED = "Bytes of embeddings that engine workers copied from shared memory to their device."
    DURATIONS_CLAMPED = (
        "Transfer and load durations that were negative or over 10 minutes, because the hosts' clocks differ, and were "
        "clamped to that range. `skew`: the other host's clock is ahead of the language model's, or behind it."
    )
    EMBEDDINGS_SKIPPED = (
        "Embeddings neither encoded nor transferred because vLLM's prefix cache covered the prompt up to their image's "
        "end."
    )
    EARLY_PREFILLS = "Requests submitted to vLLM before all of their embeddings had arrived."
    EARLY_PREFILLS_ABORTED = (
        "Requests that were aborted at vLLM and answered with an error. `reason`: rejected (an encoder refused an "
        "image), shape_mismatch (an embedding does not have the shape that its header states)."
    )
    EMBEDDINGS_EVICTED_UNREAD = (
        "Embeddings evicted from an encoder's shared memory before their language model asked for them; a later "
        "request for one encodes it again."
    )
    TRANSFER_FAILURES = (
        "Requests retried because an embedding could not be transferred, or was no longer where it was published."
    )
    RESPONSES_EVICTED = (
        "Responses no longer stored. `reason`: bytes (the store was full), expired, too_large (for the store), "
        "no_previous (the response that it continues was gone)."
    )
    ERRORS_LOGGED = (
        "Errors that a replica's own modules log, among them those that a listening thread survived; those of child "
        "processes and of vLLM are in the log only. `source`: the module, for instance unix_socket."
    )
    RESPONSE_STORE_FAILURES = "Calls to the response store that failed or timed out; nothing was stored, or a 503 sent."


LABELS = {counter: found[1] for counter in Counter if (found := re.search(r"`(\w+)`", counter.value))}
"""Label of each counter that has one in addition to Serve's: its help text has it in backticks."""


class Gauge(Definition):
    """Gauges."""

    ENCODER_QUEUED_TOKENS = "Visual tokens that wait for an encoder's GPU or are being encoded."
    INGRESS_WAITING_REQUESTS = "Requests at the ingress that no language model has accepted yet."
    INGRESS_QUEUED_TOKENS = "Visual tokens of requests in the ingress' admission queue."
    INGRESS_IN_FLIGHT_TOKENS = "Visual tokens of admitted requests whose embeddings no language model has received yet."
    INGRESS_HELD_BYTES = "Bytes of request bodies and image files that the ingress holds until a response begins."
    RESPONSE_STORE_BYTES = "Bytes of stored responses and the items of their conversations."


class Histogram(Definition):
    """Histograms of durations in seconds."""

    FETCH_SECONDS = "Time the ingress takes to read, fetch and measure a request's images."
    ADMISSION_SECONDS = "Time a request waits in the ingress' admission queue once the sizes of its images are known."
    PREPROCESS_SECONDS = (
        "Time to decode an image, including its wait for a decode worker, and to resize it where the GPU does not."
    )
    ENCODER_QUEUE_SECONDS = "Time an image waits for the encoder's GPU."
    ENCODE_SECONDS = "Time of the vision tower's batch that an image was in, up to the embedding in host memory."
    TRANSFER_SECONDS = (
        "Time from when a request's last embedding is ready to its arrival at the language model, off by the "
        "difference of the hosts' clocks."
    )
    EMBEDDING_LOAD_SECONDS = (
        "Time from when an embedding is ready to when an engine worker has it on its device, off by the difference of "
        "the hosts' clocks."
    )
    LLM_FIRST_TOKEN_SECONDS = "Time from a request's arrival at the language model to vLLM's first token."
    TIME_TO_FIRST_TOKEN_SECONDS = (
        "Time from a request's arrival at the ingress to the first chunk of its streamed response."
    )


BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
"""Upper bounds of every histogram's buckets."""


class Counters:
    """Counters of one replica. Must be created in the replica, which determines Serve's labels. Thread-safe.

    counts = Counters()
    counts.add(Counter.CACHE_HITS, tier="replica")
    """

    def __init__(self) -> None:
        self._counters = {
            counter: metrics.Counter(
                counter.metric, description=counter.value, tag_keys=(LABELS[counter],) if counter in LABELS else None
            )
            for counter in Counter
        }

    def add(self, counter: Counter, number: int = 1, **labels: str) -> None:
        """Adds `number`; 0 or less adds nothing. A counter in LABELS needs its label: `reason="timeout"`."""
        if number > 0:  # Ray raises ValueError otherwise
            self._counters[counter].inc(number, labels)


class ErrorLogCounter(logging.Filter):
    """Counts the errors that the application's modules log in a replica, from `install` on; lets every record pass.

    Not a handler: Serve removes those when it sets up logging again. Serve's own record of an exception that leaves a
    method is not counted: full queues are among them.
    """

    def __init__(self, counts: Counters) -> None:
        super().__init__()
        self._counts = counts

    @classmethod
    def install(cls, counts: Counters) -> None:
        """Must be called once in each replica. A second call takes the place of the first."""
        logger = logging.getLogger(SERVE_LOGGER)
        for one in [one for one in logger.filters if isinstance(one, cls)]:
            logger.removeFilter(one)
        logger.addFilter(cls(counts))

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR and record.pathname.startswith(_DEPLOYMENTS):
            with contextlib.suppress(Exception):  # who logs must not fail
                self._counts.add(Counter.ERRORS_LOGGED, source=record.module)
        return True


class Histograms:
    """Histograms of one replica. Must be created in the replica. Thread-safe."""

    def __init__(self) -> None:
        self._histograms = {
            histogram: metrics.Histogram(histogram.metric, description=histogram.value, boundaries=list(BUCKETS_S))
            for histogram in Histogram
        }

    def observe(self, histogram: Histogram, seconds: float) -> None:
        """Adds a duration. Negative ones, from a clock that was set back, count as 0."""
        self._histograms[histogram].observe(max(seconds, 0.0))


class RunMetrics:
    """Adds the increase of an encoder's run counts since the last call to the counters. For one thread."""

    def __init__(self, counts: Counters) -> None:
        self._counts = counts
        self.last = RunCounts()
        """Run counts at the last call."""

    def __call__(self, now: RunCounts) -> None:
        before, self.last = self.last, now
        for count, new, old in (
            (Counter.GRAPH_REPLAYS, now.replays, before.replays),
            (Counter.GRAPH_CAPTURES, now.captures, before.captures),
            (Counter.GRAPH_CAPTURE_FAILURES, now.refusals, before.refusals),
            (Counter.ENCODED_TOKENS, now.tokens, before.tokens),
            (Counter.GRAPH_TOKENS, now.replayed_tokens, before.replayed_tokens),
            (Counter.GRAPH_PADDING_TOKENS, now.padding_tokens, before.padding_tokens),
            (Counter.GEOMETRY_CACHE_HITS, now.grid_hits, before.grid_hits),
            (Counter.GEOMETRY_CACHE_MISSES, now.grid_misses, before.grid_misses),
        ):
            self._counts.add(count, new - old)
        if now.fusion_fallback is not None and before.fusion_fallback is None:
            self._counts.add(Counter.FUSED_KERNEL_FALLBACKS, reason=now.fusion_fallback.value)
        for reason, new in now.eager_runs.items():
            self._counts.add(Counter.EAGER_RUNS, new - before.eager_runs.get(reason, 0), reason=reason)


class AdmissionMetrics:
    """Metrics of admission. Must be created in the replica."""

    def __init__(self) -> None:
        self._counts = Counters()
        self._requests = gauge_setter(Gauge.INGRESS_WAITING_REQUESTS)
        self._waiting = gauge_setter(Gauge.INGRESS_QUEUED_TOKENS)
        self._in_flight = gauge_setter(Gauge.INGRESS_IN_FLIGHT_TOKENS)
        self.bytes_held = gauge_setter(Gauge.INGRESS_HELD_BYTES)

    def levels(self, *, requests: int, tokens_waiting: int, tokens_in_flight: int) -> None:
        self._requests(requests)
        self._waiting(tokens_waiting)
        self._in_flight(tokens_in_flight)

    def admitted(self, tokens: int) -> None:
        self._counts.add(Counter.ADMITTED_TOKENS, tokens)

    def shed(self, reason: Shed, tokens: int) -> None:
        """Counts a request that was shed. `tokens`: its visual tokens, 0 if not known yet."""
        self._counts.add(Counter.SHED_REQUESTS, reason=reason.value)
        self._counts.add(Counter.SHED_TOKENS, tokens, reason=reason.value)


def gauge_setter(gauge: Gauge) -> Callable[[int], None]:
    """Returns a thread-safe function that sets the gauge. Must be called in the replica."""
    return metrics.Gauge(gauge.metric, description=gauge.value).set
