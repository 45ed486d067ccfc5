"""A collector of OpenTelemetry's spans on this machine, over OTLP's HTTP, for tests."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from deployments.telemetry import tracing


@dataclass(frozen=True)
class Span:
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """Hex; empty where it has none."""
    start_s: float
    end_s: float
    attributes: dict[str, Any]


class SpanReceiver:
    """Listens on loopback until `close`."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver._take(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                """Silent."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    @property
    def environment(self) -> dict[str, str]:
        """For a cluster whose spans come here, where a client asks for them and else never."""
        return {
            tracing.EXPORTER_VARIABLE: tracing.IMPORT_PATH,
            tracing.RATIO_VARIABLE: "0",
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": self.endpoint,
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }

    def of(self, trace_id: str) -> list[Span]:
        """In order of their starts."""
        with self._lock:
            return sorted((one for one in self._spans if one.trace_id == trace_id), key=lambda one: one.start_s)

    def traces(self) -> set[str]:
        with self._lock:
            return {one.trace_id for one in self._spans}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _take(self, content: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(content)
        found = [
            Span(
                one.name, one.trace_id.hex(), one.span_id.hex(), one.parent_span_id.hex(),
                one.start_time_unix_nano / 1e9, one.end_time_unix_nano / 1e9,
                {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in one.attributes},
            )
            for resource in request.resource_spans for scope in resource.scope_spans for one in scope.spans
        ]  # fmt: skip
        with self._lock:
            self._spans += found
