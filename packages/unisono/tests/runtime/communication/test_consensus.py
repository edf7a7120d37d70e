"""An error of one process is raised on all, and what takes rank 0 long lets nobody time out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from unisono.runtime.communication import consensus
from unisono.runtime.communication.communicator import Channel, Json, SingleProcess
from unisono.runtime.communication.consensus import raise_everywhere, run_everywhere, run_on_first, share_first
from unisono.runtime.errors import ConfigError, DataError, KernelError, RunError, UnisonoError

PATIENCE = 2.0  # twice as long as rank 0 lets the others wait for a word


class Two:
    """Two threads as ranks, of which none waits for longer than `PATIENCE`."""

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


@pytest.fixture
def both() -> list[Channel]:
    meeting, values = threading.Barrier(2, timeout=PATIENCE), [None, None]
    return [Two(rank, meeting, values) for rank in range(2)]


def done(both: list[Channel], work: Any) -> list[Any]:
    with ThreadPoolExecutor(2) as threads:
        return [each.result(60) for each in [threads.submit(run_on_first, one, work, "the work") for one in both]]


@pytest.mark.parametrize("seconds", [0.0, 2 * PATIENCE])
def test_others_wait_as_long_as_it_takes(both: list[Channel], seconds: float) -> None:
    def work() -> str:
        time.sleep(seconds)
        return "made"

    assert done(both, work) == ["made", None]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda one: one.gather(one.rank, "what is next"), both)) == [[0, 1]] * 2


def test_an_error_is_the_first_ones_and_the_others_are_let_go(both: list[Channel]) -> None:
    def work() -> None:
        raise KeyError("x")

    with ThreadPoolExecutor(2) as threads:
        first, second = (threads.submit(run_on_first, one, work, "the work") for one in both)
        with pytest.raises(KeyError):
            first.result(20)
        assert second.result(20) is None


def test_whoever_is_gone_holds_up_nothing_and_alone_it_is_a_call(both: list[Channel]) -> None:
    assert run_on_first(both[0], lambda: time.sleep(0.1) or "made", "the work") == "made"
    threads = threading.active_count()
    assert run_on_first(SingleProcess(), threading.active_count, "the work") == threads


def test_all_work_as_long_as_it_takes_and_an_error_of_one_is_raised_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consensus, "_SIGN_OF_LIFE", 0.05)
    meeting, values = threading.Barrier(2, timeout=0.3), [None, None]
    both = [Two(rank, meeting, values) for rank in range(2)]

    def work(seconds: float, rank: int) -> Any:
        def one() -> int:
            time.sleep(seconds)
            if rank < 0:
                raise DataError("no disk")
            return rank

        return one

    with ThreadPoolExecutor(2) as threads:
        told = list(threads.map(run_everywhere, both, [work(0.0, 0), work(0.6, 1)], ["the work"] * 2))
        assert told == [[0, 1], [0, 1]]
        failed = [
            threads.submit(run_everywhere, one, act, "the work")
            for one, act in zip(both, [None, work(0.0, -1)], strict=True)
        ]
        for each in failed:
            with pytest.raises(DataError, match=r"^no disk$"):
                each.result(20)


# an error of one rank ------------------------------------------------------------------------------------------------


def outcomes(both: list[Channel], *work: Callable[[], Any] | None, share: bool = False) -> list[Any]:
    """What comes of it on each rank: a result or an error."""

    def one(rank: int) -> Any:
        try:
            if share:
                return share_first(both[rank], work[0], "the work")  # type: ignore[arg-type]
            return raise_everywhere(both[rank], work[rank], "the work")
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(one, range(2)))


def fails(error: Exception) -> Callable[[], Any]:
    def work() -> None:
        raise error

    return work


def test_every_rank_gets_the_results_of_all(both: list[Channel]) -> None:
    assert outcomes(both, lambda: "a", lambda: 1) == [["a", 1]] * 2
    assert outcomes(both, lambda: "a", None) == [["a", None]] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_is_raised_on_all_with_its_class_and_rank(both: list[Channel], rank: int) -> None:
    work: list[Any] = [lambda: None, lambda: None]
    work[rank] = fails(DataError("no such row"))
    found = outcomes(both, *work)
    assert [(type(error), str(error)) for error in found] == [(DataError, f"rank {rank}: no such row")] * 2
    assert all(error.agreed for error in found)


def test_what_one_process_finds_by_itself_is_not_agreed_on() -> None:
    """It may be a rank that opens a checkpoint in its task, and has to report the error itself."""
    with pytest.raises(DataError, match="no such row") as caught:
        raise_everywhere(SingleProcess(), fails(DataError("no such row")), "all")
    assert not caught.value.agreed


def test_what_all_who_work_say_is_said_without_a_rank_and_else_the_first_is(both: list[Channel]) -> None:
    found = outcomes(both, fails(ConfigError("a")), fails(ConfigError("a")))
    assert [str(error) for error in found] == ["a"] * 2
    found = outcomes(both, fails(ConfigError("a")), fails(ConfigError("b")))
    assert [str(error) for error in found] == ["rank 0: a"] * 2
    found = outcomes(both, fails(KernelError("none", "A fault")), None)
    assert [(type(error), str(error), error.fault) for error in found] == [(KernelError, "none", "A fault")] * 2


def test_a_fault_of_the_code_keeps_its_traceback_where_it_is_and_ends_the_others(both: list[Channel]) -> None:
    own = ZeroDivisionError("by zero")
    first, second = outcomes(both, fails(own), lambda: 1)
    assert first is own
    assert (type(second), str(second)) == (RunError, "rank 0: ZeroDivisionError: by zero")


def test_a_class_that_only_one_module_knows_is_told_as_the_one_it_extends(both: list[Channel]) -> None:
    class StoreError(DataError):
        pass

    assert [type(error) for error in outcomes(both, fails(StoreError("x")), None)] == [StoreError, DataError]


def test_rank_0_shares_its_result_or_its_error_however_long_it_takes(both: list[Channel]) -> None:
    def slow() -> str:
        time.sleep(1.5 * PATIENCE)
        return "made"

    assert outcomes(both, slow, None, share=True) == ["made"] * 2
    found = outcomes(both, fails(UnisonoError("no")), None, share=True)
    assert [str(error) for error in found] == ["no"] * 2
