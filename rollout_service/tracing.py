"""OpenTelemetry traces of a rollout: Ray Serve makes the spans, from its proxy to the replica; here is what it lacks.

Serve (2.60.0) traces where ``RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH`` names a function that makes span processors, in
the environment of its proxies and replicas. Names of attributes are those of OpenTelemetry's conventions for generative
AI where there is one.
"""

import contextvars
import logging
from typing import TYPE_CHECKING

from opentelemetry import context, trace

from rollout_service.protocol.rollout import Rollout

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor


def otlp_exporter() -> "list[SpanProcessor]":
    """Sends spans to a collector by OTLP over HTTP: ``rollout_service.tracing:otlp_exporter``.

    ``OTEL_EXPORTER_OTLP_ENDPOINT`` and the other variables of OpenTelemetry say where, and how.
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
    """A context that has nothing of the running one but its span."""
    made, span = contextvars.Context(), trace.get_current_span()
    if span.get_span_context().is_valid:
        made.run(context.attach, trace.set_span_in_context(span, context.Context()))
    return made


def describe(rollout: Rollout) -> None:
    """Say of the running span, if it is recorded, what came of its rollout."""
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
    """A filter of log handlers: lines that are written within a span have its ``trace_id`` and ``span_id``, in hex."""
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        record.trace_id, record.span_id = trace.format_trace_id(span.trace_id), trace.format_span_id(span.span_id)
    return True
