"""How many updates of a script are followed, and who decides it."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.proof.scripts.recording import followed_updates
from unisono.proof.scripts.recording.followed_updates import FollowedUpdates


def follow(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    *,
    each: float,
    dear: float = 0.0,
    waits: float = 0.0,
    begins: int = 0,
    further: bool = True,
) -> int:
    """After how many of forty updates a script is ended that has started in 4 s.

    Args:
        monkeypatch: of the test.
        folder: of the trace.
        each: processor time of an update.
        dear: more of the sixth, after which the script evaluates.
        waits: time of an update in which nothing is computed.
        begins: the update with which the second epoch begins.
        further: whether more than four updates may be followed.
    """
    now = {"processor": 4.0, "time": 100.0}
    monkeypatch.setattr(followed_updates.time, "process_time", lambda: now["processor"])
    monkeypatch.setattr(followed_updates.time, "monotonic", lambda: now["time"])
    followed = FollowedUpdates(4, 300.0, further)
    for made in range(40):
        followed.begin_update(made, folder, lambda _: begins)
        took = each + (1.0 if made < 2 else 0.0) + (dear if made == 5 else 0.0)
        now["processor"] += took
        now["time"] += took + waits
        if made + 1 >= followed.last:
            return made + 1
    return 40


def test_a_script_of_cheap_updates_is_followed_for_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its first updates take longer, which says nothing of the others."""
    assert follow(monkeypatch, tmp_path, each=0.02) == 17
    assert follow(monkeypatch, tmp_path, each=0.02, begins=9) == 17


def test_a_script_of_dear_updates_is_followed_as_far_as_was_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert follow(monkeypatch, tmp_path, each=0.2) == 4
    assert follow(monkeypatch, tmp_path, each=0.02, waits=10.0) == 4
    assert follow(monkeypatch, tmp_path, each=0.2, begins=9) == 9
    assert follow(monkeypatch, tmp_path, each=0.2, begins=18) == 4


def test_a_script_is_followed_no_further_than_was_asked_if_it_was_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert follow(monkeypatch, tmp_path, each=0.02, begins=9, further=False) == 4


def test_updates_that_leave_much_in_the_trace_are_dear(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "gradients.npz").open("wb") as file:
        file.truncate(3 * 2**25)
    assert follow(monkeypatch, tmp_path, each=0.02) == 4


def test_a_script_that_evaluates_for_long_later_is_ended_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert follow(monkeypatch, tmp_path, each=0.02, dear=2.0) == 7
    assert follow(monkeypatch, tmp_path, each=0.02, dear=2.0, begins=9) == 9
