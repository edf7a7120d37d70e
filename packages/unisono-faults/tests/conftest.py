"""One sandbox per module, so that each reference run without a fault runs once."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from unisono_faults import matrix, report
from unisono_faults.scenarios import kills

KILLS = "10"  # random instants in a test run; `unisono faults` uses 200


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of every fault of the module's `GROUP`; without a group, of the few quick ones."""
    if "fault" in metafunc.fixturenames:
        group = getattr(metafunc.module, "GROUP", None)
        quick = group is None
        found = [f for f in report.load_scenarios().values() if f.quick == quick and (quick or f.key[0] in group)]
        metafunc.parametrize("fault", found, ids=[f.key for f in found])


@pytest.fixture(scope="module")
def sandbox() -> Iterator[matrix.Sandbox]:
    """The folder in which the faults of a module are injected."""
    if sys.platform != "linux":
        pytest.skip("finding processes needs /proc")
    os.environ.setdefault(kills.KILLS, KILLS)
    with matrix.open_sandbox() as sandbox:
        yield sandbox
