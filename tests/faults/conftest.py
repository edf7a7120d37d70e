"""Where faults are shown: one folder for a module, so that a run that never failed is made once."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from unisono.faults import matrix, report
from unisono.faults.scenarios import kills

KILLS = "10"  # random instants in a test run; `unisono faults` takes 200


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for every fault of the module's `GROUP`; a few are quick, and the others a long matrix."""
    if "fault" in metafunc.fixturenames:
        group = getattr(metafunc.module, "GROUP", None)
        quick = group is None
        found = [f for f in report.load_scenarios().values() if f.quick == quick and (quick or f.key[0] in group)]
        metafunc.parametrize("fault", found, ids=[f.key for f in found])


@pytest.fixture(scope="module")
def ground() -> Iterator[matrix.Sandbox]:
    """Where the faults of a module are shown."""
    if sys.platform != "linux":
        pytest.skip("processes are looked for in /proc")
    os.environ.setdefault(kills.KILLS, KILLS)
    with matrix.open_sandbox() as found:
        yield found
