"""Python's collector of cyclic garbage, which holds up every thread of the process while it looks at all objects.

The oldest generation of a server of one small model takes some 70 ms, of which the objects that live as long as the
server are most: modules, classes, generated code. They are set aside once all are there.
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
