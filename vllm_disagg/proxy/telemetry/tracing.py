"""Makes OpenTelemetry spans: one for a request, and one for each leg as its child.

An engine's own spans become children of the leg's. Needs an extra (`pip install vllm-disagg[otel]`)
and `--otlp-traces-endpoint`. Without an endpoint a client's `traceparent` goes to both legs
unchanged.
"""

from __future__ import annotations

from typing import Any, Literal

from ...errors import ConfigError
from ..http.headers import Headers
from ..http.request import HttpRequest
from ..http.routes import template

CONTEXT_HEADERS = (b"traceparent", b"tracestate")


class Tracing:
    """Makes spans and sends them to a collector; does nothing without an endpoint."""

    def __init__(self, endpoint: str) -> None:
        self._tracer: Any = None
        if not endpoint:
            return
        try:
            from opentelemetry import trace  # noqa: PLC0415  an extra, this and the following
            from opentelemetry.exporter.otlp.proto.http import trace_exporter  # noqa: PLC0415
            from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
            from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
            from opentelemetry.trace.propagation import tracecontext  # noqa: PLC0415
        except ImportError:
            raise ConfigError(
                "--otlp-traces-endpoint needs the library: pip install 'vllm-disagg[otel]'"
            ) from None
        self._provider: Any = TracerProvider(
            resource=Resource.create({"service.name": "vllm-disagg-proxy"})
        )
        exporter = trace_exporter.OTLPSpanExporter(endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("vllm_disagg.proxy")
        self._trace: Any = trace
        self._propagator: Any = tracecontext.TraceContextTextMapPropagator()

    def begin(self, request: HttpRequest) -> None:
        """Begins the span of a request."""
        if self._tracer:
            carrier = {
                name.decode(): value.decode("latin-1")
                for name, value in request.headers
                if name in CONTEXT_HEADERS
            }
            parent = self._propagator.extract(carrier)
            kind = self._trace.SpanKind.SERVER
            name = f"{request.method} {template(request.path)}"
            request.spans = [self._tracer.start_span(name, context=parent, kind=kind)]

    def leg(
        self, request: HttpRequest, headers: Headers, leg: Literal["prefill", "decode"], url: str
    ) -> Headers:
        """Begins the span of a leg of a request with spans; returns the headers to send."""
        parent = self._trace.set_span_in_context(request.spans[0])
        span = self._tracer.start_span(
            leg, context=parent, kind=self._trace.SpanKind.CLIENT, attributes={"server.url": url}
        )
        request.spans.append(span)
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._trace.set_span_in_context(span))
        headers = [header for header in headers if header[0] not in CONTEXT_HEADERS]
        return headers + [(name.encode(), value.encode()) for name, value in carrier.items()]

    def prefilled(self, request: HttpRequest) -> None:
        """Ends the span of the latest prefill leg."""
        for span in reversed(request.spans):
            if getattr(span, "name", "") == "prefill":  # a span that is not sampled has no name
                span.end()
                return

    def end(self, request: HttpRequest, status: int, facts: dict[str, object]) -> None:
        """Ends all spans of a request. `facts` become attributes of the request's span."""
        spans = request.spans
        request.spans = []
        for span in reversed(spans):
            if span is spans[0]:
                known = {
                    name: value
                    for name, value in facts.items()
                    if isinstance(value, str | int | float)
                }
                span.set_attributes({"http.response.status_code": status, **known})
            if span.is_recording():
                span.end()

    def close(self) -> None:
        """Sends the last spans; may wait for the collector."""
        if self._tracer:
            self._provider.shutdown()
