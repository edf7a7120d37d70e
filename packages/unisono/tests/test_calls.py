from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.runtime.communication import collective_log
from unisono.runtime.communication.collective_log import Call, Collective, CollectiveLog, GroupState

SUM = Collective("0", "0-1", "all_reduce", "SUM", -1, "float32", "[4]", "task.py:12", "task.py:12 loss")


def noting(log: CollectiveLog, members: GroupState, *whats: Collective) -> None:
    log.groups[members.name] = members
    for what in whats:
        log.add(members, what.fingerprint, collective_log.encode_call(what), what.unordered)


def pair(folder: Path | None = None, world: int = 2) -> list[tuple[CollectiveLog, GroupState]]:
    return [(CollectiveLog(rank, folder), GroupState("0", range(world), rank)) for rank in range(world)]


def test_a_ring_holds_the_last_calls_in_their_order(tmp_path: Path) -> None:
    log, members = CollectiveLog(3, tmp_path), GroupState("0", range(4), 3)
    noting(log, members, *(replace(SUM, shape=f"[{n}]") for n in range(collective_log.RING_SIZE + 5)))
    read = collective_log.read_ring(tmp_path / "rank-00003.calls")
    assert (
        [call.number for call in read] == list(range(6, collective_log.RING_SIZE + 6)) == [call.turn for call in read]
    )
    assert [call.what.shape for call in read] == [f"[{n}]" for n in range(5, collective_log.RING_SIZE + 5)]
    assert read == log.calls()
    assert read[-1].what == replace(
        SUM, shape=f"[{collective_log.RING_SIZE + 4}]", key=""
    )  # the key is in the fingerprint only
    assert collective_log.read_rings(tmp_path) == {3: read}
    assert Call.from_dict(asdict(read[0])) == read[0]


def test_a_ring_of_an_earlier_attempt_is_begun_anew(tmp_path: Path) -> None:
    noting(CollectiveLog(0, tmp_path), GroupState("0", range(2), 0), SUM, SUM)
    assert len(collective_log.read_ring(tmp_path / "rank-00000.calls")) == 2
    CollectiveLog(0, tmp_path)
    assert collective_log.read_ring(tmp_path / "rank-00000.calls") == []


def test_without_a_folder_a_ring_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNISONO_HEARTBEAT", raising=False)
    assert collective_log.ring_dir() is None
    monkeypatch.setenv("UNISONO_HEARTBEAT", str(tmp_path / "gone"))
    assert collective_log.ring_dir() is None
    monkeypatch.setenv("UNISONO_HEARTBEAT", str(tmp_path))
    assert collective_log.ring_dir() == tmp_path
    log = CollectiveLog(0)
    noting(log, GroupState("0", range(2), 0), SUM)
    assert [call.what.operation for call in log.calls()] == ["all_reduce"]
    assert list(tmp_path.iterdir()) == []


def test_a_ring_that_cannot_be_shared_is_kept_in_memory_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(collective_log.os, "posix_fallocate", full)
    log = CollectiveLog(0, tmp_path)
    noting(log, GroupState("0", range(2), 0), SUM)
    assert (log.path, len(log.calls())) == (None, 1)
    assert "No space left on device: the last collectives are kept in memory only" in caplog.text


@pytest.mark.parametrize("content", [b"", b"x" * 4096])
def test_what_is_no_ring_is_told_and_left_out(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rank-00000.calls"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not a ring of calls"):
        collective_log.read_ring(path)
    assert collective_log.read_rings(tmp_path) == {}


def test_a_damaged_call_is_left_out_and_the_others_are_read(tmp_path: Path) -> None:
    log = CollectiveLog(0, tmp_path)
    noting(log, GroupState("0", range(2), 0), *[SUM] * 5)
    path = tmp_path / "rank-00000.calls"
    whole = path.read_bytes()
    end = whole.rindex(b"task.py") + 40
    for at in random.Random(0).sample(range(20, end), 60):
        flipped = bytearray(whole)
        flipped[at] ^= 0x10
        path.write_bytes(bytes(flipped))
        read = collective_log.read_ring(path)
        assert set(read) <= set(log.calls())
        assert len(read) >= 4


def test_a_reader_never_sees_half_a_call(tmp_path: Path) -> None:
    log, members, ended = CollectiveLog(0, tmp_path), GroupState("0", range(2), 0), False
    whats = [replace(SUM, shape=str([n] * n), site="x" * n) for n in range(1, 60)]

    def write() -> None:
        while not ended:
            noting(log, members, *whats)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen, until = set(), time.monotonic() + 0.6
        while time.monotonic() < until:
            for call in collective_log.read_ring(tmp_path / "rank-00000.calls"):
                assert call.what == replace(whats[(call.number - 1) % len(whats)], shape=call.what.shape, key="")
                seen.add(call.number)
    finally:
        ended = True
        writer.join()
    assert len(seen) > 100


def test_a_ring_outlives_its_process(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from unisono.runtime.communication.collective_log import CollectiveLog, GroupState, Collective, encode_call
log, members = CollectiveLog(0, Path({str(tmp_path)!r})), GroupState("0", range(2), 0)
what = Collective("0", "0-1", "barrier")
log.add(members, what.fingerprint, encode_call(what))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert [call.what.operation for call in collective_log.read_ring(tmp_path / "rank-00000.calls")] == ["barrier"]


def test_long_names_fit_into_a_ring() -> None:
    log = CollectiveLog(0)
    long = Collective("g" * 200, "0-1", "all_reduce", "SUM", -1, "float32", "[1] " * 300, "/ünï" * 300 + "/task.py:7")
    noting(log, GroupState(long.group, range(2), 0), long)
    (call,) = log.calls()
    assert call.what.site.endswith("/task.py:7")
    assert call.what.shape.startswith("[1] [1]")
    assert call.fingerprint == long.fingerprint


# the digest -----------------------------------------------------------------------------------------------------------


KINDS = [
    replace(SUM, reduce="MAX"), replace(SUM, operation="reduce"), replace(SUM, dtype="int32"),
    replace(SUM, shape="[2, 2]"), replace(SUM, key="task.py:13 loss"), replace(SUM, root=1),
]  # fmt: skip


@pytest.mark.parametrize("other", KINDS)
def test_every_part_of_a_fingerprint_counts(other: Collective) -> None:
    assert other.fingerprint != SUM.fingerprint


def test_paths_of_hosts_do_not_count() -> None:
    assert replace(SUM, site="/home/me/task.py:12").fingerprint == SUM.fingerprint


def checks(*made: list[Collective], groups: list[list[int]] | None = None) -> int:
    """The sum over ranks that the comparison takes."""
    total = 0
    for rank, whats in enumerate(made):
        log = CollectiveLog(rank)
        for number, ranks in enumerate(groups or [list(range(len(made)))]):
            if rank in ranks:
                noting(log, GroupState(str(number), ranks, ranks.index(rank)), *whats)
        total += log.check()
    return total % 2**64


@given(st.lists(st.sampled_from([SUM, *KINDS]), max_size=20), st.integers(2, 9))
def test_ranks_that_did_the_same_add_up_to_zero(made: list[Collective], world: int) -> None:
    assert checks(*[made] * world) == 0


@given(st.lists(st.sampled_from([SUM, *KINDS]), min_size=1, max_size=20), st.integers(2, 9), st.data())
def test_one_rank_that_did_something_else_is_seen(made: list[Collective], world: int, data: st.DataObject) -> None:
    at, who = data.draw(st.integers(0, len(made) - 1)), data.draw(st.integers(0, world - 1))
    others = [
        [*made[:at], *made[at + 1 :]],
        [*made[:at], made[at], *made[at:]],
        [*made[:at], replace(made[at], shape="[9]"), *made[at + 1 :]],
    ]
    if made != made[::-1]:
        others.append(made[::-1])
    for other in others:
        assert checks(*[other if rank == who else made for rank in range(world)]) != 0


def test_groups_are_compared_among_their_own_members() -> None:
    meshes = [[0, 1], [2, 3], [0, 2], [1, 3]]
    other = replace(SUM, reduce="MAX")
    assert checks([SUM], [SUM], [SUM], [SUM], groups=meshes) == 0
    assert checks([SUM], [SUM], [other], [other], groups=meshes[:2]) == 0  # each pair for itself
    assert checks([SUM], [SUM], [other], [other], groups=meshes) != 0
    assert checks([SUM], [], [], [], groups=[[0]]) == 0  # nobody to differ from


def test_groups_of_which_only_other_threads_make_calls_are_no_difference() -> None:
    rings = {}
    for rank in range(2):
        log = CollectiveLog(rank)
        noting(log, GroupState("0", range(2), rank), SUM)
        noting(log, GroupState("1", range(2), rank), *[replace(SUM, group="1", unordered=True)] * (1 + rank))
        rings[rank] = log.calls()
    assert all(len(ring) == 2 + rank for rank, ring in rings.items())
    assert collective_log.explain_hang(rings) is None


def test_calls_that_stand_aside_are_kept_and_not_compared() -> None:
    (one, mine), (other, theirs) = pair()
    noting(one, mine, SUM, replace(SUM, operation="send", unordered=True))
    noting(other, theirs, SUM)
    assert (one.check() + other.check()) % 2**64 == 0
    assert [(call.number, call.turn) for call in one.calls()] == [(1, 1), (2, 0)]
    assert collective_log.find_mismatch(0, one.calls(), 1, other.calls(), ended=True) is None


# which calls differ ---------------------------------------------------------------------------------------------------


def rings(*made: list[Collective]) -> dict[int, list[Call]]:
    found = {}
    for rank, whats in enumerate(made):
        log = CollectiveLog(rank)
        groups = {what.group: GroupState(what.group, range(2), rank) for what in whats}
        for what in whats:
            noting(log, groups[what.group], what)
        found[rank] = log.calls()
    return found


def test_the_first_call_that_differs_is_told_with_both_lines() -> None:
    other = replace(SUM, reduce="MAX", site="task.py:20")
    found = collective_log.explain_hang(rings([SUM, SUM, SUM], [SUM, other, SUM]))
    assert str(found) == (
        "call 2: rank 0 did all_reduce(SUM, float32, [4]) at task.py:12, "
        "rank 1 did all_reduce(MAX, float32, [4]) at task.py:20"
    )


def test_one_that_is_only_further_ahead_is_no_difference_until_both_have_come_to_the_end() -> None:
    made = rings([SUM, SUM], [SUM])
    assert collective_log.explain_hang(made) is None
    found = collective_log.find_mismatch(0, made[0], 1, made[1], ended=True)
    assert str(found) == "call 2: rank 0 did all_reduce(SUM, float32, [4]) at task.py:12, rank 1 made no such call"


def test_two_that_wait_for_each_other_in_two_groups_are_told() -> None:
    compare = replace(SUM, group="7", site=collective_log.COMPARISON)
    found = collective_log.explain_hang(rings([SUM, SUM], [SUM, compare]))
    assert str(found) == (
        "their last call: rank 0 did all_reduce(SUM, float32, [4]) at task.py:12, "
        "rank 1 came to the comparison of collectives"
    )
    assert collective_log.explain_hang(rings([SUM, compare, SUM], [SUM, compare])) is None


def test_a_difference_is_found_whatever_the_rings_have_lost() -> None:
    many = [SUM] * (collective_log.RING_SIZE + 7)
    made = rings([*many, SUM, SUM], [*many, replace(SUM, dtype="int32"), SUM])
    found = collective_log.explain_hang(made)
    assert found is not None
    assert found.turn == collective_log.RING_SIZE + 8
    long_ago = rings([SUM, *many], [replace(SUM, dtype="int32"), *many])
    assert collective_log.explain_hang(long_ago) is None


def test_members_are_told_as_ranges() -> None:
    assert collective_log.format_ranks([3, 0, 1, 2, 7]) == "0-3,7"
    assert collective_log.format_ranks(range(0, 4096, 3)) == ""
