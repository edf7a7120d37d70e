"""How many cores' time the control groups allow, as container engines set them."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from unisono.runtime.communication import communicator
from unisono.runtime.cpu_quota import cpu_quota


def quota(folder: Path, own: str, files: dict[str, str]) -> float:
    (folder / "own").write_text(own)
    for name, text in files.items():
        path = folder / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return cpu_quota(folder / "own", folder / "sys")


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/a/b\n", {"cpu.max": "max 100000\n", "a/cpu.max": "300000 100000", "a/b/cpu.max": "400000 100000"}, 3.0),
        ("0::/pods/x\n", {"cpu.max": "200000 100000\n"}, 2.0),  # the host's name of what is the root here
        ("2:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"}, 0.5),
        ("2:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
        ("0::/\n", {"cpu.max": "nonsense"}, math.inf),
        ("0::/\n", {}, math.inf),
        ("nonsense", {}, math.inf),
    ],
)  # fmt: skip
def test_the_smallest_quota_of_all_groups_counts(
    tmp_path: Path, own: str, files: dict[str, str], expected: float
) -> None:
    assert quota(tmp_path, own, files) == expected


def test_a_system_without_control_groups_has_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "own", tmp_path) == math.inf


@pytest.mark.parametrize(("quota", "cores"), [(1.5, 2), (0.2, 1), (math.inf, 64), (64.0, 64), (100.0, 64)])
def test_cores_are_those_whose_time_there_is(monkeypatch: pytest.MonkeyPatch, quota: float, cores: int) -> None:
    """In a container with 2 of 64 cores' time, 64 threads and workers were started."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(communicator, "cpu_quota", lambda: quota)
    assert communicator.usable_cores() == cores
