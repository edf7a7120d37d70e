"""A plugin of pytest: what the tests cost, and which of the slow ones a run takes within its budget.

    pytest --measure=tests/seconds.json     write down what each module costs: its tests marked slow, and its others;
                                            with -m slow or -m "not slow", these alone
    pytest -m slow --budget=5400            as many modules with slow tests as 5400 s of a worker hold

Nothing but the date decides which part that is, so that the same day takes the same part wherever it runs, and as many
days as there are parts take everything. What is left out is listed at the end, with the date on which it is taken.
"""

from __future__ import annotations

import argparse
import datetime
import json
import resource
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

MEASURED = Path(__file__).with_name("seconds.json")
UNMEASURED = 300.0  # seconds that a module is taken to need which was never measured
_NAMES = ("slow", "other", "cpu")  # of what is written down of a module, in seconds


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("budget", "what the tests cost")
    group.addoption("--budget", type=float, help="seconds of workers for the modules with slow tests; the rest rotates")
    group.addoption("--measured", type=Path, default=MEASURED, help="file with the seconds of each module")
    group.addoption("--today", type=datetime.date.fromisoformat, help=argparse.SUPPRESS)
    group.addoption("--measure", type=Path, help="file to write the seconds of each module to")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """The date is asked for once, or the workers of a run at midnight would take different parts."""
    config.option.today = config.option.today or datetime.date.today()
    config.pluginmanager.register(Costs(config), "costs")


@dataclass(frozen=True)
class Choice:
    """Which modules a run takes, and when it is the turn of the others.

    Attributes:
        taken: modules.
        left_out: days until each other module is taken.
    """

    taken: frozenset[str]
    left_out: Mapping[str, int]


def choose(seconds: Mapping[str, float], budget: float, day: int) -> Choice:
    """Deal modules out to as few days as the budget allows, and fill up each day with what would come next.

    >>> choose({"a": 5, "b": 4, "c": 3}, budget=8, day=0)
    Choice(taken=frozenset({'a', 'c'}), left_out={'b': 1})
    """
    parts: list[dict[str, float]] = []
    for name in sorted(seconds, key=lambda name: (-seconds[name], name)):
        part = next((part for part in parts if sum(part.values()) + seconds[name] <= budget), None)
        if part is None:
            parts.append(part := {})
        part[name] = seconds[name]
    parts = parts or [{}]
    turn = day % len(parts)
    taken = dict(parts[turn])
    left_out: dict[str, int] = {}
    for days, part in enumerate(parts[turn + 1 :] + parts[:turn], start=1):
        for name, cost in part.items():
            if sum(taken.values()) + cost <= budget:
                taken[name] = cost
            else:
                left_out[name] = days
    return Choice(frozenset(taken), left_out)


class Costs:
    """Measures the tests, and leaves out what today has no time for."""

    def __init__(self, config: pytest.Config) -> None:
        path = config.option.measured
        self._known: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.exists() else {}
        self._config, self._today = config, config.option.today
        self._kinds = {"slow": ("slow",), "not slow": ("other",)}.get(config.option.markexpr, ("slow", "other"))
        slow = dict.fromkeys(_modules_with_slow_tests(config), UNMEASURED)
        slow |= {name: cost["slow"] for name, cost in self._known.items() if cost.get("slow")}
        budget = config.option.budget
        self._choice = choose(slow, budget, self._today.toordinal()) if budget else Choice(frozenset(slow), {})
        self._costs: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(_NAMES, 0.0))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out slow tests of the modules of other days. What takes longest comes first, or it is waited for."""
        out = {i for i in items if _module(i.nodeid) in self._choice.left_out and i.get_closest_marker("slow")}
        if out:
            config.hook.pytest_deselected(items=list(out))
        costs = {name: sum(cost.get(kind, 0.0) for kind in self._kinds) for name, cost in self._known.items()}
        taken = (item for item in items if item not in out)
        items[:] = sorted(taken, key=lambda i: (-costs.get(_module(i.nodeid), UNMEASURED), _module(i.nodeid)))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._began = time.monotonic(), _cpu_seconds()
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
        """Have the last report of a test, which may go to another process, say what it cost."""
        if call.when == "teardown":
            slow = item.get_closest_marker("slow") is not None
            spent = time.monotonic() - self._began[0], _cpu_seconds() - self._began[1]
            item.user_properties.append(("cost", (slow, *spent)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, cost in report.user_properties:
            if name == "cost" and report.when == "teardown":
                slow, wall, cpu = cost  # type: ignore[misc]
                found = self._costs[_module(report.nodeid)]
                found["slow" if slow else "other"] += wall
                found["cpu"] += cpu

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """What it cost, and what was left out."""
        total = {name: sum(cost[name] for cost in self._costs.values()) for name in _NAMES}
        terminalreporter.write_line(
            f"cost: {total['slow'] + total['other']:.0f} s of workers, {total['cpu']:.0f} s of processors"
        )
        for days in sorted(set(self._choice.left_out.values())):
            names = sorted(name for name, left in self._choice.left_out.items() if left == days)
            date = self._today + datetime.timedelta(days)
            terminalreporter.write_line(f"left out today, taken on {date} (--today={date}): {', '.join(names)}")
        if path := self._config.option.measure:
            costs = {name: {key: round(cost[key], 1) for key in _NAMES} for name, cost in sorted(self._costs.items())}
            kept = {name: cost for name, cost in self._known.items() if Path(self._config.rootpath, name).exists()}
            if len(self._kinds) == 1:  # what the others cost is known already
                (kind,) = self._kinds
                costs = {name: {**cost, **kept.get(name, {}), kind: cost[kind]} for name, cost in costs.items()}
            lines = (f"{json.dumps(name)}: {json.dumps(cost)}" for name, cost in sorted({**kept, **costs}.items()))
            path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _modules_with_slow_tests(config: pytest.Config) -> list[str]:
    """As far as their texts say, for the process that lists what is left out collects no tests."""
    given = [Path(config.invocation_params.dir, arg.partition("::")[0]) for arg in config.args]
    files = [file for path in given for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
    return sorted(str(file.relative_to(config.rootpath)) for file in files if "mark.slow" in file.read_text())


def _module(test: str) -> str:
    return test.partition("::")[0]


def _cpu_seconds() -> float:
    """Of this process and all that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
