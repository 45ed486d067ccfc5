"""Spans for the stages of a request, if Ray Serve's tracing is on; otherwise each call here only reads a variable.

Serve propagates the trace between processes and creates its own spans, which are the parents of ours. Our spans are
created when a stage has ended and its times are known. No other file uses OpenTelemetry.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, cast

from ray import serve

from deployments.common.messages import EncodeTimings
from deployments.common.ray_private import is_tracing_enabled

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor

EXPORTER_VARIABLE, RATIO_VARIABLE = "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH", "RAY_SERVE_TRACING_SAMPLING_RATIO"
"""Environment variables of Serve, to be set on every node."""
IMPORT_PATH = "deployments.telemetry.tracing:otlp"
HEADERS = ("traceparent", "tracestate")
"""Headers of W3C Trace Context."""


class Stage(Enum):
    """Names of the spans."""

    FETCH = "vitray.fetch"
    ADMISSION = "vitray.admission"
    DECODE_IMAGE = "vitray.decode_image"
    ENCODE_QUEUE = "vitray.encode_queue"
    ENCODE = "vitray.encode"
    CACHED = "vitray.encode_cached"
    SHARED = "vitray.encode_shared"
    TRANSFER = "vitray.transfer"
    FIRST_TOKEN = "vitray.first_token"
    GENERATE = "vitray.generate"


def otlp() -> list[SpanProcessor]:
    """Returns span processors for Serve's `exporter_import_path`, configured by OpenTelemetry's environment variables.

    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is the collector; OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is `grpc`, the default, or
    `http/protobuf`. vLLM reads the same variables.

    Raises:
        ImportError: the exporter is not installed (`pip install 'vitray[otel]'`).
        ValueError: the protocol is another one.
    """
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    if protocol not in ("grpc", "http/protobuf"):
        raise ValueError(f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is {protocol!r}; it must be grpc or http/protobuf")
    exporter = import_module(f"opentelemetry.exporter.otlp.proto.{protocol.partition('/')[0]}.trace_exporter")
    return [BatchSpanProcessor(exporter.OTLPSpanExporter())]


def current_context() -> Context | None:
    """Returns the current trace context, or None."""
    return cast("Context | None", serve.get_trace_context())


def record_span(
    stage: Stage,
    duration_s: float,
    *,
    ended_s: float | None = None,
    parent: Context | None = None,
    attributes: Mapping[str, int | str | bool] | None = None,
) -> None:
    """Records a span of `duration_s` seconds that ended now or at `ended_s` (seconds since the epoch).

    `parent`: context of the parent span; None takes the current one.
    """
    context = parent if parent is not None else current_context()
    if context is None:
        return
    from opentelemetry import trace

    end_ns = time.time_ns() if ended_s is None else int(ended_s * 1e9)
    start_ns = end_ns - int(max(duration_s, 0.0) * 1e9)
    span = trace.get_tracer("vitray").start_span(stage.value, context, attributes=attributes, start_time=start_ns)
    span.end(end_ns)


def record_encode_spans(timings: EncodeTimings, num_tokens: int) -> None:
    """Records a span for each stage of an encoding, back to back, ending when the embedding was ready."""
    ended_s = timings.ready_at_s
    for stage, ms in (
        (Stage.ENCODE, timings.encode_ms),
        (Stage.ENCODE_QUEUE, timings.queue_ms),
        (Stage.DECODE_IMAGE, timings.preprocess_ms),
    ):
        record_span(stage, ms / 1e3, ended_s=ended_s, attributes={"vitray.visual_tokens": num_tokens})
        ended_s -= ms / 1e3


@contextmanager
def continue_trace(headers: Mapping[str, str]) -> Iterator[None]:
    """Continues the trace that a client's headers name, if Serve has not continued it already.

    Serve's proxy does so if the variables above are set; Serve's `tracing_config` does not apply to proxies.
    """
    if not is_tracing_enabled():
        yield
        return
    from opentelemetry import context, trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    client_context = TraceContextTextMapPropagator().extract(
        {name: headers[name] for name in HEADERS if name in headers}
    )
    client_span = trace.get_current_span(client_context).get_span_context()
    if not client_span.is_valid or client_span.trace_id == trace.get_current_span().get_span_context().trace_id:
        yield
        return
    token = context.attach(client_context)
    try:
        yield
    finally:
        context.detach(token)


def inject_trace(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Returns the headers with the current trace in place of the client's, or unchanged if there is no trace."""
    context = current_context()
    if context is None:
        return list(headers)
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    trace_headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(trace_headers, context)
    if not trace_headers:
        return list(headers)
    kept = [(name, value) for name, value in headers if name.decode("latin-1").lower() not in HEADERS]
    return [*kept, *((name.encode(), value.encode()) for name, value in trace_headers.items())]
