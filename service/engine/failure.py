"""How the engine reports its own faults: everything to the log, an opaque id to the client."""

from __future__ import annotations

import logging
import secrets

from service.errors import EngineFailed

_LOGGER = logging.getLogger(__name__)


def report_failure(what: str, cause: BaseException | None = None) -> EngineFailed:
    """Logs `what` and `cause`'s traceback under a fresh id; the error to end the request with carries only the id."""
    error_id = secrets.token_hex(8)
    _LOGGER.error("%s: %s", error_id, what, exc_info=cause)
    return EngineFailed(error_id)
