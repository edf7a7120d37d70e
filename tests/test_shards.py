"""Shards take every long matrix once, and leave nothing else out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import shards

SLOW = [f"tests/test_{letter}.py" for letter in "abcdefgh"]
MODULE = """
import pytest
def test_quick(): pass
@pytest.mark.slow
def test_slow(): pass
"""


@pytest.mark.parametrize("parts", [1, 2, 3, 8, 9])
def test_every_module_is_in_one_part(parts: int) -> None:
    taken = [module for number in range(parts) for module in shards.modules_of(SLOW * 3, f"{number + 1}/{parts}")]
    assert sorted(taken) == SLOW


@pytest.mark.parametrize("shard", ["0/3", "4/3", "3", "one", "1/0"])
def test_a_part_that_does_not_exist_is_refused(shard: str) -> None:
    with pytest.raises(pytest.UsageError, match=re.escape(f"--shard={shard}")):
        shards.modules_of(SLOW, shard)


@pytest.mark.parametrize(("shard", "told"), [("all", "4 passed"), ("1/2", "3 passed, 1 deselected")])
def test_only_slow_tests_of_other_parts_are_left_out(tmp_path: Path, shard: str, told: str) -> None:
    (tmp_path / "test_a.py").write_text(MODULE)
    (tmp_path / "test_b.py").write_text(MODULE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: long\n")
    root = str(Path(__file__).parents[1])
    command = [sys.executable, "-m", "pytest", "-p", "tests.shards", f"--shard={shard}", "-p", "no:cacheprovider"]
    run = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": root}, capture_output=True, text=True, timeout=120)
    assert told in run.stdout, run.stdout + run.stderr
