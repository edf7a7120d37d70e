"""The control channel: JSON in rank order, and a sentence for every wait that does not end well."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from packages.unisono.tests import processes
from packages.unisono.tests.launch import jobs
from packages.unisono.tests.ports import free_port
from unisono.engines.torch.guards.collective_comparison import CollectiveComparison
from unisono.engines.torch.parallel import process_group
from unisono.runtime.communication.communicator import Communicator, ProcessInfo, SingleProcess
from unisono.runtime.communication.consensus import share_first
from unisono.runtime.communication.listening import reserve_port
from unisono.runtime.errors import DeadlineError, DesyncError

CPU = torch.device("cpu")
VALUES = [
    {"name": "Größe ↑", "list": [1, 2.5, None, True], "nested": {"empty": [], "text": ""}},
    [-(2**60), 1e-300, "x" * 5000],
]


# who does not come ----------------------------------------------------------------------------------------------------


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An address at which nobody is."""
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    yield f"127.0.0.1:{port}"
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("world", "missing"), [(2, "of 2 processes, rank 1 did not start"), (4, "of 4 processes, ranks 1, 2, 3 did not")]
)
def test_ranks_that_do_not_appear_are_named(address: str, world: int, missing: str) -> None:
    with pytest.raises(DeadlineError) as late:
        process_group.start(ProcessInfo(0, world, 0, world), CPU, timeout=5, start_timeout=0.3)
    assert str(late.value).startswith(f"rank 0: {missing}")
    assert str(late.value).endswith(f"or could not reach {address}, within 0.3 s (launch.start_timeout)")


def test_the_store_listens_at_the_address_of_the_meeting_point_alone(address: str) -> None:
    process_group.start(ProcessInfo(0, 1, 0, 1), CPU, timeout=5, start_timeout=5)
    process_group.stop()
    listens = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert [f"{where.ip}:{where.port}" for where in listens if str(where.port) == address.split(":")[1]] == [address]


def test_a_meeting_point_whose_name_leads_nowhere_is_named_at_once(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "_STORE_WAIT", 0.1)
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    for rank in (0, 1):
        with pytest.raises(DeadlineError, match=r"at no\.such\.host\.invalid:\d+: the host name .* cannot be resolved"):
            process_group.start(ProcessInfo(rank, 2, rank, 2), CPU, timeout=5, start_timeout=60)


def test_a_port_in_use_is_named_at_once(address: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", int(address.split(":")[1])))
        other.listen()
        with pytest.raises(DeadlineError, match=f"at {address}: port .* is in use; set MASTER_PORT to a free one"):
            process_group.start(ProcessInfo(0, 2, 0, 2), CPU, timeout=5, start_timeout=60)


def test_a_port_that_our_launcher_keeps_is_shared_with_rank_0_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserve_port("127.0.0.1") as kept:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(kept.getsockname()[1]))
        with pytest.raises(DeadlineError, match="is in use; set MASTER_PORT to a free one"):
            process_group.start(ProcessInfo(0, 1, 0, 1, "torchrun"), CPU, timeout=5, start_timeout=5)
        process_group.start(ProcessInfo(0, 1, 0, 1, "unisono"), CPU, timeout=5, start_timeout=5)
        process_group.stop()


def test_a_process_that_meets_nobody_says_where_it_was(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it gives torch, which tries twice, half of the time; torch's pause between its tries is random."""
    given: list[float] = []

    def store(*arguments: Any, timeout: timedelta, **more: Any) -> Any:
        given.append(timeout.total_seconds())
        return tcp_store(*arguments, timeout=timeout, **more)

    tcp_store = dist.TCPStore  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "TCPStore", store)
    said = f"rank 1 could not reach the other processes at {address}: no response within 3 s "
    with pytest.raises(DeadlineError, match=said):
        process_group.start(ProcessInfo(1, 2, 1, 2), CPU, timeout=5, start_timeout=3)
    assert 1 <= len(given) <= 3 and max(given) <= 1.5


# what an error is taken for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:3\nmore"),
        RuntimeError("Timed out waiting 1000ms for recv operation to complete"),
        RuntimeError("Connection reset by peer"),
        dist.DistBackendError("anything that a backend says"),
    ],
)
def test_a_backends_error_about_a_peer_is_a_sentence_about_the_wait(error: RuntimeError) -> None:
    with (
        pytest.raises(DeadlineError) as late,
        process_group.translate_peer_errors(ProcessInfo(2, 4), "the end of the lesson", 7.5),
    ):
        raise error
    assert str(late.value).startswith("rank 2 waited for the end of the lesson, but not all arrived")
    assert "the deadline of 7.5 s (launch.timeout)" in str(late.value)
    assert str(late.value).endswith(f"Backend: {str(error).splitlines()[0]}")
    assert late.value.__cause__ is error


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("Timed out")])
def test_an_error_that_is_about_no_peer_passes_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, process_group.translate_peer_errors(ProcessInfo(), "anything", 1):
        raise error
    assert raised.value is error


# stop -----------------------------------------------------------------------------------------------------------------


def test_a_process_alone_gathers_its_own_value_and_can_stop_though_it_never_joined() -> None:
    assert [SingleProcess().gather(value, "itself") for value in VALUES] == [[value] for value in VALUES]
    process_group.stop()


# two processes --------------------------------------------------------------------------------------------------------


def rejoined(place: ProcessInfo, group: Communicator, timeout: float) -> process_group.TorchCommunicator:
    """Leave the process group and start another one with another deadline."""
    ports = group.gather(free_port(), "the new port")
    process_group.stop()
    os.environ["MASTER_PORT"] = str(ports[0])
    return process_group.start(place, CPU, timeout=timeout, start_timeout=60)


def told(wait: Callable[[], Any]) -> str:
    try:
        wait()
    except (DeadlineError, DesyncError) as error:
        return str(error)
    return "it came"


def on_two(place: ProcessInfo, group: process_group.TorchCommunicator, folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = {"who": (group.rank, group.size, group.process)}
    result["values"] = group.gather(VALUES[place.rank], "values")
    result["uneven"] = group.gather(["y" * 10 * place.rank], "lists of other lengths")
    result["nothing"] = group.gather(None, "nothing")
    result["on the first"] = group.gather_to_first(VALUES[place.rank], "values for the first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather", None)  # one reduction is all that is needed
        result["alike"] = group.gather({"fine": [True, 1.5]}, "whether all are well")
    result["alike"][0]["fine"].append("only here")
    comparison = CollectiveComparison(place, 60, wanted=True)
    comparison.start()
    result["shared"] = share_first(group, lambda: "made", "what the first makes")
    result["logged alike"] = told(lambda: comparison.check("the end"))
    comparison.close()

    came = folder / "came"
    if place.is_first:
        group.barrier("the second process")
        result["barrier"] = came.exists()
    else:
        came.touch()
        group.barrier("the second process")

    group = rejoined(place, group, timeout=1)  # a process that is there, and does not come
    given_up = folder / "given up"
    if place.is_first:
        result["stuck"] = told(lambda: group.gather(1, "the answer of the others"))
        given_up.touch()
    else:
        jobs.wait_for(given_up.exists, 30.0)
        result["stuck"] = told(lambda: group.barrier("those who have given up"))
    return result


def gone(place: ProcessInfo, group: Communicator) -> str:
    """The second process ends; the first waits for it far longer than a test may take."""
    return told(lambda: group.gather(1, "a process that has gone")) if place.is_first else ""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return processes.run(on_two, 2, tmp_path_factory.mktemp("meeting"))


def test_every_rank_gathers_all_values_in_rank_order_and_waits_at_a_barrier(
    both: list[dict[str, Any]],
) -> None:
    for rank, result in enumerate(both):
        assert result["who"] == (rank, 2, ProcessInfo(rank, 2, rank, 2, "test"))
        assert (result["values"], result["uneven"], result["nothing"]) == (VALUES, [[""], ["y" * 10]], [None, None])
        assert result["on the first"] == ([] if rank else VALUES)
        assert result["alike"] == [{"fine": [True, 1.5, "only here"]}, {"fine": [True, 1.5]}]
    assert both[0]["barrier"]


def test_work_of_the_first_rank_is_no_difference_between_the_collectives_of_all(both: list[dict[str, Any]]) -> None:
    """The claim: what an export or an environment shares in the middle of a run ends no run as one out of step."""
    assert [(rank["shared"], rank["logged alike"]) for rank in both] == [("made", "it came")] * 2


def test_a_wait_for_a_process_that_does_not_come_ends_and_says_what_it_was_for(both: list[dict[str, Any]]) -> None:
    first, second = (result["stuck"] for result in both)
    assert first.startswith("rank 0 waited for the answer of the others, but not all arrived")
    assert "the deadline of 1 s (launch.timeout)" in first
    assert second.startswith("rank 1 waited for those who have given up, but not all arrived")
    assert DeadlineError("late").exit_code == 5


def test_a_wait_for_a_process_that_has_gone_ends_with_what_it_was_for() -> None:
    first, _ = processes.run(gone, 2)
    assert first.startswith("rank 0 waited for a process that has gone, but not all arrived")
