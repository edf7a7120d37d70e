"""What all ranks agree on after a step costs rank 0 as much per rank among many as among few."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from packages.unisono.tests.ports import free_port
from unisono.runtime.communication import authenticated_line
from unisono.runtime.communication.authenticated_line import TOKEN, AuthenticatedLine
from unisono.runtime.communication.communicator import ProcessInfo
from unisono.runtime.communication.tcp_communicator import TcpCommunicator, connect_processes
from unisono.runtime.errors import DeadlineError


def run(size: int, work: Callable[[TcpCommunicator], Any]) -> list[Any]:
    """What `work` returns or raises on each of `size` ranks, which are threads."""
    port, results = free_port(), [None] * size

    def take_part(rank: int) -> None:
        place = ProcessInfo(rank=rank, world_size=size, launcher="torchrun")
        group = connect_processes(place, "127.0.0.1", port, 60, 60)
        try:
            results[rank] = work(group)
        except DeadlineError as error:
            results[rank] = error
        finally:
            group.barrier("the end")
            group.close()

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "t" * 32)


def test_only_a_gather_of_unequal_values_sends_those_of_all_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A barrier, and the maximum that ranks agree on after each step, cost rank 0 as much per rank in any job."""
    sent: list[str] = []
    send = AuthenticatedLine.send_text

    def record(line: AuthenticatedLine, text: str, deadline: float) -> None:
        sent.append(text)
        send(line, text, deadline)

    def work(group: TcpCommunicator) -> list[Any]:
        maximum = group.reduce_max([group.rank % 3, 7 - group.rank % 3], "a maximum")
        group.barrier("a barrier")
        alike = group.gather({"fine": True} if group.rank != 4 else "late", "whether all are fine")
        return [maximum, alike, group.gather(group.rank, "a gather")]

    monkeypatch.setattr(AuthenticatedLine, "send_text", record)
    fine = {"fine": True}
    assert run(7, work) == [[[2, 7], [fine] * 4 + ["late"] + [fine] * 2, list(range(7))]] * 7
    answers = [text for text in sent if text.startswith('{"result"')]
    runs = '[[{"fine": true}, 4], ["late", 1], [{"fine": true}, 2]]', str([[rank, 1] for rank in range(7)])
    assert set(answers) == {f'{{"result": {result}}}' for result in ("[2, 7]", "null", *runs)}
    assert answers.count('{"result": [2, 7]}') == 6


def test_what_only_rank_0_needs_is_sent_to_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    send = AuthenticatedLine.send_text

    def record(line: AuthenticatedLine, text: str, deadline: float) -> None:
        sent.append(text)
        send(line, text, deadline)

    monkeypatch.setattr(AuthenticatedLine, "send_text", record)
    large = ["x" * 1000]
    results = run(5, lambda group: group.gather_to_first([group.rank, large], "the parts"))
    assert results == [[[rank, large] for rank in range(5)], [], [], [], []]
    assert sum(len(text) > 1000 for text in sent) == 4, "each of the others sends its own"


def test_values_of_a_gather_are_those_of_each_rank_to_the_type_and_nobody_shares_them() -> None:
    """1, 1.0 and true are equal in Python, and not in JSON; what one rank does to a value is not seen in another's."""

    def work(group: TcpCommunicator) -> list[Any]:
        numbers = group.gather([1, 1.0, True, 1][group.rank], "numbers")
        lists = group.gather([], "empty lists")
        lists[0].append("only here")
        return [[type(number) for number in numbers], lists]

    assert run(4, work) == [[[int, float, bool, int], [["only here"], [], [], []]]] * 4


@pytest.mark.parametrize(
    "answer", [None, 7, [1, 2], [["x", 2]], [["x", 0], ["y", 3]], [["x", True], ["y", 2]], [["x", 3.0]]]
)
def test_an_answer_that_is_not_as_many_values_as_ranks_is_refused(answer: Any) -> None:
    class Line:
        name = "rank 0"

        def exchange(self, *_: Any) -> dict[str, Any]:
            return {"result": answer}

    line: Any = Line()
    with pytest.raises(DeadlineError, match="rank 0 sent an invalid answer while waiting for a gather"):
        authenticated_line.gather({0: line}, 1, 3, "mine", 1.0, "a gather")


def test_ranks_that_bring_different_numbers_of_numbers_all_hear_of_it() -> None:
    found = run(3, lambda group: group.reduce_max([1] * (2 if group.rank == 1 else 3), "a maximum"))
    assert isinstance(found[0], DeadlineError)
    assert isinstance(found[2], DeadlineError)
