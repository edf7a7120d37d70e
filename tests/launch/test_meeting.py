"""Launchers of several nodes that meet, and do not wait for each other without end. Each is a thread here."""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch import jobs
from tests.ports import free_port
from unisono.launch.nodes import tcp_rendezvous
from unisono.launch.nodes.tcp_rendezvous import NodeCommunicator
from unisono.runtime.authenticated_line import AuthenticatedLine, TokenError
from unisono.runtime.errors import ConfigError, DeadlineError, RunError, UnisonoError


def connected(port: int) -> socket.socket:
    """A connection to a node that may only begin to listen."""
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 60)
        except ConnectionRefusedError:
            time.sleep(0.02)


def together(
    *acts: Callable[[NodeCommunicator], Any], size: int | None = None, ranks: list[int] | None = None,
    start: float = 20, timeout: float = 5,
) -> list[Any]:  # fmt: skip
    """What each node's act returned or raised; one thread is one node."""
    ends: list[Any] = [None] * len(acts)
    where, folder = f"127.0.0.1:{free_port()}", Path(tempfile.mkdtemp())

    def node(number: int) -> None:
        rank = number if ranks is None else ranks[number]
        try:
            with tcp_rendezvous.connect_nodes(rank, size or len(acts), where, start, timeout, folder) as met:
                ends[number] = acts[number](met)
        except UnisonoError as error:
            ends[number] = error

    threads = [threading.Thread(target=node, args=(number,)) for number in range(len(acts))]
    for thread in threads:
        thread.start()
        time.sleep(0.05)  # so that it is known who comes first
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    shutil.rmtree(folder)
    return ends


def test_all_nodes_get_the_values_of_all_in_their_order():
    ends = together(*[lambda met: [met.gather(met.rank * i, "numbers") for i in (1, 10)]] * 3)
    assert ends == [[[0, 1, 2], [0, 10, 20]]] * 3


def test_large_values_arrive_whole():
    text = "ä" * 300_000
    assert together(*[lambda met: met.gather(text + str(met.rank), "texts")] * 2) == [[text + "0", text + "1"]] * 2


def test_nodes_may_come_in_any_order():
    acts = [lambda met: met.gather(met.rank, "ranks")] * 3
    assert together(*acts, ranks=[2, 0, 1]) == [[0, 1, 2]] * 3


def test_a_refusal_of_one_node_is_everyone_s():
    def act(met: NodeCommunicator) -> Any:
        def refuse() -> int:
            if met.rank == 1:
                raise ConfigError("no such file")
            return 1

        return met.run_on_all_nodes(refuse, "files")

    ends = together(act, act, act)
    assert [(type(end), str(end)) for end in ends] == [(RunError, "node 1: no such file")] * 3


def test_what_all_refuse_is_told_without_a_name():
    def act(met: NodeCommunicator) -> Any:
        def refuse() -> int:
            raise ConfigError("no such file")

        return met.run_on_all_nodes(refuse, "files")

    assert [str(end) for end in together(act, act)] == ["no such file"] * 2


# what goes wrong ----------------------------------------------------------------------------------------------------


def test_a_node_that_does_not_come_is_named_to_all_who_did():
    ends = together(*[lambda met: None] * 2, size=4, start=1)
    assert [type(end) for end in ends] == [DeadlineError] * 2
    assert {str(end)[: len("node 2, 3 of 4 did not connect to 127.0.0.1:")] for end in ends} == {
        "node 2, 3 of 4 did not connect to 127.0.0.1:"
    }


def test_node_0_that_does_not_come_is_told_with_its_address():
    (end,) = together(lambda met: None, size=2, ranks=[1], start=0.5)
    assert isinstance(end, DeadlineError)
    assert "node 1 could not connect to node 0 at 127.0.0.1:" in str(end)
    assert "within 0.5 s (launch.start_timeout): Connection refused." in str(end)


def test_who_does_not_know_the_token_is_sent_away_and_the_nodes_meet_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv(tcp_rendezvous.TOKEN, "secret")
    port, ends = free_port(), []

    def node(rank: int) -> None:
        with tcp_rendezvous.connect_nodes(rank, 2, f"127.0.0.1:{port}", 60, 60, tmp_path) as met:
            ends.append(met.gather(rank, "ranks"))

    threads = [threading.Thread(target=node, args=(rank,)) for rank in (0, 1)]
    threads[0].start()
    stranger = AuthenticatedLine(connected(port), "node 0")
    which, nonce = stranger.offer(time.monotonic() + 60)
    assert which == "environment"
    with pytest.raises(TokenError):
        stranger.introduce({"node": 1, "nodes": 2, "host": "far", "pid": 7}, b"guessed", nonce, time.monotonic() + 60)
    stranger.close()
    threads[1].start()
    for thread in threads:
        thread.join(60)
    assert "node 0 refused far: it does not know the token of this run (UNISONO_TOKEN)" in capsys.readouterr().err
    assert ends == [[0, 1], [0, 1]]


def test_two_nodes_of_one_number_are_refused():
    ends = together(*[lambda met: None] * 3, ranks=[0, 1, 1])
    assert [type(end) for end in ends] == [ConfigError] * 3
    assert all(str(end).startswith("two nodes have launch.node_rank=1: node 1 (") for end in ends)


def test_nodes_that_were_told_different_numbers_of_nodes_are_refused(tmp_path: Path):
    ends: list[Any] = [None, None]
    where = f"127.0.0.1:{free_port()}"

    def node(rank: int) -> None:
        try:
            with tcp_rendezvous.connect_nodes(rank, 2 + rank, where, 60, 60, tmp_path):
                pass
        except UnisonoError as error:
            ends[rank] = error

    threads = [threading.Thread(target=node, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [type(end) for end in ends] == [ConfigError] * 2
    assert all(str(end).startswith("launch.nodes is 2 on node 0 but 3 on node 1 (") for end in ends)


def test_a_port_in_use_is_told(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="of this node is in use; use another port on all nodes"):
            tcp_rendezvous.connect_nodes(0, 2, where, 5, 5, tmp_path).__enter__()


def test_a_rendezvous_at_another_host_is_told_with_the_addresses_of_this_one(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"must be an address of node 0, but this node, .* has these: lo 127.0.0.1"):
        tcp_rendezvous.connect_nodes(
            0, 2, "192.0.2.1:29400", 5, 5, tmp_path
        ).__enter__()  # an address of nobody (RFC 5737)


def test_whoever_is_no_node_of_ours_is_sent_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tcp_rendezvous, "_GREETING_TIMEOUT", 0.3)
    where = free_port()
    ends: list[Any] = [None, None]

    def node(rank: int) -> None:
        with tcp_rendezvous.connect_nodes(rank, 2, f"127.0.0.1:{where}", 60, 60, tmp_path) as met:
            ends[rank] = met.gather(rank, "ranks")

    first = threading.Thread(target=node, args=(0,))
    first.start()
    with connected(where) as loud, connected(where):
        loud.sendall(b"GET / HTTP/1.1\r\n\r\n")
        second = threading.Thread(target=node, args=(1,))
        second.start()
        first.join(60)
        second.join(60)
    assert ends == [[0, 1]] * 2


def test_a_node_that_leaves_before_the_others_are_done_with_it_is_named():
    ends = together(lambda met: met.gather(0, "the data"), lambda met: None, lambda met: met.gather(2, "the data"))
    assert [type(ends[i]) for i in (0, 2)] == [DeadlineError] * 2
    for i in (0, 2):
        assert str(ends[i]).startswith("node 1 (")
        assert str(ends[i]).endswith("disconnected while waiting for the data")


def test_a_node_that_says_nothing_is_named_after_the_deadline():
    over = threading.Event()

    def waits(met: NodeCommunicator) -> None:
        try:
            met.gather(0, "the data")
        finally:
            over.set()

    ends = together(waits, lambda met: over.wait(60), timeout=1)
    assert ends[1] is True, "node 0 waited for longer than its deadline"
    assert str(ends[0]).endswith("for 1 s while waiting for the data")


# while processes run ------------------------------------------------------------------------------------------------


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When this process would have ended its children."""
    found: list[float] = []
    monkeypatch.setattr(tcp_rendezvous, "_GRACE", 0.3)
    monkeypatch.setattr(tcp_rendezvous.signal, "pthread_kill", lambda thread, number: found.append(time.monotonic()))
    return found


def watched(seconds: float) -> Callable[[NodeCommunicator], str | None]:
    def act(met: NodeCommunicator) -> str | None:
        with met.watch_nodes():
            time.sleep(seconds)
        return met.failure

    return act


def watched_until(ended: list[float]) -> Callable[[NodeCommunicator], str | None]:
    """Until the watch ends the processes of this node."""

    def act(met: NodeCommunicator) -> str | None:
        with met.watch_nodes():
            jobs.wait_for(lambda: bool(ended), 60)
        return met.failure

    return act


def test_nodes_that_live_are_not_given_up_however_long_it_takes_nor_is_one_that_is_done_sooner(ended: list[float]):
    assert together(watched(4.0), watched(4.0), watched(0.5), timeout=2.5) == [None] * 3
    assert ended == []


def test_a_node_that_fails_ends_the_others(ended: list[float]):
    def fails(met: NodeCommunicator) -> None:
        with met.watch_nodes():
            raise RunError("the sky fell")

    ends = together(watched_until(ended), fails, timeout=5)
    assert str(ends[0]).endswith("ended with an error (see its own output)")
    assert len(ended) == 1


def test_a_node_that_is_gone_ends_the_others(ended: list[float]):
    ends = together(watched_until(ended), lambda met: None, timeout=5)
    assert str(ends[0]).endswith("disconnected while waiting for a heartbeat")
    assert len(ended) == 1


def test_a_node_that_falls_silent_ends_the_others_after_the_deadline(ended: list[float]):
    ends = together(watched_until(ended), lambda met: jobs.wait_for(lambda: bool(ended), 60), timeout=1)
    assert str(ends[0]).endswith("for 1 s while waiting for a heartbeat")
    assert len(ended) == 1


def test_an_end_by_the_watch_is_told_as_a_deadline(monkeypatch: pytest.MonkeyPatch):
    def act(met: NodeCommunicator) -> None:
        with met.watch_nodes():
            met.failure = "node 1 is gone"
            raise KeyboardInterrupt

    ends = together(act, lambda met: time.sleep(0.3))
    assert str(ends[0]) == "node 1 is gone. The processes of this node were stopped"
