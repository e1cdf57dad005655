"""A collector of OpenTelemetry spans, as one would run beside a service: it takes them by OTLP over HTTP."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


@dataclass(frozen=True)
class CollectedSpan:
    """What a process said of one step."""

    name: str
    trace_id: str
    """In hex, as in a traceparent header."""
    attributes: dict[str, object]


class Collector:
    """What came, and where to send it."""

    def __init__(self, url: str) -> None:
        self.url = url
        """For OTEL_EXPORTER_OTLP_ENDPOINT."""
        self.spans: list[CollectedSpan] = []

    def of(self, trace_id: str) -> list[CollectedSpan]:
        """The spans of one trace so far."""
        return [span for span in list(self.spans) if span.trace_id == trace_id]


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port of loopback, until the block ends."""
    spans: list[CollectedSpan] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            spans.extend(_spans(ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        collector = Collector(f"http://127.0.0.1:{server.server_port}")
        collector.spans = spans
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def _spans(request: ExportTraceServiceRequest) -> Iterator[CollectedSpan]:
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                attributes = {each.key: _value(each.value) for each in span.attributes}
                yield CollectedSpan(span.name, span.trace_id.hex(), attributes)


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return tuple(_value(each) for each in value.array_value.values)
    return getattr(value, kind)
