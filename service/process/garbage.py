"""Python's collector of cyclic garbage, which holds up every thread of the process while it looks at all objects.

Most objects of the oldest generation live as long as the server: modules, classes, generated code. They are set aside
once all are there.
"""

from __future__ import annotations

import gc


def set_aside() -> None:
    """Takes all objects that live now out of later collections."""
    gc.collect()
    gc.freeze()


def collect() -> None:
    """Collects garbage of all objects, also of those that were set aside, which are afterwards."""
    is_set_aside = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if is_set_aside:
        gc.freeze()
