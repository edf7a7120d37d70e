"""Ranks that make different numbers of updates learn it from each other, and those that are slow are waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from unisono.proof.scripts.recording import rank_progress
from unisono.proof.scripts.recording.rank_progress import (
    RankProgress,
    UnequalUpdatesError,
    describe_ended,
    describe_waiting,
)
from unisono.runtime.errors import ConfigError


def build(folder: Path, timeout: float = 2.0) -> tuple[RankProgress, RankProgress]:
    return RankProgress(folder, 0, 2, timeout), RankProgress(folder, 1, 2, timeout)


def later(act: Callable[[], None]) -> threading.Thread:
    def run() -> None:
        time.sleep(0.2)
        act()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_rank_waits_for_the_update_of_another_one_that_makes_more_passes(tmp_path: Path) -> None:
    first, second = build(tmp_path, timeout=60.0)
    first.begin_pass()
    second.begin_pass()
    second.begin_pass()
    thread = later(second.begin_update)
    first.begin_update()
    thread.join()


def test_a_rank_whose_update_another_one_leaves_out_learns_both_counts(tmp_path: Path) -> None:
    first, second = build(tmp_path)
    first.begin_pass()
    second.begin_pass()
    thread = later(second.begin_pass)
    with pytest.raises(
        UnequalUpdatesError,
        match=r"rank 0 makes its update 1 after backward pass 1, and rank 1 has ma"
        r"de 0 updates and is in backward pass 2",
    ):
        first.begin_update()
    thread.join()


def test_a_rank_that_begins_before_one_that_waits_for_it_ends_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the second stage of a pipeline by hand waits for what the first one computes; a slow one is waited for."""
    monkeypatch.setattr(rank_progress, "_RECEIVING", 0.1)
    first, second = build(tmp_path)
    thread = later(second.begin_records)
    first.begin_records()
    thread.join()
    (tmp_path / "pipeline").mkdir()
    first, second = build(tmp_path / "pipeline")
    second.begin_receiving()
    with pytest.raises(ConfigError, match="rank 0 begins its first forward pass, and rank 1 waits for what another"):
        first.begin_records()


def test_a_rank_that_waits_for_one_in_the_same_pass_goes_on_waiting(tmp_path: Path) -> None:
    first, second = build(tmp_path, timeout=0.1)
    first.begin_pass()
    second.begin_pass()
    thread = later(second.begin_update)
    first.begin_update()
    thread.join()


def test_a_rank_that_waits_for_one_that_has_ended_learns_so(tmp_path: Path) -> None:
    first, second = build(tmp_path, timeout=60.0)
    thread = later(second.close)
    with pytest.raises(UnequalUpdatesError, match="rank 1 has made 0 updates and ended after backward pass 0"):
        first.begin_update()
    thread.join()


def test_a_rank_that_waits_for_an_update_of_another_one_is_told_from_ranks_that_wait_elsewhere(tmp_path: Path) -> None:
    first, second = build(tmp_path)
    first.begin_pass()
    second.begin_pass()
    assert describe_waiting(tmp_path, 2) == ""
    first.begin_pass()
    assert describe_ended(tmp_path, 2) == ""
    later(second.close)
    with pytest.raises(UnequalUpdatesError):
        first.begin_update()
    assert "rank 0 is at update 1" in describe_waiting(tmp_path, 2)
    assert describe_ended(tmp_path, 2).startswith("rank 1 has ended after 0 updates and 1 backward passes, and rank 0")


def test_a_rank_that_has_ended_waits_for_others_but_not_for_one_that_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batches are through, and another rank is in a backward pass that it will never make."""
    monkeypatch.setattr(rank_progress, "_RECEIVING", 0.1)
    first, second = build(tmp_path)
    thread = later(second.close)  # it evaluates meanwhile
    first.end()
    thread.join()
    (tmp_path / "uneven").mkdir()
    first, second = build(tmp_path / "uneven")
    second.begin_pass()
    with pytest.raises(
        UnequalUpdatesError,
        match=r"rank 0 has ended after 0 updates and 0 backward passes, and rank 1 waits in or after its backward pass "
        r"1, which began at test_rank_progress\.py:\d+",
    ):
        first.end()
