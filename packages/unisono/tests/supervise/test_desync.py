"""Rings as processes leave them, read from outside; real processes are in `engines/torch/test_desync.py`."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from unisono.launch.processes import exit_report
from unisono.runtime.communication.collective_log import Collective, CollectiveLog, GroupState, encode_call
from unisono.runtime.errors import DesyncError
from unisono.supervise.hangs import collective_mismatch

SUM = Collective("0", "0-2", "all_reduce", "SUM", -1, "float32", "[4]", "task.py:12", "task.py:12 loss")
OTHER = replace(SUM, operation="all_gather", reduce="", site="task.py:30")


def left(folder: Path, *made: list[Collective], first: int = 0) -> Path:
    """A folder with the rings of ranks from the first on."""
    folder.mkdir(exist_ok=True)
    for rank, whats in enumerate(made, first):
        log, members = CollectiveLog(rank, folder), GroupState("0", range(3), rank)
        for what in whats:
            log.add(members, what.fingerprint, encode_call(what))
    return folder


def test_nothing_is_explained_where_there_is_nothing_to_read(tmp_path: Path) -> None:
    assert collective_mismatch.describe_mismatch(tmp_path) is None
    assert collective_mismatch.describe_mismatch(tmp_path / "not there") is None


def test_a_process_that_died_or_is_slow_is_not_called_desynchronised(tmp_path: Path) -> None:
    assert collective_mismatch.describe_mismatch(left(tmp_path, [SUM] * 9, [SUM] * 9, [SUM] * 7)) is None


def test_the_two_that_differ_are_named_and_a_ring_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    left(tmp_path, [SUM, SUM, SUM], [SUM, SUM], [SUM, OTHER])
    (tmp_path / "rank-00007.calls").write_bytes(b"half")
    (tmp_path / "rank-x.calls").write_bytes(b"")
    assert collective_mismatch.describe_mismatch(tmp_path) == (
        "ranks made different collectives. call 2: rank 0 did all_reduce(SUM, float32, [4]) at task.py:12, "
        "rank 2 did all_gather(float32, [4]) at task.py:30"
    )


def test_nodes_that_see_each_others_rings_name_two_ranks_of_two_of_them(tmp_path: Path) -> None:
    made, shared = ([SUM] * 2001, [SUM] * 2000 + [OTHER]), left(tmp_path / "shared")
    nodes = [left(tmp_path / f"node-{rank}", calls, first=rank) for rank, calls in enumerate(made)]
    assert collective_mismatch.describe_mismatch(nodes[0]) is collective_mismatch.describe_mismatch(nodes[1]) is None
    assert (
        collective_mismatch.describe_mismatch_across_nodes(nodes[0], shared, 2, patience=0.01) is None
    )  # the other has left nothing yet
    told = collective_mismatch.describe_mismatch_across_nodes(nodes[1], shared, 2)
    assert told == (
        "ranks made different collectives. call 2001: rank 0 did all_reduce(SUM, float32, [4]) at task.py:12, "
        "rank 1 did all_gather(float32, [4]) at task.py:30"
    )
    assert collective_mismatch.describe_mismatch_across_nodes(nodes[0], shared) == told
    shown = sorted(shared.iterdir())
    assert [path.name for path in shown] == ["rank-00000.calls", "rank-00001.calls"]
    assert max(path.stat().st_size for path in shown) < 40_000  # their last calls alone


def test_the_node_whose_rank_gloo_aborted_waits_for_the_other_on_a_busy_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rank ends at once; that of the other node raises, reports and exits first, 8 s later here (row B17d)."""
    shared, now = left(tmp_path / "logs"), [0.0]
    nodes = [left(tmp_path / f"node-{rank}", calls, first=rank) for rank, calls in enumerate(([SUM], [OTHER]))]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] >= 8.0 and not (shared / "rank-00001.calls").exists():
            collective_mismatch.describe_mismatch_across_nodes(nodes[1], shared, 2, patience=0.0)

    monkeypatch.setattr(collective_mismatch, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    watch = SimpleNamespace(directory=nodes[0], count=1, unfinished_ranks=list, read_finding=lambda: None)
    node = SimpleNamespace(count=2)
    found = exit_report.select_fault(shared, {0: -signal.SIGABRT}, watch, node)  # type: ignore[arg-type]
    assert "ranks made different collectives" in str(found)
    assert found.exit_code == DesyncError.exit_code


def test_a_rank_of_another_node_that_is_only_behind_is_not_called_desynchronised(tmp_path: Path) -> None:
    shared = left(tmp_path / "shared")
    for rank, calls in enumerate((70, 3)):
        node = left(tmp_path / f"node-{rank}", [SUM] * calls, first=rank)
        assert collective_mismatch.describe_mismatch_across_nodes(node, shared, patience=0.0) is None
