"""Spans of calls, by the OpenTelemetry API alone.

Guarantees: a program that has not imported OpenTelemetry does not get it imported, in the driver or
in a worker, and a call pays for one dictionary lookup; without a provider no span is made. A
worker whose driver traces a call makes a span for it, as a child of the caller's.

Source: the semantic conventions of OpenTelemetry for remote calls.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from phalanx.supervision import installed_version

from .replies import AsyncOutput

if TYPE_CHECKING:
    from collections.abc import Mapping


class Telemetry:
    """Finds the tracer of the program's provider, and keeps it."""

    def __init__(self) -> None:
        self._provider: Any = None
        self._tracer: Any = None
        # Without a provider the API reads the environment each time: a tenth of a call.
        self._is_named = "OTEL_PYTHON_TRACER_PROVIDER" in os.environ

    @property
    def tracer(self) -> Any:
        """The tracer; None without a provider."""
        api: Any = sys.modules.get("opentelemetry.trace")
        if api is None:
            return None
        if getattr(api, "_TRACER_PROVIDER", api) is None and not self._is_named:
            return None
        try:
            provider = api.get_tracer_provider()
            if provider is not self._provider:
                nobody = (api.ProxyTracerProvider, api.NoOpTracerProvider)
                is_set = not isinstance(provider, nobody)
                self._tracer = (
                    provider.get_tracer("phalanx", installed_version("phalanx")) if is_set else None
                )
                self._provider = provider
        except AttributeError:  # another thread is in the middle of importing it
            return None
        return self._tracer


class ServerSpan:
    """The span of one call in a worker; it is current until the method has returned."""

    def __init__(
        self, telemetry: Telemetry, name: str, about: Mapping[str, Any], carrier: Mapping[str, str]
    ) -> None:
        """Begin it, as a child of the span in *carrier*."""
        self._api: Any = import_module("opentelemetry.trace")
        self._contexts: Any = import_module("opentelemetry.context")
        above = import_module("opentelemetry.propagate").extract(carrier)
        tracer = telemetry.tracer
        if tracer is None:  # no provider here: the context is still there for the worker's code
            self._span = None
            self._context = above
        else:
            self._span = tracer.start_span(
                name, context=above, kind=self._api.SpanKind.SERVER, attributes=dict(about)
            )
            self._context = self._api.set_span_in_context(self._span, above)
        self._token = self._contexts.attach(self._context)

    def returned(self, result: Any) -> Any:
        """End it, now or once an `AsyncOutput` is resolved; return the answer."""
        self._contexts.detach(self._token)
        if self._span is not None and isinstance(result, AsyncOutput):
            return _Traced(self, result)
        self.end(None)
        return result

    def raised(self, error: BaseException) -> None:
        """End it by *error*."""
        self._contexts.detach(self._token)
        self.end(error)

    def resolve(self, output: AsyncOutput) -> Any:
        """Return the answer of *output*, and end the span."""
        token = self._contexts.attach(self._context)
        try:
            value = output.get_output()
        except BaseException as error:
            self.end(error)
            raise
        finally:
            self._contexts.detach(token)
        self.end(None)
        return value

    def end(self, error: BaseException | None) -> None:
        """End it; with *error*, by that."""
        span = self._span
        if span is None:
            return
        span.set_attribute("phalanx.outcome", "ok" if error is None else "error")
        if error is not None:
            span.set_attribute("error.type", type(error).__qualname__)
            if isinstance(error, Exception):
                span.record_exception(error)
            span.set_status(self._api.StatusCode.ERROR, f"{type(error).__qualname__}")
        span.end()


class _Traced(AsyncOutput):
    """An `AsyncOutput` whose span is still open."""

    def __init__(self, span: ServerSpan, output: AsyncOutput) -> None:
        self._span = span
        self._output = output

    def get_output(self) -> object:
        return self._span.resolve(self._output)


def carried(context: Any) -> dict[str, str]:
    """Return *context* in its form for another process."""
    carrier: dict[str, str] = {}
    import_module("opentelemetry.propagate").inject(carrier, context)
    return carrier


def within(carrier: Mapping[str, str]) -> Any:
    """Make the context in *carrier* current; return the token for `outside`, or None."""
    if not carrier:
        return None
    above = import_module("opentelemetry.propagate").extract(carrier)
    return import_module("opentelemetry.context").attach(above)


def outside(token: Any) -> None:
    """Undo `within`."""
    if token is not None:
        import_module("opentelemetry.context").detach(token)
