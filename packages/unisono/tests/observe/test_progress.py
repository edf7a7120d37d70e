"""The console: plain lines in a file, one live line on a terminal, and the times that are told."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from unisono.observe import progress
from unisono.observe.progress import Progress, Speed, Stopwatch, format_count


def speed(mfu: float | None = None, seconds: float = 1.0, wait: float = 0.0) -> Speed:
    return Speed("tokens", 12_345.0, mfu, wait, seconds)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is written to a terminal, on which the console now stands."""
    screen = io.StringIO()
    monkeypatch.setattr(
        progress, "RunConsole", lambda **how: Console(file=screen, force_terminal=True, width=120, **how, _environ={})
    )
    return screen


# plain lines ----------------------------------------------------------------------------------------------------------


def shown(capsys: pytest.CaptureFixture[str], total: int, every: int, first: int = 1) -> list[int]:
    """The steps of which a line is printed."""
    with Progress(total, every, shown=True) as console:
        for step in range(first, total + 1):
            console.step(step, 0.5, speed())
    return [int(line.removeprefix("step").split("/")[0]) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("total", "every", "first", "steps"),
    [
        (7, 3, 1, [1, 3, 6, 7]), (6, 3, 1, [1, 3, 6]), (3, 1, 1, [1, 2, 3]), (4, 100, 1, [1, 4]), (1, 10, 1, [1]),
        pytest.param(7, 3, 3, [3, 6, 7], id="a resumed run"),
    ],
)  # fmt: skip
def test_without_a_terminal_a_line_stands_for_the_first_the_last_and_every_so_many_steps(
    capsys: pytest.CaptureFixture[str], total: int, every: int, first: int, steps: list[int]
) -> None:
    assert shown(capsys, total, every, first) == steps


@pytest.mark.parametrize(("mfu", "told"), [(0.4321, "mfu 43.2 %  "), (None, "")])
def test_a_line_tells_step_loss_speed_utilisation_waiting_and_time_left(
    capsys: pytest.CaptureFixture[str], mfu: float | None, told: str
) -> None:
    """Utilisation stands there only where it is known."""
    with Progress(100, 10, shown=True) as console:
        console.step(10, 1.23456, speed(mfu=mfu, seconds=2.0, wait=0.056))
    line = f"step  10/100  loss 1.2346  12.3k tokens/s  {told}data wait 5.6 %  eta 3:00\n"
    assert capsys.readouterr().out == line


@pytest.mark.parametrize(
    ("left", "seconds", "clock"),
    [
        (0, 1.0, "0:00"),
        (1, 0.4, "0:00"),
        (9, 1.0, "0:09"),
        (60, 1.0, "1:00"),
        (119, 30.25, "1:00:00"),
        (99, 3601.0, ""),
    ],
)
def test_the_time_left_is_minutes_and_seconds_or_hours(
    capsys: pytest.CaptureFixture[str], left: int, seconds: float, clock: str
) -> None:
    with Progress(left + 1, 1, shown=True) as console:
        console.step(1, 1.0, speed(seconds=seconds))
    assert capsys.readouterr().out.rstrip().rpartition("eta ")[2] == (clock or "99:01:39")


def test_the_time_left_is_smoothed_over_steps(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(102, 1, shown=True) as console:
        console.step(1, 1.0, speed(seconds=1.0))
        console.step(2, 1.0, speed(seconds=11.0))
    assert capsys.readouterr().out.rstrip().rpartition("eta ")[2] == "3:20"  # 100 steps of 0.9 · 1 + 0.1 · 11 seconds


def test_what_is_not_shown_is_silent(capsys: pytest.CaptureFixture[str], terminal: io.StringIO) -> None:
    with Progress(2, 1, shown=False) as console:
        console.say("a line")
        console.step(1, 1.0, speed())
        console.step(2, 1.0, speed())
    assert capsys.readouterr() == ("", "")
    assert terminal.getvalue() == ""


def test_a_line_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    line = "mixture 1:100:1 [bold]of[/bold] runs/a, " + "a long line " * 30 + "end"
    with Progress(1, 1, shown=True) as console:
        console.say(line)
    assert capsys.readouterr().out == line + "\n"


# on a terminal --------------------------------------------------------------------------------------------------------


def test_a_terminal_shows_every_step_live(terminal: io.StringIO) -> None:
    with Progress(50, 10, shown=True) as console:
        for step in (1, 2, 3):
            console.step(step, 1.0 / step, speed())
            assert console._live is not None
            console._live.refresh()
            assert f"  {step}/50  eta 0:{50 - step}\nloss {1.0 / step:.4f}" in terminal.getvalue()


def test_what_is_said_and_the_last_step_stay_on_a_terminal(terminal: io.StringIO) -> None:
    with Progress(2, 1, shown=True) as console:
        console.step(1, 1.0, speed())
        console.say("evaluated")
        console.step(2, 0.5, speed())
    clear, show_cursor = "\x1b[2K", "\x1b[?25h"
    assert "evaluated\n" in terminal.getvalue()
    assert "\n" in terminal.getvalue().rpartition("loss 0.5000")[2]
    assert clear in terminal.getvalue().rpartition("1/2")[2] or "1/2" not in terminal.getvalue()
    assert show_cursor in terminal.getvalue().rpartition("2/2")[2]
    with pytest.raises(ZeroDivisionError), Progress(3, 1, shown=True):
        raise ZeroDivisionError
    assert terminal.getvalue().rindex(show_cursor) > terminal.getvalue().rindex("\x1b[?25l"), "even after an error"


# numbers and times ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"), (0.4, "0"), (950, "950"), (1_000, "1.0k"), (12_345, "12.3k"),
        (1_000_000, "1.00M"), (2_412_480, "2.41M"), (7_240_000_000, "7.24G"), (1.5e12, "1500.00G"),
    ],
)  # fmt: skip
def test_a_number_is_short_for_people(number: float, text: str) -> None:
    assert format_count(number) == text


class Clock:
    """A `perf_counter` that moves when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(progress, "perf_counter", clock)
    yield clock


@pytest.mark.parametrize(
    ("waits", "between", "lap"),
    [
        pytest.param([1.0], 3.0, (4.0, 0.25), id="one wait"),
        pytest.param([1.0, 1.0], 1.0, (4.0, 0.5), id="several waits add up"),
        pytest.param([1.0], 0.0, (1.0, 1.0), id="nothing but waiting"),
        pytest.param([], 0.0, (0.0, 0.0), id="no time at all"),
    ],
)
def test_a_lap_is_the_time_of_a_step_and_the_share_of_it_that_was_waited_for_data(
    clock: Clock, waits: list[float], between: float, lap: tuple[float, float]
) -> None:
    watch = Stopwatch()
    for wait in waits:
        with watch.waiting():
            clock.now += wait
        clock.now += between
    assert watch.lap() == lap
    clock.now += 2.0
    assert watch.lap() == (2.0, 0.0), "a lap begins anew"


def test_colours_that_are_forced_make_no_terminal_of_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as CI does, and the kernel of a notebook for what it starts
    with Progress(1, 1, shown=True) as console:
        console.step(1, 0.5, speed())
    assert "\x1b" not in capsys.readouterr().out


def test_steps_that_a_notebook_shows_are_not_printed_beside_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(progress.FOLLOWED_VARIABLE, "1")
    with Progress(1, 1, shown=True) as console:
        console.say("a permanent line")
        console.step(1, 0.5, speed())
        console.evaluation(1, {"loss": 0.5}, 3, 0.1)
    assert capsys.readouterr().out == "a permanent line\n"
