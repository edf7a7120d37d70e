"""What all ranks agree on after a step costs rank 0 as much per rank among many as among few."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from packages.unisono.tests.ports import free_port
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


def test_only_a_gather_sends_the_values_of_all_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A barrier, and the maximum that ranks agree on after each step, cost rank 0 as much per rank in any job."""
    sent: list[str] = []
    send = AuthenticatedLine.send_text

    def record(line: AuthenticatedLine, text: str, deadline: float) -> None:
        sent.append(text)
        send(line, text, deadline)

    def work(group: TcpCommunicator) -> list[Any]:
        maximum = group.reduce_max([group.rank % 3, 7 - group.rank % 3], "a maximum")
        group.barrier("a barrier")
        return [maximum, group.gather(group.rank, "a gather")]

    monkeypatch.setattr(AuthenticatedLine, "send_text", record)
    assert run(7, work) == [[[2, 7], list(range(7))]] * 7
    answers = [text for text in sent if text.startswith('{"result"')]
    assert set(answers) == {'{"result": [2, 7]}', '{"result": null}', '{"result": [0, 1, 2, 3, 4, 5, 6]}'}
    assert answers.count('{"result": [2, 7]}') == 6


def test_ranks_that_bring_different_numbers_of_numbers_all_hear_of_it() -> None:
    found = run(3, lambda group: group.reduce_max([1] * (2 if group.rank == 1 else 3), "a maximum"))
    assert isinstance(found[0], DeadlineError)
    assert isinstance(found[2], DeadlineError)
