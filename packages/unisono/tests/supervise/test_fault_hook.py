"""The core injects no fault by itself: what acts is a plug-in."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.runtime import heartbeat
from unisono.runtime.errors import ConfigError
from unisono.supervise import fault_hook

SPEC = "rank=0,step=2,phase=compute,act=raise"


@pytest.fixture
def without_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_hook, "find_entry_points", lambda group: {})


def test_a_fault_is_refused_by_name_where_nothing_is_installed_that_injects_it(without_plugins: None) -> None:
    with pytest.raises(ConfigError, match=r"needs the package 'unisono-faults': pip install 'unisono\[faults\]'"):
        fault_hook.arm(SPEC)


def test_a_variable_does_nothing_without_the_plugin(monkeypatch: pytest.MonkeyPatch, without_plugins: None) -> None:
    monkeypatch.setenv(fault_hook.VARIABLE, SPEC)
    monkeypatch.setattr(heartbeat, "phase_hook", None)
    fault_hook.install(0)
    assert heartbeat.phase_hook is None


@pytest.mark.needs("unisono_faults")
def test_with_the_plugin_both_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono_faults import injection

    seen: list[Any] = []
    monkeypatch.setattr(injection, "install", seen.append)
    monkeypatch.delenv(fault_hook.VARIABLE, raising=False)
    fault_hook.install(3)
    assert seen == [], "no variable, no plug-in"
    fault_hook.arm(SPEC)
    fault_hook.install(3)
    assert seen == [3]
    fault_hook.arm(None)
