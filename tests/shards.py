"""Which of the long matrices a test run takes, so that a few runs take them all; a plugin of pytest.

`make test` takes everything but the tests marked `slow`, and of these one part; `make test SHARD=all` takes all. Whole
modules are dealt out, as their tests share what is costly to set up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--shard`: the part of the slow modules to run."""
    parser.addoption("--shard", default="all", help="of the modules with slow tests: all, or e.g. 1/3")


def pytest_report_header(config: pytest.Config) -> str:
    """What is told at the start."""
    return f"slow tests: {config.getoption('--shard')}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the slow tests of the modules of other parts; the others come first, or the last one is waited for."""
    slow = {item.nodeid for item in items if item.get_closest_marker("slow")}
    taken = modules_of(map(_module, slow), config.getoption("--shard"))
    left_out = [item for item in items if item.nodeid in slow and _module(item.nodeid) not in taken]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    kept = [item for item in items if item not in set(left_out)]
    items[:] = sorted(kept, key=lambda item: _module(item.nodeid) not in taken)


def modules_of(slow: Iterable[str], shard: str) -> set[str]:
    """Those of the modules with slow tests that belong to a part.

    >>> sorted(modules_of("abcde", "2/3"))
    ['b', 'e']
    """
    number, parts = _parse(shard)
    return set(sorted(set(slow))[number - 1 :: parts])


def _module(test: str) -> str:
    return test.partition("::")[0]


def _parse(shard: str) -> tuple[int, int]:
    """Number, from 1, and count of parts."""
    found = re.fullmatch(r"(\d+)/(\d+)", "1/1" if shard == "all" else shard)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise pytest.UsageError(f"--shard={shard}: say all, or which of how many parts, e.g. 1/3")
    return int(found[1]), int(found[2])
