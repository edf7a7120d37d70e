"""What tests of the core share: a recipe that is installed."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from unisono.cli.new import create_recipe
from unisono.config.code.recipes import find_recipe
from unisono.runtime.code.entry_points import find_entry_points
from unisono.runtime.code.source_files import installed_packages

CONFIG = """\
defaults:
  - /optim: adamw
  - /schedules: wsd
  - model: wide
  - data: few
  - _self_

recipe: spirals

train:
  steps: 160
  global_batch: 16

eval:
  every: 80

checkpoint:
  every: 80

ema:
  decay: 0.99
  exclude: [6.*]
"""
GROUPS = {"model/narrow.yaml": "width: 8\n", "model/wide.yaml": "width: 128\n", "data/few.yaml": "points: 100\n"}


@pytest.fixture(scope="session")
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = create_recipe("spirals", tmp_path_factory.mktemp("installed"))
    site = package / "src"
    declared = tomllib.loads((package / "pyproject.toml").read_text())["project"]["entry-points"]["unisono.recipes"]
    (site / "spirals-0.1.0.dist-info").mkdir()
    lines = (f"{name} = {value}\n" for name, value in declared.items())
    (site / "spirals-0.1.0.dist-info" / "entry_points.txt").write_text("[unisono.recipes]\n" + "".join(lines))
    folder = site / "spirals" / "config"
    for name, text in {"spirals.yaml": CONFIG, **GROUPS}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return site


@pytest.fixture
def spirals(_installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A recipe, here and in all processes that are started: the one that `unisono new` writes, with groups of its own.

    Returns the folder in which it is installed.
    """
    monkeypatch.syspath_prepend(_installed)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(_installed), os.environ.get("PYTHONPATH")])))
    caches = (find_entry_points, find_recipe, installed_packages)
    for each in caches:
        each.cache_clear()
    yield _installed
    for each in caches:
        each.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "spirals"]:
        del sys.modules[name]
