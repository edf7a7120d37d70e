"""What takes one process long does not take the others longer than they may wait."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from unisono.launch.nodes import network
from unisono.runtime.communicator import Alone, Json, Party, while_first, written

PATIENCE = 2.0


class Two:
    """Two threads as a party, of which none waits for longer than `PATIENCE`."""

    size = 2

    def __init__(self, rank: int, meeting: threading.Barrier, values: list[Json]) -> None:
        self.rank, self._meeting, self._values = rank, meeting, values

    def gather(self, value: Json, what: str) -> list[Json]:
        """The value of both."""
        self._values[self.rank] = value
        self._meeting.wait()
        told = list(self._values)
        self._meeting.wait()
        return told

    def barrier(self, what: str) -> None:
        """Return once both are here."""
        self._meeting.wait()


@pytest.fixture
def both() -> list[Party]:
    meeting, values = threading.Barrier(2, timeout=PATIENCE), [None, None]
    return [Two(rank, meeting, values) for rank in range(2)]


def done(both: list[Party], work: Any) -> list[Any]:
    with ThreadPoolExecutor(2) as threads:
        return [each.result(20) for each in [threads.submit(while_first, one, work, "the work") for one in both]]


@pytest.mark.parametrize("seconds", [0.0, 2 * PATIENCE])
def test_others_wait_as_long_as_it_takes(both: list[Party], seconds: float) -> None:
    began = time.monotonic()

    def work() -> str:
        time.sleep(seconds)
        return "made"

    assert done(both, work) == ["made", None]
    assert (time.monotonic() - began > PATIENCE) == bool(seconds)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda one: one.gather(one.rank, "what is next"), both)) == [[0, 1]] * 2


def test_an_error_is_the_first_ones_and_the_others_are_let_go(both: list[Party]) -> None:
    def work() -> None:
        raise KeyError("x")

    with ThreadPoolExecutor(2) as threads:
        first, second = (threads.submit(while_first, one, work, "the work") for one in both)
        with pytest.raises(KeyError):
            first.result(20)
        assert second.result(20) is None


def test_whoever_is_gone_holds_up_nothing(both: list[Party]) -> None:
    assert while_first(both[0], lambda: time.sleep(0.1) or "made", "the work") == "made"


def test_alone_it_is_a_call() -> None:
    threads = threading.active_count()
    assert while_first(Alone(), threading.active_count, "the work") == threads


@pytest.mark.parametrize(("host", "text"), [("10.0.0.1", "10.0.0.1:29400"), ("fd00::1", "[fd00::1]:29400")])
def test_an_address_is_written_as_it_is_read(host: str, text: str):
    assert written(host, 29400) == text
    assert network.rendezvous(text) == (host, 29400)
