"""What is asked for ahead: in order, bounded, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from typing import Any

import pytest

from packages.unisono.tests.data.made import until
from unisono.data.loading.prefetch import Prefetcher


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def test_what_was_asked_for_comes_in_order_and_is_drawn_in_another_thread() -> None:
    drawn: list[str] = []

    def requests() -> Iterator[int]:
        for number in range(100):
            drawn.append(threading.current_thread().name)
            yield number

    with closing(Prefetcher(requests(), done, lambda: 3)) as feed:
        assert [feed.next(60.0) for _ in range(100)] == list(range(100))
    assert set(drawn) == {"unisono-feed"}
    assert not feed._thread.is_alive()


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_no_more_is_asked_for_than_is_wanted_ahead(ahead: int) -> None:
    asked: list[int] = []

    def ask(number: int) -> Future[int]:
        asked.append(number)
        return done(number)

    with closing(Prefetcher(iter(range(100)), ask, lambda: ahead)) as feed:
        for taken in range(20):
            until(lambda: len(asked) == taken + max(1, ahead))  # noqa: B023 - called at once
            time.sleep(0.002)
            assert len(asked) == taken + max(1, ahead)
            assert feed.next(60.0) == taken


def test_a_fault_of_the_plan_comes_after_what_was_asked_for_before_it() -> None:
    def requests() -> Iterator[int]:
        yield from (0, 1)
        raise ValueError("no more")

    with closing(Prefetcher(requests(), done, lambda: 8)) as feed:
        until(lambda: feed._fault is not None)
        assert [feed.next(60.0), feed.next(60.0)] == [0, 1]
        for _ in range(2):
            with pytest.raises(ValueError, match="no more"):
                feed.next(60.0)


def test_a_wait_for_the_plan_or_for_an_answer_has_a_deadline() -> None:
    held = threading.Event()

    def requests() -> Iterator[int]:
        yield 0
        held.wait(5.0)

    with closing(Prefetcher(requests(), lambda _: Future(), lambda: 1)) as feed:
        with pytest.raises(TimeoutError):
            feed.next(0.01)
        with pytest.raises(TimeoutError):
            feed.next(0.01)
        held.set()


def test_who_closes_it_cancels_what_was_not_begun() -> None:
    asked: list[Future[int]] = []

    def ask(_: int) -> Future[int]:
        asked.append(Future())
        return asked[-1]

    feed = Prefetcher(iter(range(100)), ask, lambda: 3)
    until(lambda: len(asked) == 3)
    feed.close()
    assert [future.cancelled() for future in asked] == [True] * 3
    assert not feed._thread.is_alive()
