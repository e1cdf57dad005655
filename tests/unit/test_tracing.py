"""What becomes of a span between processes, and what it and the log lines within it say."""

import contextvars
import logging

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rollout_service.protocol.rollout import Rollout
from rollout_service.tracing import describe, name_the_trace, only_the_trace, otlp_exporter, step_of_trace
from tests.support.collector import collecting
from tests.unit.fleet.completions import completion_of

OTHER: contextvars.ContextVar[str] = contextvars.ContextVar("other", default="nothing")
ROLLOUT = Rollout(
    request_id="r",
    prompt_token_ids=(1, 2, 3),
    completions=(completion_of((4, 5), (7, 1), (9, 1), end="length"),),
    replica_id="engine#one",
    attempts=2,
)


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(spans: InMemorySpanExporter) -> trace.Tracer:
    """One of its own: a process has one provider, and other tests have none."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return provider.get_tracer("test")


def test_the_context_of_a_call_has_its_span_and_nothing_else(tracer):
    OTHER.set("something")
    assert len(only_the_trace()) == 0
    with tracer.start_as_current_span("request") as span:
        made = only_the_trace()
    assert made.run(trace.get_current_span) is span
    assert made.run(OTHER.get) == "nothing"


def test_a_step_is_a_child_of_the_current_span_if_there_is_one(tracer, spans):
    with step_of_trace("step", tracer) as headers:
        assert headers == {}
    assert spans.get_finished_spans() == ()
    with tracer.start_as_current_span("request") as parent, step_of_trace("step", tracer) as headers:
        assert trace.get_current_span() is not parent
    [step, request] = spans.get_finished_spans()
    assert step.name == "step" and step.parent == request.context
    assert headers["traceparent"].startswith(f"00-{step.context.trace_id:032x}-{step.context.span_id:016x}-")


def test_a_span_says_which_weights_made_its_rollout(tracer, spans):
    describe(ROLLOUT)  # outside of any
    with tracer.start_as_current_span("request"):
        describe(ROLLOUT)
    [span] = spans.get_finished_spans()
    assert dict(span.attributes or {}) == {
        "gen_ai.response.id": "r",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.response.finish_reasons": ("length",),
        "rollout.weight_versions": (7, 9),
        "rollout.replica_id": "engine#one",
        "rollout.attempts": 2,
    }


def test_a_log_line_within_a_span_names_it(tracer):
    record = logging.LogRecord("rollout_service", logging.INFO, "file.py", 1, "told", (), None)
    assert name_the_trace(record) and not hasattr(record, "trace_id")
    with tracer.start_as_current_span("request") as span:
        assert name_the_trace(record)
    context = span.get_span_context()
    assert (record.trace_id, record.span_id) == (f"{context.trace_id:032x}", f"{context.span_id:016x}")


def test_spans_are_sent_to_a_collector(monkeypatch):
    provider = TracerProvider()
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        [processor] = otlp_exporter()
        provider.add_span_processor(processor)
        with provider.get_tracer("test").start_as_current_span("request") as span:
            describe(ROLLOUT)
        provider.shutdown()
    [sent] = collector.of(trace.format_trace_id(span.get_span_context().trace_id))
    assert sent.name == "request" and sent.attributes["rollout.weight_versions"] == (7, 9)
