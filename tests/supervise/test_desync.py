"""Rings as processes leave them, read from outside; real processes are in `tests/engines/torch/test_desync.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from unisono.runtime.collective_log import Collective, CollectiveLog, GroupState, encode_call
from unisono.supervise import collective_mismatch

SUM = Collective("0", "0-2", "all_reduce", "SUM", -1, "float32", "[4]", "task.py:12", "task.py:12 loss")
OTHER = replace(SUM, operation="all_gather", reduce="", site="task.py:30")


def left(folder: Path, *made: list[Collective]) -> Path:
    for rank, whats in enumerate(made):
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
    shared, nodes = tmp_path / "shared", [tmp_path / f"node-{number}" for number in range(2)]
    for folder in (shared, *nodes):
        folder.mkdir()
    for rank, last in enumerate((SUM, OTHER)):
        log, members = CollectiveLog(rank, nodes[rank]), GroupState("0", range(3), rank)
        for what in [SUM] * 2000 + [last]:
            log.add(members, what.fingerprint, encode_call(what))
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
    left = sorted(shared.iterdir())
    assert [path.name for path in left] == ["rank-00000.calls", "rank-00001.calls"]
    assert max(path.stat().st_size for path in left) < 40_000  # their last calls alone


def test_a_rank_of_another_node_that_is_only_behind_is_not_called_desynchronised(tmp_path: Path) -> None:
    shared, nodes = tmp_path / "shared", [tmp_path / f"node-{number}" for number in range(2)]
    for folder in (shared, *nodes):
        folder.mkdir()
    for rank, calls in enumerate((70, 3)):
        log, members = CollectiveLog(rank, nodes[rank]), GroupState("0", range(3), rank)
        for _ in range(calls):
            log.add(members, SUM.fingerprint, encode_call(SUM))
    assert collective_mismatch.describe_mismatch_across_nodes(nodes[0], shared, patience=0.0) is None
    assert collective_mismatch.describe_mismatch_across_nodes(nodes[1], shared, patience=0.0) is None
