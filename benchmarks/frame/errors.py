"""What ends a run before anything is measured."""

from __future__ import annotations


class ArgumentError(RuntimeError):
    """Arguments that cannot be measured, such as an unknown model. Exit status 2."""
