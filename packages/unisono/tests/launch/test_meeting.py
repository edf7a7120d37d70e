"""Launchers of several nodes that meet, and do not wait for each other without end. Each is a thread here."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from packages.unisono.tests.launch import jobs
from packages.unisono.tests.launch.node_threads import Node, connected, ends
from packages.unisono.tests.ports import free_port
from unisono.launch.nodes import tcp_rendezvous
from unisono.launch.nodes.tcp_rendezvous import NodeCommunicator
from unisono.runtime.communication.authenticated_line import AuthenticatedLine, TokenError
from unisono.runtime.communication.consensus import raise_everywhere
from unisono.runtime.errors import ConfigError, DeadlineError, RunError


def together(
    *acts: Callable[[NodeCommunicator], Any], size: int | None = None, ranks: Sequence[int] | None = None,
    start: float = 20, timeout: float = 5,
) -> list[Any]:  # fmt: skip
    """What each node's act returned or raised."""
    port, nodes = free_port(), []
    with tempfile.TemporaryDirectory() as folder:
        for rank, act in zip(range(len(acts)) if ranks is None else ranks, acts, strict=True):
            nodes.append(Node(rank, port, Path(folder), act, size or len(acts), start, timeout))
            time.sleep(0.05)  # so that it is known who comes first
        return ends(*nodes)


@pytest.mark.parametrize("ranks", [(0, 1, 2), (2, 0, 1)])
def test_all_nodes_get_the_values_of_all_in_their_order_whoever_comes_first(ranks: Sequence[int]):
    found = together(*[lambda met: [met.gather(met.rank * i, "numbers") for i in (1, 10)]] * 3, ranks=ranks)
    assert found == [[[0, 1, 2], [0, 10, 20]]] * 3


def test_large_values_arrive_whole():
    text = "ä" * 300_000
    assert together(*[lambda met: met.gather(text + str(met.rank), "texts")] * 2) == [[text + "0", text + "1"]] * 2


def test_a_refusal_of_one_node_is_everyone_s():
    def act(met: NodeCommunicator) -> Any:
        def refuse() -> None:
            if met.rank == 1:
                raise ConfigError("no such file")

        return raise_everywhere(met, refuse, "files", member="node")

    assert [(type(end), str(end)) for end in together(act, act, act)] == [(ConfigError, "node 1: no such file")] * 3


# what goes wrong ----------------------------------------------------------------------------------------------------


def test_a_node_that_does_not_come_is_named_to_all_who_did():
    found = together(*[lambda met: None] * 2, size=4, start=1)
    assert [type(end) for end in found] == [DeadlineError] * 2
    assert all(str(end).startswith("node 2, 3 of 4 did not connect to 127.0.0.1:") for end in found)


def test_node_0_that_does_not_come_is_told_with_its_address():
    (end,) = together(lambda met: None, size=2, ranks=[1], start=0.5)
    assert isinstance(end, DeadlineError)
    assert "node 1 could not connect to node 0 at 127.0.0.1:" in str(end)
    assert "within 0.5 s (launch.start_timeout): Connection refused." in str(end)


def test_who_does_not_know_the_token_is_sent_away_and_the_nodes_meet_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv(tcp_rendezvous.TOKEN, "secret")
    port = free_port()
    first = Node(0, port, tmp_path)
    stranger = AuthenticatedLine(connected(port), "node 0")
    which, nonce = stranger.offer(time.monotonic() + 60)
    assert which == "environment"
    with pytest.raises(TokenError):
        stranger.introduce({"node": 1, "nodes": 2, "host": "far", "pid": 7}, b"guessed", nonce, time.monotonic() + 60)
    stranger.close()
    assert ends(first, Node(1, port, tmp_path)) == [[0, 1]] * 2
    assert "node 0 refused far: it does not know the token of this run (UNISONO_TOKEN)" in capsys.readouterr().err


def test_two_nodes_of_one_number_are_refused():
    found = together(*[lambda met: None] * 3, ranks=[0, 1, 1])
    assert [type(end) for end in found] == [ConfigError] * 3
    assert all(str(end).startswith("two nodes have launch.node_rank=1: node 1 (") for end in found)


def test_nodes_that_were_told_different_numbers_of_nodes_are_refused(tmp_path: Path):
    port = free_port()
    found = ends(*[Node(rank, port, tmp_path, size=2 + rank) for rank in (0, 1)])
    assert [type(end) for end in found] == [ConfigError] * 2
    assert all(str(end).startswith("launch.nodes is 2 on node 0 but 3 on node 1 (") for end in found)


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


def test_a_node_that_leaves_before_the_others_are_done_with_it_is_named():
    found = together(lambda met: met.gather(0, "the data"), lambda met: None, lambda met: met.gather(2, "the data"))
    assert [type(found[i]) for i in (0, 2)] == [DeadlineError] * 2
    for i in (0, 2):
        assert str(found[i]).startswith("node 1 (")
        assert str(found[i]).endswith("disconnected while waiting for the data")


def test_a_node_that_says_nothing_is_named_after_the_deadline():
    over = threading.Event()

    def waits(met: NodeCommunicator) -> None:
        try:
            met.gather(0, "the data")
        finally:
            over.set()

    found = together(waits, lambda met: over.wait(60), timeout=1)
    assert found[1] is True, "node 0 waited for longer than its deadline"
    assert str(found[0]).endswith("for 1 s while waiting for the data")


# while processes run ------------------------------------------------------------------------------------------------


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When this process would have ended its children."""
    found: list[float] = []
    monkeypatch.setattr(tcp_rendezvous, "_GRACE", 0.3)
    monkeypatch.setattr(tcp_rendezvous.signal, "pthread_kill", lambda thread, number: found.append(time.monotonic()))
    return found


def watched(until: Callable[[], object]) -> Callable[[NodeCommunicator], str | None]:
    def act(met: NodeCommunicator) -> str | None:
        with met.watch_nodes():
            until()
        return met.failure

    return act


def test_nodes_that_live_are_not_given_up_however_long_it_takes_nor_is_one_that_is_done_sooner(ended: list[float]):
    acts = [watched(partial(time.sleep, seconds)) for seconds in (4.0, 4.0, 0.5)]
    assert together(*acts, timeout=2.5) == [None] * 3
    assert ended == []


def fails() -> None:
    raise RunError("the sky fell")


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("fails", "ended with an error (see its own output)"),
        ("is gone", "disconnected while waiting for a heartbeat"),
        ("falls silent", "for 1 s while waiting for a heartbeat"),
    ],
)
def test_a_node_that_fails_is_gone_or_falls_silent_ends_the_others(ended: list[float], how: str, told: str):
    def until_ended() -> None:
        jobs.wait_for(lambda: bool(ended), 60)

    acts = {"fails": watched(fails), "is gone": lambda met: None, "falls silent": lambda met: until_ended()}
    found = together(watched(until_ended), acts[how], timeout=1 if how == "falls silent" else 5)
    assert str(found[0]).endswith(told)
    assert len(ended) == 1


def test_an_end_by_the_watch_is_told_as_a_deadline():
    def act(met: NodeCommunicator) -> None:
        with met.watch_nodes():
            met.failure = "node 1 is gone"
            raise KeyboardInterrupt

    found = together(act, lambda met: time.sleep(0.3))
    assert str(found[0]) == "node 1 is gone. The processes of this node were stopped"
