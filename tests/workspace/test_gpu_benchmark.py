"""`python -m benchmarks.gpu`: its six minutes are kept, whatever a row does."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu import AGAIN, LONG, ROW, SHORT, TOTAL, Row, Sizes, jobs, measure, run_job, write_documents
from packages.unisono.tests.launch import jobs as jobs_of_tests

HANGING = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
open(sys.argv[1], "w").write(str(child.pid))
child.wait()
"""


ROWS = f"""
print('{ROW}{{"ms": 3}}', flush=True); print('a line')
import time; time.sleep(float(__import__('sys').argv[1])); print('{ROW}{{"ms": 4}}')
"""


def all_rows() -> list[Row]:
    return [row for job in jobs("cuda", Sizes(tiny=False), Path()) for row in job]


def test_a_row_whose_time_is_over_ends_with_all_that_it_has_started(tmp_path: Path) -> None:
    began, file = time.monotonic(), tmp_path / "child"
    (figures,) = run_job([sys.executable, "-c", HANGING, str(file)], [2.0])
    assert figures == {"not measured": "its time was over after 2 s"}
    assert time.monotonic() - began < 100
    child = int(file.read_text())
    with suppress(psutil.NoSuchProcess):
        jobs_of_tests.wait_for(lambda: psutil.Process(child).status() == psutil.STATUS_ZOMBIE, 60)


def test_a_process_that_fails_says_why_in_each_of_its_rows() -> None:
    assert (
        list(run_job([sys.executable, "-c", "raise SystemExit('no card')"], [60.0] * 2))
        == [{"not measured": "no card"}] * 2
    )


def test_rows_of_one_process_are_read_one_by_one_and_have_a_deadline_each() -> None:
    assert list(run_job([sys.executable, "-c", ROWS, "0"], [60.0] * 2)) == [{"ms": 3}, {"ms": 4}]
    assert list(run_job([sys.executable, "-c", ROWS, "300"], [60.0, 1.0, 60.0])) == [
        {"ms": 3}, {"not measured": "its time was over after 1 s"},
        {"not measured": "its process was over, with the row before it"},
    ]  # fmt: skip


def test_a_row_that_fails_ends_no_other_of_its_process(capsys: pytest.CaptureFixture[str]) -> None:
    measure([("group", "no", 1, lambda: {"ms": 1 / 0}), ("group", "yes", 1, lambda: {"ms": 3})])
    assert capsys.readouterr().out.splitlines() == [
        f'{ROW}{{"not measured": "ZeroDivisionError: division by zero"}}', f'{ROW}{{"ms": 3}}'
    ]  # fmt: skip


def test_all_rows_together_are_expected_to_take_less_than_six_minutes() -> None:
    assert all(seconds > 0 for _, _, seconds, _ in all_rows())
    assert sum(seconds for _, _, seconds, _ in all_rows()) <= TOTAL <= 345


def test_what_is_measured_from_a_cache_was_measured_without_it_before() -> None:
    rows = [(group, what) for group, what, _, _ in all_rows()]
    again = [(group, what.removesuffix(f" {AGAIN}")) for group, what in rows if what.endswith(AGAIN)]
    assert {group.split(",")[0] for group, _ in again} == {"puzzles", "birdsong"}
    for group, what in again:
        assert rows.index((group, what)) < rows.index((group, f"{what} {AGAIN}"))


def test_packed_and_whole_rows_are_of_the_same_text(tmp_path: Path) -> None:
    write_documents(tmp_path, Sizes(tiny=True))
    whole, short = (
        [json.loads(line)["text"] for line in (tmp_path / name).read_text("utf-8").splitlines()]
        for name in (LONG, SHORT)
    )
    assert "".join(whole) == "".join(short)
    assert len(whole) == 2 and len(short) > 1000
