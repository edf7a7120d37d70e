"""The live display, looked at on pseudo-terminals of 60 and 120 columns: what it shows, and that nothing wraps."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from packages.unisono.tests.launch import jobs
from packages.unisono.tests.screen import Screen, show

SCRIPT = """
import sys, time
from unisono.observe.progress import Progress, Speed
from unisono.runtime.display.preparing import preparing
with preparing("building the model"):
    time.sleep(2.6)
with Progress(40, 10, shown=True, plain="plain" in sys.argv) as progress:
    progress.say("Digits: 2.4k parameters, 1 × cpu, single, fp32, 40 steps, global batch 32 = 1 × 1 × 32 rows")
    for step in range(1, 41):
        metrics = {"accuracy": step / 40, "a_rather_long_name_of_a_metric": 0.5, "lr": 3e-4}
        progress.step(step, 1 / step, Speed("rows", 1234.0, None, 0.01, 0.01), None, metrics)
        time.sleep(0.01)
        if step % 5 == 0:
            progress.evaluation(step, {"loss": 2 / step, **metrics, "another_long_name_of_a_metric": 1.0}, 500, 0.1)
    print("a line of the task")
"""


@pytest.mark.parametrize("width", [60, 120])
def test_bar_values_and_the_last_evaluations_stay_and_nothing_wraps(width: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    showing = show([sys.executable, "script.py"], tmp_path, width)
    shown = showing.screen.text
    assert (showing.code, showing.screen.wrapped) == (0, []), shown
    text = " ".join(shown.split())
    assert "Digits: 2.4k parameters" in text and "a line of the task" in shown
    assert "━ 40/40" in text and "eta" not in text
    for value in ("loss 0.0250", "accuracy 1", "a_rather_long_name_of_a_metric 0.5", "lr 0.0003", "1.2k rows/s"):
        assert value in text, f"{value} is not in one line of\n{shown}"
    evaluated = re.findall(r"^ +(\d+)  (0\.\d{4})", shown, re.MULTILINE)
    assert evaluated == [(str(step), f"{2 / step:.4f}") for step in (20, 25, 30, 35, 40)]
    assert "mfu" not in text
    assert any(re.search(r"━ {2}\d+/40 {2}eta 0:0\d", picture) for _, picture in showing.pictures), "while it runs"
    assert ("+2" in shown) == (width == 60), "columns that do not fit are counted"


def test_what_is_prepared_is_named_at_once_has_a_bar_after_two_seconds_and_goes_away(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    showing = show([sys.executable, "script.py"], tmp_path, 60)
    named = [when for when, picture in showing.pictures if "building the model" in picture]
    barred = [when for when, picture in showing.pictures if re.search(r"building the model  ─*━+─*  \d s", picture)]
    assert barred[0] - named[0] == pytest.approx(2.2, abs=0.7)
    assert "building" not in showing.screen.text


def test_plain_progress_is_the_same_on_a_terminal_as_in_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("time.sleep(2.6)", "pass"))
    shown = show([sys.executable, "script.py", "plain"], tmp_path, 200).screen.text
    piped = jobs.finished([sys.executable, "script.py"], tmp_path).stdout
    assert shown.split("\n")[1:] == piped.rstrip("\n").split("\n")[1:]
    assert "step 40/40  loss 0.0250  1.2k rows/s  data wait 1.0 %  eta 0:00" in piped
    assert "eval after step 40: loss 0.0500" in piped


def test_a_run_begins_with_two_lines_and_ends_with_where_it_is(tmp_path: Path) -> None:
    jobs.task_file(tmp_path)
    words = "train", "small.py:Small", "train.steps=6", "train.global_batch=8", "eval.every=2", "run.name=a"
    showing = show([jobs.UNISONO, *words], tmp_path, 120)
    assert (showing.code, showing.screen.wrapped) == (0, []), showing.screen.text
    lines = [line for line in showing.screen.text.split("\n") if line]
    assert lines[0].startswith("Small: 4 parameters, 1 × cpu, single, fp32, 6 steps, global batch 8 = 1 × 1 × 8 rows")
    assert re.fullmatch(r"  adamw, lr 0.0003, weight decay 0.01: 3 parameters in .*; 1 more group in the log", lines[1])
    assert lines[2] == "run: runs/a"
    assert lines[3].split() == ["eval", "after", "step", "loss", "bias"]
    assert [line.split()[0] for line in lines[4:7]] == ["2", "4", "6"]
    assert "starting small.py:Small …" in showing.pictures[0][1]
    log = (tmp_path / "runs" / "a" / "logs" / "rank-00000.log").read_text()
    assert all(
        f": {line}" in log for line in ("rows: 40", "adamw, lr 0.0003, weight decay 0: 1 parameters in", "loading:")
    )


def test_the_screen_of_these_tests_sees_what_wraps() -> None:
    screen = Screen(5)
    screen.write("abcde\r\n\x1b[31mfghijk\x1b[0m\r\n12\r3\x1b[1A\x1b[2K")
    assert (screen.lines[0], screen.wrapped, screen.lines[1:]) == ("abcde", ["fghij"], ["fghij", "", "32"])


LONG_EVALUATION = """
import time
from unisono.observe.progress import Progress, Speed, show_evaluation
with Progress(40, 10, shown=True) as progress:
    progress.step(1, 1.0, Speed("rows", 1234.0, None, 0.01, 0.01))
    for done in range(0, 512, 64):
        progress.evaluating(1, done, 512)
        time.sleep(0.5)
    progress.evaluation(1, {"loss": 2.0}, 512, 4.0)
    progress.evaluating(2, 0, 512)
    time.sleep(0.5)
    progress.evaluation(2, {"loss": 1.0}, 512, 0.5)
with show_evaluation(512, shown=True) as report:
    for done in range(0, 512, 64):
        report(done, 512)
        time.sleep(0.5)
print("done")
"""


@pytest.mark.parametrize("width", [60, 120])
def test_a_long_evaluation_has_a_bar_after_two_seconds_and_a_short_one_none(width: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LONG_EVALUATION)
    showing = show([sys.executable, "script.py"], tmp_path, width)
    assert (showing.code, showing.screen.wrapped) == (0, []), showing.screen.text
    drawn = re.compile(r"━.* evaluating after step (\d): (\d+)/512 rows")
    found = [match for _, picture in showing.pictures for match in drawn.findall(picture)]
    assert {step for step, _ in found} == {"1"}, "the evaluation after step 2 takes half a second"
    assert min(int(done) for _, done in found) >= 192 and {"448", "256"} <= {done for _, done in found}
    assert "evaluating" not in showing.screen.text, "it goes away with the evaluation"
    assert any(re.search(r"evaluating ━.*448 of 512 rows", picture) for _, picture in showing.pictures), "without a run"


def test_a_long_evaluation_writes_nothing_into_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LONG_EVALUATION)
    done = jobs.finished([sys.executable, "script.py"], tmp_path)
    assert "evaluating" not in done.stdout + done.stderr and "done" in done.stdout


def test_an_error_on_a_narrow_terminal_breaks_between_words_and_no_command(tmp_path: Path) -> None:
    message = "one long sentence about what is wrong with a run. Resume with:\\n  unisono resume runs/a-name other=1"
    code = f"from unisono.runtime.console import say; say('{message}', error=True)"
    shown = show([sys.executable, "-c", code], tmp_path, width=30)
    assert shown.screen.text.splitlines()[0] == "one long sentence about what"
    assert shown.screen.wrapped == ["  unisono resume runs/a-name ot"[:30]], (
        "the command alone, which the terminal joins"
    )


def test_the_first_words_fit_a_narrow_terminal(tmp_path: Path) -> None:
    shown = show([sys.executable, "-m", "unisono"], tmp_path, width=60)
    assert not shown.screen.wrapped
    assert len(shown.screen.text.splitlines()) == 3


def test_a_command_in_a_cell_of_a_notebook_overwrites_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (  # slow enough for a busy machine to see both
        "import time\nfrom unisono.runtime.display.preparing import preparing\n"
        "with preparing('a model'):\n    time.sleep(1)\n    print('done')\n    time.sleep(1)"
    )
    assert any("a model" in picture for _, picture in show([sys.executable, "-c", code], tmp_path, 60).pictures)
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    assert not any("a model" in picture for _, picture in show([sys.executable, "-c", code], tmp_path, 60).pictures)
