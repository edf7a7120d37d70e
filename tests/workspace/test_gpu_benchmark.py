"""`python -m benchmarks.gpu`: its six minutes are kept, whatever a row does."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.gpu import AGAIN, TOTAL, Sizes, measured_rows, run_row
from packages.unisono.tests.launch import jobs

HANGING = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
open(sys.argv[1], "w").write(str(child.pid))
child.wait()
"""


def test_a_row_whose_time_is_over_ends_with_all_that_it_has_started(tmp_path: Path) -> None:
    began, file = time.monotonic(), tmp_path / "child"
    figures = run_row([sys.executable, "-c", HANGING, str(file)], 2.0)
    assert figures == {"not measured": "its time was over after 2 s"}
    assert time.monotonic() - began < 100
    child = int(file.read_text())
    with suppress(psutil.NoSuchProcess):
        jobs.wait_for(lambda: psutil.Process(child).status() == psutil.STATUS_ZOMBIE, 60)


def test_a_row_that_fails_says_why_and_one_that_ends_is_read() -> None:
    assert run_row([sys.executable, "-c", "raise SystemExit('no card')"], 60.0) == {"not measured": "no card"}
    assert run_row([sys.executable, "-c", "print('a line'); print('{\"ms\": 3}')"], 60.0) == {"ms": 3}


def test_all_rows_together_are_expected_to_take_less_than_six_minutes() -> None:
    rows = list(measured_rows("cuda", Sizes(tiny=False)))
    assert all(seconds > 5 for _, _, seconds, _ in rows)
    assert sum(seconds for _, _, seconds, _ in rows) <= TOTAL <= 345


def test_what_is_measured_from_a_cache_was_measured_without_it_before() -> None:
    rows = [(group, what) for group, what, _, _ in measured_rows("cuda", Sizes(tiny=False))]
    again = [(group, what.removesuffix(f" {AGAIN}")) for group, what in rows if what.endswith(AGAIN)]
    assert {group.split(",")[0] for group, _ in again} == {"puzzles", "birdsong"}
    for group, what in again:
        assert rows.index((group, what)) < rows.index((group, f"{what} {AGAIN}"))
