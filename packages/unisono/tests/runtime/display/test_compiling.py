"""A run that compiles says what, so that it does not look like one that hangs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from unisono.runtime import heartbeat
from unisono.runtime.display import compiling


def test_what_is_compiled_for_long_is_named_once_and_in_the_heartbeat(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "FIRST_REPORT", 0.05)
    heartbeat.start(tmp_path, 0)
    try:
        with compiling.compiling("the training step", shown=True):
            deadline = time.monotonic() + 60
            lines = ""
            while not lines and time.monotonic() < deadline:
                time.sleep(0.02)
                lines = capsys.readouterr().err
            record = heartbeat.read_record(heartbeat.heartbeat_path(tmp_path, 0))
        with compiling.compiling("the training step", shown=False):
            time.sleep(0.2)
    finally:
        heartbeat.stop()
    assert lines == "unisono: compiling the training step: 0 s so far\n"
    assert record is not None and (record.phase, record.detail) == ("setup", "the compilation of the training step")
    assert record.pid == os.getpid()
    assert capsys.readouterr().err == ""
