"""Spans without Serve: what is made of a stage, of a client's headers, and nothing at all where nobody traces."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
from opentelemetry import context, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from deployments.telemetry import tracing
from deployments.telemetry.tracing import Stage

TRACE, PARENT = "ab" * 16, "cd" * 8
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
HEADERS = [(b"content-type", b"application/json"), (b"TraceParent", b"a client's"), (b"tracestate", b"a client's")]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What is exported; the provider is this test's own, since a process may have but one."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "is_tracing_enabled", lambda: True)


def within(headers: dict[str, str]) -> context.Context:
    return TraceContextTextMapPropagator().extract(headers)


def test_a_stage_is_a_span_of_its_time(spans: InMemorySpanExporter) -> None:
    tracing.record_span(
        Stage.ENCODE, 0.25, ended_s=1000.5, parent=within(SAMPLED), attributes={"vitray.visual_tokens": 7}
    )
    (span,) = spans.get_finished_spans()
    assert (span.name, dict(span.attributes or {})) == ("vitray.encode", {"vitray.visual_tokens": 7})
    assert (span.start_time, span.end_time) == (1_000_250_000_000, 1_000_500_000_000)
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)


def test_a_stage_ends_now_and_never_before_it_began(spans: InMemorySpanExporter) -> None:
    """Clocks of two hosts may make a time negative."""
    before = time.time_ns()
    tracing.record_span(Stage.TRANSFER, -0.5, parent=within(SAMPLED))
    (span,) = spans.get_finished_spans()
    assert span.start_time == span.end_time
    assert before <= (span.end_time or 0) <= time.time_ns()


def test_who_is_not_sampled_is_not_exported(spans: InMemorySpanExporter) -> None:
    tracing.record_span(Stage.FETCH, 0.1, parent=within({"traceparent": f"00-{TRACE}-{PARENT}-00"}))
    assert spans.get_finished_spans() == ()


def test_nothing_is_made_or_imported_where_nobody_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.setitem(sys.modules, name, None)  # an import of it would raise
    tracing.record_span(Stage.FETCH, 0.1)
    assert tracing.inject_trace(HEADERS) == HEADERS
    with tracing.continue_trace(SAMPLED):
        assert tracing.current_context() is None


def test_a_clients_trace_is_continued(on: None, spans: InMemorySpanExporter) -> None:
    with tracing.continue_trace(SAMPLED):
        tracing.record_span(Stage.FETCH, 0.1)
        passed = dict(tracing.inject_trace(HEADERS))
    assert tracing.current_context() is None
    (span,) = spans.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == TRACE
    ours = {name.encode(): value.encode() for name, value in SAMPLED.items()}
    assert passed == {b"content-type": b"application/json", **ours}


def test_what_serve_has_taken_up_stays(on: None) -> None:
    """Serve's proxy has made a span of its own in the client's trace; that is the parent."""
    serves = within({"traceparent": f"00-{TRACE}-{'ef' * 8}-01"})
    token = context.attach(serves)
    try:
        with tracing.continue_trace(SAMPLED):
            assert trace.get_current_span().get_span_context().span_id == int("ef" * 8, 16)
    finally:
        context.detach(token)


@pytest.mark.parametrize("headers", [{}, {"traceparent": "nonsense"}, {"traceparent": f"00-{'0' * 32}-{PARENT}-01"}])
def test_what_names_no_trace_changes_nothing(on: None, headers: dict[str, str]) -> None:
    with tracing.continue_trace(headers):
        assert tracing.current_context() is None


@pytest.mark.parametrize(
    ("protocol", "module"),
    [(None, ".proto.grpc."), ("grpc", ".proto.grpc."), ("http/protobuf", ".proto.http.")],
)
def test_the_exporter_speaks_the_protocol_asked_for(
    monkeypatch: pytest.MonkeyPatch, protocol: str | None, module: str
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", raising=False)
    if protocol is not None:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    (processor,) = tracing.otlp()
    try:
        assert module in type(processor.span_exporter).__module__  # type: ignore[attr-defined]
    finally:
        processor.shutdown()


def test_another_protocol_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(ValueError, match="'http/json'; it must be grpc or http/protobuf"):
        tracing.otlp()


def test_documented_spans_are_those_that_are_made() -> None:
    page = (Path(__file__).parents[4] / "docs" / "traces.md").read_text()
    assert re.findall(r"^\| `(vitray\.\w+)`", page, re.MULTILINE) == [one.value for one in Stage]
    for variable in (tracing.EXPORTER_VARIABLE, tracing.RATIO_VARIABLE):
        assert f"export {variable}=" in page
    assert f"{tracing.EXPORTER_VARIABLE}={tracing.IMPORT_PATH}" in page
