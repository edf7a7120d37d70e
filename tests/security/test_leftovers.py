"""What a killed process leaves behind: folders that the next one clears, and variables that arm nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.cli import main
from unisono.runtime.errors import ConfigError
from unisono.runtime.files import own_folder
from unisono.supervise import identity
from unisono_faults import injection as fault_injection

SPEC = "rank=0,step=1,phase=compute,act=raise"


def test_folders_of_processes_that_are_gone_go_and_others_stay(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, unisono.runtime.files as f; print(f.own_folder('.importing-', pathlib.Path(sys.argv[1])))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    left, foreign = Path(done.stdout.strip()), tmp_path / ".importing-another-host-7-1-x"
    (left / "a").touch()
    foreign.mkdir()
    link = tmp_path / f"{left.name[: left.name.rindex('-')]}-link"
    link.symlink_to(foreign)
    alive = own_folder(".importing-", tmp_path)
    another = own_folder(".importing-", tmp_path)
    assert not left.exists()
    assert alive.is_dir() and another.is_dir() and foreign.is_dir() and link.is_symlink()


def test_a_fault_is_armed_by_the_command_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fault_injection.VARIABLE, SPEC)
    assert fault_injection._read_request() is None, "as it was written before"
    fault_injection.arm(SPEC)
    assert fault_injection._read_request() == SPEC
    told = json.loads(os.environ[fault_injection.VARIABLE])
    for change in ({"born": "1"}, {"pid": 2**22 + 1}, {"machine": "another"}):
        left = {**told, "requested_by": {**identity.own_identity(), **change}}
        monkeypatch.setenv(fault_injection.VARIABLE, json.dumps(left))
        assert fault_injection._read_request() is None, change
    fault_injection.arm(None)
    assert fault_injection.VARIABLE not in os.environ
    with pytest.raises(ConfigError, match="is not a valid fault"):
        fault_injection.arm("act=melt")


def test_a_variable_that_was_left_over_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "train",
        "packages.unisono.tests.tasks:LinearTask",
        "train.steps=2",
        "train.global_batch=4",
        "layout.world_size=1",
    ]
    words += ["layout.device=cpu", "observe.progress=false", "launch.monitor=false"]
    monkeypatch.setenv(fault_injection.VARIABLE, SPEC)
    assert main.main([*words, "run.name=a"]) == 0
    with pytest.raises(RuntimeError, match="fault injected by --fault"):
        main.main([*words, "run.name=b", "--fault", SPEC])
