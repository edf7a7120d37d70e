"""What is being compiled, told while it takes long: a run that compiles for minutes must not look as if it hung."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic

from unisono.runtime import heartbeat

log = logging.getLogger(__name__)

FIRST_REPORT = 5.0  # seconds until a line says that something is compiled
REPORT_INTERVAL = 15.0  # seconds between two such lines


@contextmanager
def compiling(what: str, *, shown: bool) -> Iterator[None]:
    """Name what is compiled: in this process's heartbeat, and on stderr once it takes long, where `shown`."""
    over, began = threading.Event(), monotonic()

    def tell() -> None:
        wait = FIRST_REPORT
        while not over.wait(wait):
            with suppress(OSError, ValueError):
                sys.stderr.write(f"unisono: compiling {what}: {monotonic() - began:.0f} s so far\n")
                sys.stderr.flush()
            wait = REPORT_INTERVAL

    if shown:
        threading.Thread(target=tell, name="compilation", daemon=True).start()
    with heartbeat.phase("setup", f"the compilation of {what}"):
        try:
            yield
        finally:
            over.set()
            log.info("compiled %s in %.1f s", what, monotonic() - began)
