"""Python's collector of garbage, paused while libraries are imported.

What an import defines stays, so a collection finds nothing in it; but while a million objects are made, Python looks
through them again and again, for a quarter of the time from the command to the first step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Collect nothing within the context. Contexts may be nested; a collector that was off before stays off."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
