"""OpenTelemetry traces of a rollout. Ray Serve creates the spans, from its proxy to the replica; this module adds to
them.

Serve (2.60.0) traces if ``RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH`` names a function that returns span processors, in
the environment of its proxies and replicas. Attributes have the names of OpenTelemetry's conventions for generative AI
where these exist.
"""

import contextvars
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import context, trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from rollout_service.protocol.rollout import Rollout

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor


def otlp_exporter() -> "list[SpanProcessor]":
    """Send spans to a collector by OTLP over HTTP: ``rollout_service.tracing:otlp_exporter``.

    It is configured by ``OTEL_EXPORTER_OTLP_ENDPOINT`` and OpenTelemetry's other variables.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ImportError(
            f"to send spans by OTLP, install opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http ({error})"
        ) from error
    return [BatchSpanProcessor(OTLPSpanExporter())]


def only_the_trace() -> contextvars.Context:
    """Return a context that contains only the current span of the running one."""
    made, span = contextvars.Context(), trace.get_current_span()
    if span.get_span_context().is_valid:
        made.run(context.attach, trace.set_span_in_context(span, context.Context()))
    return made


@contextmanager
def step_of_trace(name: str, tracer: trace.Tracer | None = None) -> Iterator[dict[str, str]]:
    """Open a span within the current one; yield its W3C headers. Without a recorded span: none, and no headers.

    ``tracer``: the process's own if not given.
    """
    headers: dict[str, str] = {}
    if not trace.get_current_span().is_recording():
        yield headers
        return
    with (tracer or trace.get_tracer(__name__)).start_as_current_span(name):
        TraceContextTextMapPropagator().inject(headers)
        yield headers


def describe(rollout: Rollout) -> None:
    """Add the rollout's results to the current span, if it is recorded."""
    span = trace.get_current_span()
    if not span.is_recording():
        return
    versions = {each.version for completion in rollout.completions for each in completion.spans}
    span.set_attributes(
        {
            "gen_ai.response.id": rollout.request_id,
            "gen_ai.usage.input_tokens": len(rollout.prompt_token_ids),
            "gen_ai.usage.output_tokens": sum(len(completion.token_ids) for completion in rollout.completions),
            "gen_ai.response.finish_reasons": [completion.finish_reason for completion in rollout.completions],
            "rollout.weight_versions": sorted(versions),
            "rollout.replica_id": rollout.replica_id,
            "rollout.attempts": rollout.attempts,
        }
    )


def name_the_trace(record: logging.LogRecord) -> bool:
    """Add ``trace_id`` and ``span_id``, in hex, to log records within a span. A filter for log handlers."""
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        record.trace_id, record.span_id = trace.format_trace_id(span.trace_id), trace.format_span_id(span.span_id)
    return True
