"""What distributions plug in is found as `importlib.metadata` finds it, in a fraction of its time."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from unisono.runtime.code.entry_points import find_entry_points

GROUPS = ("unisono.recipes", "unisono.verbs", "unisono.data_verbs", "unisono.fault_injection", "unisono.trackers")


@pytest.mark.parametrize("group", GROUPS)
def test_all_that_is_installed_is_found_as_by_the_standard_library(group: str):
    found = {name: entry.value for name, entry in find_entry_points(group).items()}
    assert found == {entry.name: entry.value for entry in metadata.entry_points(group=group)}
    assert list(found) == sorted(found)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed distributions, the first on the path."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), "/nowhere", *sys.path])
    find_entry_points.cache_clear()
    yield tmp_path
    find_entry_points.cache_clear()


def test_the_format_is_read_as_installers_write_it(path: Path):
    text = (
        "# a comment\n[console_scripts]\nx = y:z\n\n[unisono.verbs]\n; another\nplain=os.path\n"
        "deep = os : path.join [extra]\nbad\n[unisono.other]\nelsewhere = os:path\n"
    )
    for folder, content in (("a-1.dist-info", text), ("b-1.egg-info", "[unisono.verbs]\negg = json:loads")):
        (path / folder).mkdir()
        (path / folder / "entry_points.txt").write_text(content)
    (path / "c-1.dist-info").mkdir()  # one without entry points
    found = find_entry_points("unisono.verbs")
    assert {"plain", "deep", "egg"} <= found.keys() and not {"x", "elsewhere", "bad"} & found.keys()
    assert (found["plain"].load(), found["deep"].load()) == (os.path, os.path.join)
    assert find_entry_points("unisono.other")["elsewhere"].module == "os"


def test_of_two_distributions_the_first_on_the_path_wins(path: Path):
    (path / "mine-1.dist-info").mkdir()
    (path / "mine-1.dist-info" / "entry_points.txt").write_text("[unisono.recipes]\nlanguage = mine:RECIPE\n")
    assert find_entry_points("unisono.recipes")["language"].value == "mine:RECIPE"
