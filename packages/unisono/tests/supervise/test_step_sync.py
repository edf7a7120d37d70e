"""What all ranks do next is decided by all of them, whoever had the wish."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from packages.unisono.tests import processes
from unisono.runtime.communication.communicator import Communicator, ProcessInfo, SingleProcess
from unisono.runtime.errors import Preempted, RunError
from unisono.supervise import preemption, step_sync
from unisono.supervise.run_lock import RunLock
from unisono.supervise.step_sync import Decision, StepSync


class Beside(SingleProcess):
    """Rank 0 of two; the other one has wishes of its own."""

    size = 2

    def __init__(self, *others: int) -> None:
        self.others = others

    def gather(self, value: Any, what: str) -> list[Any]:
        return [value, value]

    def reduce_max(self, numbers: Sequence[int], what: str) -> list[int]:
        others = [*self.others, *[0] * (len(numbers) - len(self.others))]
        return [max(pair) for pair in zip(numbers, others, strict=True)]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets since when this process has been asked to end."""
    return lambda seconds: monkeypatch.setattr(preemption, "seconds_since_signal", lambda: seconds)


def look(made: StepSync) -> Decision:
    made._last_look = 0.0
    return made.decide()


def test_nothing_is_decided_where_nobody_wishes_anything(tmp_path: Path):
    assert StepSync(SingleProcess(), tmp_path, 30).decide() == Decision()
    assert StepSync(Beside(), tmp_path, 30).decide() == Decision()


@pytest.mark.parametrize("target", ["nowhere", "private"])
def test_a_link_in_the_folder_is_no_wish(tmp_path: Path, target: str):
    """Whoever may write into a run's folder for a moment could leave one, and a dangling one ended the run."""
    made = StepSync(SingleProcess(), tmp_path, 30)
    (tmp_path / "private").touch()
    for name in ("stop", "save"):
        (tmp_path / name).symlink_to(target)
    assert look(made) == Decision()
    assert (tmp_path / "private").exists() and (tmp_path / "stop").is_symlink()


@pytest.mark.parametrize(("name", "decided"), [("stop", Decision(save=True, stop=True)), ("save", Decision(save=True))])
def test_a_file_in_the_folder_is_a_wish_that_is_taken_once(tmp_path: Path, name: str, decided: Decision):
    made = StepSync(SingleProcess(), tmp_path, 30)
    (tmp_path / name).touch()
    assert look(made) == decided
    assert not (tmp_path / name).exists()
    assert look(made) == Decision()


def test_what_an_earlier_start_was_asked_for_is_forgotten(tmp_path: Path):
    (tmp_path / "stop").touch()
    assert look(StepSync(SingleProcess(), tmp_path, 30)) == Decision()


def test_the_folder_is_looked_at_twice_a_second_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(step_sync.time, "monotonic", lambda: now[0])
    made = StepSync(SingleProcess(), tmp_path, 30)
    (tmp_path / "stop").touch()
    now[0] += 0.4
    assert made.decide() == Decision()
    now[0] += 0.2
    assert made.decide().stop


def test_the_signal_of_another_rank_is_everyones(tmp_path: Path):
    assert StepSync(Beside(0, 0, 1), tmp_path, 30).decide() == Decision(save=True, preempted=True)


def test_a_save_that_fits_the_deadline_is_made(tmp_path: Path, waits: Any):
    made = StepSync(SingleProcess(), tmp_path, 30)
    waits(14.0)
    assert made.decide(saving=10.0).save
    waits(15.5)
    decided = made.decide(saving=10.0)
    assert (decided.save, decided.preempted) == (False, True)
    assert (
        decided.not_saved_because
        == "saving takes about 10.0 s, but only 14.5 s were left of launch.preempt_deadline=30"
    )


def test_the_longest_save_of_all_ranks_and_the_earliest_signal_count(tmp_path: Path, waits: Any):
    waits(1.0)
    assert not StepSync(Beside(0, 0, 1, 25_000), tmp_path, 30).decide(saving=1.0).save
    assert not StepSync(Beside(0, 0, 29_500), tmp_path, 30).decide(saving=1.0).save


def test_a_save_of_unknown_duration_is_tried(tmp_path: Path, waits: Any):
    waits(29.0)
    assert StepSync(SingleProcess(), tmp_path, 30).decide().save


@pytest.mark.parametrize(("deadline", "left"), [(30, 30 - 10 - 2), (2, 2 - 1 - 0.5), (0.4, -0.7)])
def test_a_run_that_has_to_go_knows_how_long_it_may_still_wait(tmp_path: Path, deadline: float, left: float) -> None:
    assert StepSync(Beside(), tmp_path, deadline).decide().seconds_left == math.inf
    since = 10_001 if deadline == 30 else 1_001
    found = StepSync(Beside(0, 0, since), tmp_path, deadline).decide()
    assert found.seconds_left == pytest.approx(left)
    assert (Decision() | found).seconds_left == found.seconds_left
    assert (found | Decision(seconds_left=1e9)).seconds_left == found.seconds_left


def test_decisions_of_one_step_add_up():
    later = Decision(save=True, stop=True) | Decision(preempted=True, not_saved_because="no time")
    assert later == Decision(save=True, stop=True, preempted=True, not_saved_because="no time")


@pytest.mark.parametrize(
    ("saved", "told"),
    [
        (7, "preempted after step 7 of 9, which is saved"),
        (5, "after step 7 of 9, which is not saved: no time; the newest checkpoint is from step 5"),
        (0, "after step 7 of 9, which is not saved: no time; there is no checkpoint yet"),
    ],
)
def test_the_end_says_what_is_saved(tmp_path: Path, saved: int, told: str):
    error = StepSync(SingleProcess(), tmp_path, 30).preempted_error(7, 9, saved, "no time")
    assert told in str(error)
    assert error.exit_code == 75


def test_a_run_that_was_taken_over_ends_on_every_rank_and_before_it_writes(tmp_path: Path):
    (tmp_path / "lease").mkdir()
    made = StepSync(SingleProcess(), tmp_path, 30, RunLock(tmp_path, 3))
    made.decide()
    made.refuse_if_lost()
    (tmp_path / "lease" / "00000004.json").write_text(
        '{"host": "far", "machine": "x", "pid": 7, "born": "1", "released": false}'
    )
    made._last_lock_look = 0.0
    for act in (made.decide, made.refuse_if_lost):
        with pytest.raises(RunError, match="was taken over by process 7 on far"):
            act()


# on two processes ---------------------------------------------------------------------------------------------------


def boundaries(place: ProcessInfo, group: Communicator, folder: Path) -> tuple[list[Decision], float]:
    """Rank 1 gets a signal after its third boundary, rank 0 finds a file after its sixth; and what one costs."""
    with preemption.handle_signals():
        made = StepSync(group, folder, 30)
        made.take_over_signals()
        decided = []
        for step in range(8):
            if step == 3 and place.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if step == 6 and place.rank == 0:
                (folder / "stop").touch()
                made._last_look = 0.0
            decided.append(made.decide())
        began = time.monotonic()
        for _ in range(200):
            made.decide()
        return decided, (time.monotonic() - began) / 200


def test_ranks_decide_the_same_at_the_same_step(tmp_path: Path):
    (first, cost), (second, _) = processes.run(boundaries, 2, tmp_path)
    assert first == second
    assert [(d.preempted, d.stop) for d in first] == [
        *[(False, False)] * 3,
        *[(True, False)] * 3,
        (True, True),
        (True, False),
    ]
    assert cost < 0.1  # measured 0.2 ms alone


def test_an_ear_is_deaf_again_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    with preemption.handle_signals():
        assert signal.getsignal(signal.SIGTERM) != before
        with pytest.raises(Preempted, match="before the first step"), preemption.handle_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.fixture(autouse=True)
def hears_nothing() -> Iterator[None]:
    yield
    assert preemption._listener is None
