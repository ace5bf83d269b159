"""Opens the configured tracer, with the OpenTelemetry SDK or without."""

from __future__ import annotations

from service.config import Telemetry
from service.errors import StartupError
from service.telemetry.tracing import NoTracer, Tracer


def open_tracer(telemetry: Telemetry, endpoint: str | None) -> Tracer:
    """Opens the configured tracer.

    Args:
        telemetry: what to export.
        endpoint: where to; None for OpenTelemetry's environment variables.

    Raises:
        StartupError: OpenTelemetry is not installed, or its environment variables are invalid.
    """
    if telemetry is Telemetry.OFF:
        return NoTracer()
    try:
        # Imported late: an optional extra, slow to import.
        from service.telemetry.otel import export
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise StartupError(["--otel needs the extra `otel`, which is not installed"]) from error
    try:
        return export(endpoint, with_metrics=telemetry is Telemetry.ALL)
    except Exception as error:  # whatever the SDK raises for its environment variables
        raise StartupError([f"OpenTelemetry cannot be set up: {error}"]) from error
