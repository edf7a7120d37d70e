"""Long work shows how far it is, and quick work nothing."""

from __future__ import annotations

import itertools

import pytest

from unisono.runtime.display import work_progress


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(work_progress, "monotonic", made)
    return made


def test_no_silence_is_longer_than_five_seconds_and_a_moment(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """The claim: work that reports every second has a line at least every six, however slow it is."""
    heard = [clock.now]
    with work_progress.show_progress("tokenising", 10_000, "tokens", "documents", patience=2.0) as progress:
        for _ in range(60):
            clock.now += 1.0
            progress(1, 10)
            if line := capsys.readouterr().err:
                assert line.startswith("tokenising: ") and line.endswith(" tokens\n")
                heard.append(clock.now)
    assert max(later - before for before, later in itertools.pairwise(heard)) <= 6.0
    assert "of 10.0k documents" in line


def test_every_tenth_has_a_line_and_quick_work_none(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with work_progress.show_progress("out", 100) as progress:
        for _ in range(100):
            progress(1, 2)
    assert capsys.readouterr().err.splitlines()[-1] == "out: 100 of 100 records, 200 units"
    with work_progress.show_progress("out", 100, patience=2.0) as progress:
        for _ in range(100):
            progress(1, 2)
    assert capsys.readouterr().err == ""
