"""Verbs of other distributions are found by their entry points."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

from unisono.cli import plugins


def broken() -> Any:
    raise ImportError("no module named 'gone'")


def test_a_plugin_that_cannot_be_imported_is_named_and_the_others_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = {
        "b": SimpleNamespace(name="b", value="b:add", load=broken),
        "c": SimpleNamespace(name="c", value="c:add", load=lambda: lambda verbs: verbs.add_parser("greet")),
    }
    monkeypatch.setattr(plugins, "find_entry_points", {"unisono.verbs": entries}.__getitem__)
    parser = argparse.ArgumentParser()
    verbs = parser.add_subparsers()
    plugins.add_verbs("unisono.verbs", verbs)
    assert list(verbs.choices) == ["greet"]
    assert "the verbs of 'b' (b:add) cannot be used: no module named 'gone'" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "known"), [(["faults", "--list"], "A1"), (["data", "scan", "--help"], "PATH")])
@pytest.mark.needs("unisono_faults", "unisono_audio")
def test_the_verbs_of_our_own_plugins_are_there(command: Any, words: list[str], known: str) -> None:
    try:
        code, out, _ = command(*words)
    except SystemExit as ended:
        assert ended.code == 0
    else:
        assert (code, known in out) == (0, True)
