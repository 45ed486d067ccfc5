"""Telemetry: metrics, spans, the Server-Timing header, log buffers."""
