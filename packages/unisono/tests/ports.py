"""Ports for tests that have to name one before anybody listens there."""

from __future__ import annotations

import itertools
import os
import random
import socket

# Below the ports that Linux hands out by itself (32768 and up), so that no connection and no other server takes one in
# the meantime; processes that ask at the same time begin at different places.
_FIRST, _COUNT = 12_000, 18_000
_numbers = itertools.count(random.Random(os.getpid()).randrange(_COUNT))


def free_port() -> int:
    """A port of 127.0.0.1 at which nobody listens."""
    for number in _numbers:
        port = _FIRST + number % _COUNT
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("not reached")
