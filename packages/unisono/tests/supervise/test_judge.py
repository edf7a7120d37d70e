"""Who is stuck, who only waits, and what is said of it."""

from __future__ import annotations

import shutil

import pytest

from unisono.runtime.heartbeat import NEW_SHAPE, PHASES, HeartbeatRecord
from unisono.supervise.hangs import hang_detection, stacks
from unisono.supervise.hangs.hang_detection import PhaseLimits, RankStatus
from unisono.supervise.hangs.stacks import Stack

LIMITS = PhaseLimits()


def seen(
    rank: int,
    phase: str,
    still: float = 100.0,
    detail: str = "",
    *,
    outer: str = "record",
    made: int = 3,
    state: str = "S",
    stopped: float = 0.0,
    durations: tuple[float, ...] = (1.0, 1.0, 1.0),
) -> RankStatus:
    outer = "compute" if phase == "wait" and outer == "record" else outer
    totals = dict.fromkeys(PHASES, 0)
    return RankStatus(
        HeartbeatRecord(rank, 100 + rank, 9, made, phase, outer, detail, 0, 0, totals, durations),
        state,
        still,
        stopped,
    )


def ranks(*each: RankStatus) -> dict[int, RankStatus]:
    return {one.record.rank: one for one in each}


def stack(*frames: str) -> Stack:
    lines = [f'  File "{frame}", line {number} in f{number}' for number, frame in enumerate(frames, 1)]
    return stacks.parse_stack("\n".join(["Thread 0x1 (most recent call first):", '  File "/other.py", line 9 in g', "",
                                    "Current thread 0x2 (most recent call first):", *lines]))  # fmt: skip


TORCH = "/env/lib/site-packages/torch/"


# limits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "limit", "key"),
    [
        (seen(0, "compute"), 20.0, "launch.stuck_after"),
        (seen(0, "compute", durations=(10.0, 10.0, 200.0)), 50.0, "launch.stuck_after"),
        (seen(0, "wait", detail="x"), 20.0, "launch.stuck_after"),
        (seen(0, "compute", durations=()), 300.0, "launch.deadlines.shape"),
        (seen(0, "compute", detail=NEW_SHAPE), 300.0, "launch.deadlines.shape"),
        (seen(0, "setup"), 1800.0, "launch.deadlines.setup"),
        (seen(0, "data", outer="setup"), 1800.0, "launch.deadlines.setup"),
        (seen(0, "data"), 600.0, "launch.deadlines.data"),
        (seen(0, "data", durations=(200.0,)), 1000.0, "launch.deadlines.data"),
        (seen(0, "save"), 1800.0, "launch.deadlines.save"),
        (seen(0, "wait", outer="save"), 1800.0, "launch.deadlines.save"),
        (seen(0, "record"), 1800.0, "launch.deadlines.save"),
        (seen(0, "evaluate"), 600.0, "launch.deadlines.evaluate"),
        (seen(0, "start"), 1800.0, "launch.deadlines.setup"),
    ],
)
def test_each_phase_has_a_limit_and_a_setting(one: RankStatus, limit: float, key: str):
    assert LIMITS.limit_for(one.record) == (limit, key)


# when ----------------------------------------------------------------------------------------------------------------


def test_a_rank_that_is_past_its_time_stalls_the_run_if_the_others_wait_for_it():
    assert hang_detection.is_stalled(ranks(seen(0, "wait", 30), seen(1, "compute", 21)), LIMITS)
    assert not hang_detection.is_stalled(ranks(seen(0, "wait", 30), seen(1, "compute", 19)), LIMITS)


@pytest.mark.parametrize("phase", ["data", "save", "evaluate", "setup"])
def test_whoever_waits_for_a_rank_in_a_long_phase_is_not_stuck(phase: str):
    assert not hang_detection.is_stalled(
        ranks(seen(0, "wait", 290), seen(1, "compute", 290), seen(2, phase, 290)), LIMITS
    )
    assert hang_detection.is_stalled(
        ranks(seen(0, "wait", 1900), seen(1, "compute", 1900), seen(2, phase, 1900)), LIMITS
    )


def test_ranks_that_all_wait_are_stalled_and_other_nodes_get_the_first_word():
    everyone = ranks(seen(0, "wait", 30), seen(1, "wait", 30))
    assert hang_detection.is_stalled(everyone, LIMITS)
    assert not hang_detection.is_stalled(everyone, LIMITS, others=True)
    assert hang_detection.is_stalled(ranks(seen(0, "wait", 51), seen(1, "wait", 51)), LIMITS, others=True)


def test_a_rank_that_left_or_is_looked_at_by_a_debugger_stalls_nothing():
    assert not hang_detection.is_stalled(ranks(seen(0, "left", 900, "0"), seen(1, "left", 900, "0")), LIMITS)
    assert not hang_detection.is_stalled(ranks(seen(0, "wait", 900), seen(1, "compute", 900, state="t")), LIMITS)


def test_a_process_that_is_stopped_is_frozen_in_any_phase():
    assert hang_detection.find_frozen(ranks(seen(0, "wait"), seen(1, "save", state="T", stopped=21)), LIMITS) == [1]
    assert hang_detection.find_frozen(ranks(seen(0, "wait"), seen(1, "save", state="T", stopped=19)), LIMITS) == []


# who -----------------------------------------------------------------------------------------------------------------


def test_the_rank_that_does_not_wait_is_named_with_the_line_of_the_user_s_code():
    answers = {
        0: stack(f"{TORCH}autograd/graph.py"),
        1: stack(f"{TORCH}nn/linear.py", "/home/me/small.py", "/home/me/deep.py"),
    }
    found = hang_detection.describe_stuck(
        ranks(seen(0, "wait", 30, "the gradients of step 4"), seen(1, "compute", 31)), answers, LIMITS, "host"
    )
    assert (found.code, found.rank) == (10, 1)
    assert found.text.startswith(
        "rank 1 (host, process 101) is stuck in step 4, compute, at /home/me/small.py:2 in f2, "
    )
    assert ", for 31 s (limit 20 s, launch.stuck_after); rank 0 waits for the gradients of step 4" in found.text
    assert found.ranks["0"]["at"] == "in step 4, compute, waiting for the gradients of step 4"


def test_frames_of_libraries_are_not_the_user_s():
    answer = stack(f"{TORCH}nn/linear.py", stacks.__file__, "/home/me/small.py", "/home/me/deep.py")
    assert str(answer.user_frame) == "/home/me/small.py:3 in f3"
    assert str(stack(f"{TORCH}nn/linear.py").relevant_frame) == "torch/nn/linear.py:1 in f1"


def test_the_main_thread_is_the_last_one():
    assert [frame.file for frame in stack("/home/me/small.py").frames] == ["/home/me/small.py"]


def test_a_rank_in_a_collective_of_torch_is_no_suspect():
    answers = {0: stack(f"{TORCH}distributed/distributed_c10d.py"), 1: stack("/home/me/small.py")}
    assert hang_detection.find_suspects(ranks(seen(0, "compute"), seen(1, "compute")), answers) == [1]


def test_a_rank_in_its_backward_pass_is_a_suspect_only_if_no_other_is_found():
    backward, user = stack(f"{TORCH}autograd/graph.py"), stack("/home/me/small.py")
    both = ranks(seen(0, "compute"), seen(1, "compute"))
    assert hang_detection.find_suspects(both, {0: backward, 1: user}) == [1]
    assert hang_detection.find_suspects(both, {0: backward, 1: backward}) == []
    assert hang_detection.find_suspects(ranks(seen(0, "compute"), seen(1, "wait")), {0: backward, 1: backward}) == [0]


def test_the_rank_that_is_behind_is_named():
    assert hang_detection.find_suspects(
        ranks(seen(0, "compute", made=4), seen(1, "data", made=3), seen(2, "wait")), {}
    ) == [1]


def test_a_stopped_rank_and_one_in_the_kernel_come_first():
    assert hang_detection.find_suspects(ranks(seen(0, "compute"), seen(1, "wait", state="T")), {}) == [1]
    both = ranks(seen(0, "compute"), seen(1, "compute", state="D"))
    assert hang_detection.find_suspects(both, {}) == [1]
    assert (
        "in kernel I/O, which nothing can interrupt: it cannot be killed"
        in hang_detection.describe_stuck(both, {}, LIMITS, "h").text
    )


def test_a_frozen_rank_is_told_with_how_long_it_has_been_so():
    found = hang_detection.describe_stuck(
        ranks(seen(0, "wait", 30, "x"), seen(1, "save", 60, state="T", stopped=22)), {}, LIMITS, "h"
    )
    assert "is frozen (stopped by a signal such as SIGSTOP) after step 3, save, for 22 s (limit 20 s" in found.text


def test_ranks_that_wait_for_different_things_are_told_so():
    found = hang_detection.describe_stuck(
        ranks(seen(0, "wait", 30, "a"), seen(1, "wait", 40, "b"), seen(2, "wait", 50, "a")), {}, LIMITS, "h"
    )
    assert (found.rank, found.code) == (None, 10)
    assert "for 30 s: ranks 0, 2 wait for a; rank 1 waits for b; they make different calls" in found.text


def test_ranks_that_wait_for_the_same_blame_what_is_between_them():
    found = hang_detection.describe_stuck(ranks(seen(0, "wait", 30, "a"), seen(1, "wait", 40, "a")), {}, LIMITS, "h")
    assert "ranks 0 to 1 wait for a; none of them is late, so the cause is the network" in found.text


@pytest.mark.parametrize(
    ("code", "memory", "told"),
    [
        (-9, False, "killed by signal 9"),
        (-9, True, "out of memory"),
        (137, True, "out of memory"),
        (-11, True, "killed by signal 11 (SIGSEGV)"),
        (-7, False, "killed by signal 7 (SIGBUS), for reading past the end of a file that was truncated meanwhile"),
        (0, False, "exit code 0 before the run was complete"),
        (3, False, "exit code 3"),
        (None, False, "see its launcher's output for the exit code"),
    ],
)
def test_a_rank_that_died_is_told_with_how(code: int | None, memory: bool, told: str):
    everyone = ranks(
        seen(0, "wait", 1, "the sums of step 4"), seen(1, "compute"), seen(2, "left", 1, "5 x", outer="wait")
    )
    found = hang_detection.describe_lost(1, everyone[1].record, everyone, "host", code, memory)
    assert found.code == 9
    assert found.text.startswith("rank 1 (host, process 101) died without a message, in step 4, compute: ")
    assert told in found.text
    assert "; rank 0 waited for the sums of step 4; rank 2 waited for x" in found.text


def test_a_rank_that_died_before_it_told_anything_is_told_so():
    assert (
        "rank 1 (host) died without a message, before it started: "
        in hang_detection.describe_lost(1, None, {}, "host", 1).text
    )


SAID = {
    "start": "before the first step, start",
    "setup": "before the first step, setup",
    "data": "in step 31, data",
    "compute": "in step 31, compute",
    "wait": "in step 31, compute, waiting for",
    "record": "after step 30, record",
    "save": "after step 30, save",
    "evaluate": "after step 30, evaluate",
    "end": "after step 30, which was its last, while ending",
    "left": "while leaving, after all of its work was done",
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_death_in_every_phase_of_a_run_is_told_truly(phase: str):
    """The claim: also in the last ones, of which it was said that they were in a step that does not exist."""
    outer, detail = {"left": ("end", "0 "), "wait": ("compute", "the sums")}.get(phase, (phase, ""))
    one = seen(1, phase, detail=detail, outer=outer, made=-1 if phase in ("start", "setup") else 30)
    text = hang_detection.describe_lost(1, one.record, ranks(one), "host", -9).text
    assert f"died without a message, {SAID[phase]}" in text


def test_a_rank_that_left_with_an_error_and_is_killed_is_told_with_both():
    one = seen(1, "left", detail="5 the sums", outer="wait")
    text = hang_detection.describe_lost(1, one.record, ranks(one), "host", -9).text
    assert "while leaving with exit code 5, in step 4, wait" in text


def test_a_full_shared_memory_is_not_called_a_truncated_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 30, 1 << 30, 4096))
    assert "most likely because /dev/shm is full (4 kB are free)" in hang_detection.describe_death(-7)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 30, 0, 1 << 30))
    assert "a file that was truncated meanwhile, or because /dev/shm was full" in hang_detection.describe_death(-7)
