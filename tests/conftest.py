"""What holds for every test: Hypothesis draws the same examples each time and is not hurried on a busy machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")
