"""What tests of this package share: a folder of their own, and a launcher that runs jobs in this process."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from unisono.launch.launcher import Ended
from unisono_sweeps.launchers.local import LocalLauncher

from .written import ROOT


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs that a launcher was given; each is run in this process."""
    from unisono.cli import main

    names: list[str] = []

    def run(self: LocalLauncher, jobs: Any, started: Any, ended: Any, stops: Any = None) -> None:
        for job in jobs:
            names.append(job.name)
            started(job)
            try:
                ended(job, Ended(main.main(list(job.command[3:])), 1.0, "it failed"))
            except Exception as error:
                ended(job, Ended(1, 1.0, str(error)))

    monkeypatch.setattr(LocalLauncher, "run", run)
    return names
