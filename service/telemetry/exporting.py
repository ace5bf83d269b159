"""The tracer that an operator asked for, with the OpenTelemetry SDK or without it."""

from __future__ import annotations

from service.config import Telemetry
from service.errors import StartupError
from service.telemetry.tracing import NoTracer, Tracer


def open_tracer(telemetry: Telemetry, endpoint: str | None) -> Tracer:
    """The tracer that an operator wants.

    Args:
        telemetry: what to export.
        endpoint: where to; None leaves it to OpenTelemetry's own environment variables.

    Raises:
        StartupError: when OpenTelemetry is not installed, or its environment variables are no good.
    """
    if telemetry is Telemetry.OFF:
        return NoTracer()
    try:
        # Late: an extra of its own, which no other server must have or wait for.
        from service.telemetry.otel import export
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise StartupError(["--otel needs the extra `otel`, which is not installed"]) from error
    try:
        return export(endpoint, with_metrics=telemetry is Telemetry.ALL)
    except Exception as error:  # whatever the SDK makes of what it finds in the environment
        raise StartupError([f"OpenTelemetry cannot be set up: {error}"]) from error
