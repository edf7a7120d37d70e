"""Where the slow tests need more time than a run has, the date decides, and nothing is left out for good."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.budget import choose

ROOT = Path(__file__).parents[1]
COSTS = st.dictionaries(st.text("abcdefgh", min_size=1, max_size=4), st.floats(0.1, 100), max_size=12)
MODULE = """
import pytest
def test_quick(): pass
@pytest.mark.slow
def test_slow(): pass
"""


@given(COSTS, st.floats(1, 300), st.integers(730_000, 750_000))
def test_every_module_is_taken_on_the_day_that_was_told(costs: dict[str, float], budget: float, day: int) -> None:
    choice = choose(costs, budget, day)
    assert choice.taken | choice.left_out.keys() == costs.keys()
    assert not choice.taken & choice.left_out.keys()
    for module, days in choice.left_out.items():
        assert module in choose(costs, budget, day + days).taken


@given(COSTS, st.floats(1, 300), st.integers(730_000, 750_000))
def test_a_day_takes_no_more_than_it_has_time_for_and_leaves_nothing_out_that_fits(
    costs: dict[str, float], budget: float, day: int
) -> None:
    choice = choose(costs, budget, day)
    spent = sum(costs[module] for module in choice.taken)
    assert spent <= budget + 1e-9 or len(choice.taken) == 1
    assert all(spent + costs[module] > budget - 1e-9 for module in choice.left_out)


def _pytest(folder: Path, *words: str) -> str:
    """What pytest says in a folder with a file of costs."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.budget", f"--measured={folder / 'seconds.json'}", *words]
    environment = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120).stdout


def test_the_run_lists_what_it_leaves_out_and_deals_out_what_was_never_measured(tmp_path: Path) -> None:
    for letter in "abc":
        (tmp_path / f"test_{letter}.py").write_text(MODULE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: long\n")
    measured = tmp_path / "seconds.json"
    measured.write_text(json.dumps({f"test_{letter}.py": {"slow": 6.0} for letter in "ab"}))

    def run(*words: str) -> str:
        return _pytest(tmp_path, "--budget=308", *words)

    first, second = datetime.date(2026, 3, 1), datetime.date(2026, 3, 2)
    left_out = []
    for today, other in ((first, second), (second, first + datetime.timedelta(2))):
        said = run(f"--today={today}")
        assert "5 passed, 1 deselected" in said, said
        listed = next(line for line in said.splitlines() if line.startswith("left out today"))
        assert f"--today={other}" in listed
        left_out.append(listed.rpartition(": ")[2])
    assert sorted(left_out) == ["test_a.py", "test_b.py"]
    assert "left out" not in run("--budget=312", f"--measure={tmp_path / 'new.json'}")
    assert json.loads((tmp_path / "new.json").read_text()).keys() == {"test_a.py", "test_b.py", "test_c.py"}
    measured.write_text(json.dumps({"test_a.py": {"slow": 6.0, "other": 5.0, "cpu": 4.0}}))
    for chosen, cost in (("slow", {"slow": 0.0, "other": 5.0}), ("not slow", {"slow": 6.0, "other": 0.0})):
        run("-m", chosen, "--budget=1000", f"--measure={tmp_path / 'new.json'}")
        assert json.loads((tmp_path / "new.json").read_text())["test_a.py"] == {**cost, "cpu": 4.0}


@pytest.mark.parametrize(("chosen", "first"), [("slow", "ab"), ("not slow", "ba")])
def test_a_module_whose_tests_of_this_run_take_longest_comes_first_and_one_that_was_never_measured(
    tmp_path: Path, chosen: str, first: str
) -> None:
    for letter in "abz":
        (tmp_path / f"test_{letter}.py").write_text(MODULE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: long\n")
    costs = {"test_a.py": {"slow": 9.0, "other": 1.0}, "test_b.py": {"slow": 1.0, "other": 2.0}}
    (tmp_path / "seconds.json").write_text(json.dumps(costs))
    said = _pytest(tmp_path, "-m", chosen, "--collect-only", "-q")
    listed = [line[5] for line in said.splitlines() if line.startswith("test_")]
    assert listed == ["z", *first], said
