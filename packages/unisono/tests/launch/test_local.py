"""The launcher of several processes: what it leaves behind in this one, and which of many faults it shows."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from packages.unisono.tests import tasks
from unisono.launch.cluster import RUN_ID_VARIABLE
from unisono.launch.processes import children, exit_report, local_processes
from unisono.runtime import errors
from unisono.runtime.communication.communicator import Node
from unisono.task_config import load_config

TASK = f"{tasks.__file__}:LinearTask"


class Ended(children.ChildProcesses):
    """Processes that have ended without a fault, at once."""

    def __init__(self, count: int) -> None:
        super().__init__([0] * count, lambda seconds: {})
        self.codes = dict.fromkeys(range(count), 0)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, str]]:
    """The environments in which processes would have been started."""
    found: list[Mapping[str, str]] = []
    starts(monkeypatch, found.extend)
    return found


def starts(monkeypatch: pytest.MonkeyPatch, act: Callable[[Sequence[Mapping[str, str]]], Any]) -> None:
    """Have processes do this, and end."""

    def start(server: object, module: str, arguments: object, environments: Sequence[Mapping[str, str]]) -> Ended:
        act(environments)
        return Ended(len(environments))

    monkeypatch.setattr(children, "start_children", start)


def launch(folder: Path, threads: int, world: int = 2, node: Node | None = None) -> None:
    words = [f"layout.world_size={world}", "layout.device=cpu", "launch.monitor=false"]
    local_processes.launch(load_config(TASK, words)[0], folder, threads, node=node)


def test_a_launch_leaves_the_environment_as_it_was(
    seen: list[Mapping[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    launch(tmp_path, 3)
    assert dict(os.environ) == before
    launch(tmp_path, 2)
    assert [(found["OMP_NUM_THREADS"], found[RUN_ID_VARIABLE], found["RANK"]) for found in seen] == [
        (threads, f"unisono-{os.getpid()}", rank) for threads in ("3", "2") for rank in ("0", "1")
    ]
    assert dict(os.environ) == before


def test_a_launch_keeps_the_port_at_which_its_processes_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    taken: list[tuple[str, int]] = []

    def tried(environments: Sequence[Mapping[str, str]]) -> None:
        place = environments[0]["MASTER_ADDR"], int(environments[0]["MASTER_PORT"])
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(place)
        taken.append(place)

    starts(monkeypatch, tried)
    launch(tmp_path, 1)
    with socket.socket() as other:
        other.bind(*taken)


def test_a_launch_notes_signals_while_it_waits_and_then_leaves_them_to_whom_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    during: list[Any] = []

    class Once(Ended):
        def __init__(self, count: int) -> None:
            super().__init__(count)
            self.codes = {}

        def wait_for_exit(self, seconds: float) -> None:
            during.append(signal.getsignal(signal.SIGINT))
            self.codes = dict.fromkeys(range(len(self.pids)), 0)

    monkeypatch.setattr(children, "start_children", lambda *words: Once(len(words[-1])))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    launch(tmp_path, 1)
    assert during and during[0] is not before[signal.SIGINT]
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_launch_leaves_what_the_user_has_set(
    seen: list[Mapping[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    launch(tmp_path, 3)
    assert (seen[0]["OMP_NUM_THREADS"], seen[0]["GLOO_SOCKET_IFNAME"]) == ("7", "mine")


def test_a_node_starts_its_share_of_the_processes_and_numbers_them_among_all(
    seen: list[Mapping[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-00000.fault.json").touch()  # node 0 has begun, and failed
    launch(tmp_path, 1, 6, Node(1, 2, "10.0.0.1", 4000, "eth7"))
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    assert [tuple(found[name] for name in names) for found in seen] == [
        (str(3 + place), "6", str(place), "3", "1", "10.0.0.1", "4000") for place in range(3)
    ]
    assert (seen[0]["GLOO_SOCKET_IFNAME"], seen[0]["NCCL_SOCKET_IFNAME"]) == ("eth7", "=eth7")
    assert (tmp_path / "logs" / "rank-00000.fault.json").exists()


def test_a_node_s_interface_is_what_was_chosen_and_nccl_s_what_the_user_has_set(
    seen: list[Mapping[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")  # launch.interface came before it
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib")
    (tmp_path / "logs").mkdir()
    launch(tmp_path, 1, node=Node(0, 2, "10.0.0.1", 4000, "eth7"))
    assert (seen[0]["GLOO_SOCKET_IFNAME"], seen[0]["NCCL_SOCKET_IFNAME"]) == ("eth7", "ib")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1"


# which fault is shown -----------------------------------------------------------------------------------------------


def test_what_the_fault_is_called_is_kept(tmp_path: Path):
    report = {"rank": 0, "kind": "GuardError", "text": "no", "code": 4, "fault": "Replicas drift apart", "time": 0.0}
    (tmp_path / "rank-0.fault.json").write_text(json.dumps(report))
    assert exit_report.select_fault(tmp_path, {0: 4}).fault == "Replicas drift apart"


SILENT = "DeadlineError of 0\nRanks that did not respond until the launcher stopped them: "
KILLED = "rank 1 died without a message (killed by signal 9 (SIGKILL), possibly by the OOM killer); see "


@pytest.mark.parametrize(
    ("exits", "faults", "told", "code"),
    [
        pytest.param({0: 1, 1: -9}, ["0 Preempted 0.2"], KILLED, 9,
                     id="a death, which another rank takes for a preemption, as the launcher ends it"),
        pytest.param({0: 1, 1: -15}, ["0 Preempted 0.2"], "Preempted of 0", 75, id="a preemption of all ranks"),
        pytest.param({0: 5, 1: -15}, ["0 DeadlineError 0.2"], f"{SILENT}1", 5,
                     id="who waited for a process that the launcher ended"),
        pytest.param({0: 5, 1: -9, 2: 5}, ["0 DeadlineError 5.3", "2 DeadlineError 5.1"], f"{SILENT}1", 5,
                     id="who waited for a process that did not listen to the launcher"),
        pytest.param({2: 5, 3: -15}, ["0 DeadlineError 0.3", "2 DeadlineError 0.2"], f"{SILENT}3", 5,
                     id="ranks of a later node as those of the whole job"),
        pytest.param({0: 5, 1: -9, 2: -15}, ["0 DeadlineError 0.2"], KILLED, 9,
                     id="a process that was killed from outside, before those that waited for it"),
        pytest.param({1: -9}, [], KILLED, 9, id="a process that died where nobody waited"),
        pytest.param({3: -15}, [], "rank 3 died without a message (killed by signal 15 (SIGTERM)); see ", 9,
                     id="a process that was ended where nobody waited"),
        pytest.param({0: 5, 1: 2, 2: -15}, ["0 DeadlineError 0.3", "1 DataError 0.2"], "DataError of 1", 2,
                     id="a fault of the task before a wait for it"),
    ],
)  # fmt: skip
def test_of_many_faults_the_cause_is_told(
    tmp_path: Path, exits: dict[int, int], faults: list[str], told: str, code: int
):
    """Each fault is the rank, the kind and how many seconds ago it was written."""
    for rank, kind, ago in map(str.split, faults):
        fault = {"rank": int(rank), "kind": kind, "text": f"{kind} of {rank}", "time": time.time() - float(ago)}
        known = getattr(errors, kind, None)
        report = {**fault, "code": known.exit_code if known else 1, "fault": "", "foreign": known is None}
        (tmp_path / f"rank-{rank}.fault.json").write_text(json.dumps(report))
    found = exit_report.select_fault(tmp_path, exits)
    assert (str(found).removesuffix(str(tmp_path)), found.exit_code) == (told, code)
