"""Python's cyclic garbage collector, which stops every thread while it traverses the objects.

Most objects of the oldest generation live as long as the server: modules, classes, generated code. They are frozen
once loaded, so that collections skip them.
"""

from __future__ import annotations

import gc


def set_aside() -> None:
    """Freezes all live objects: later collections skip them."""
    gc.collect()
    gc.freeze()


def collect() -> None:
    """Collects all objects, frozen ones included; freezes the survivors again if any were frozen."""
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if was_frozen:
        gc.freeze()
