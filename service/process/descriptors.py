"""The limit of open descriptors: without one a server neither accepts a connection nor reads a file."""

from __future__ import annotations

import logging
import resource

_LOGGER = logging.getLogger(__name__)


def allow_descriptors(num_needed: int) -> None:
    """Raises the process's limit to so many, or warns that the system does not allow it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= num_needed or soft == resource.RLIM_INFINITY:
        return
    num_allowed = num_needed if hard == resource.RLIM_INFINITY else min(num_needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_allowed, hard))
    if num_allowed < num_needed:
        _LOGGER.warning(
            "%d descriptors may be open (ulimit -n), and --max-connections can take %d", num_allowed, num_needed
        )
