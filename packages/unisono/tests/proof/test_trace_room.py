"""The room of a proof is given back however the proof ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from packages.unisono.tests.launch import jobs
from unisono.proof.trace_room import LOGS, trace_room

HOLDS_A_ROOM = """
import time
from unisono.proof.trace_room import trace_room
with trace_room() as folder:
    (folder / "trace").mkdir()
    (folder / "trace" / "0.bin").write_bytes(bytes(1000))
    print(folder, flush=True)
    time.sleep(60)
"""


def test_only_the_logs_of_failed_cases_stay() -> None:
    with trace_room() as folder:
        (folder / "config.yaml").write_text("")
        for name in ("trace", f"{LOGS}ddp"):
            (folder / name).mkdir()
    assert [path.name for path in folder.iterdir()] == [f"{LOGS}ddp"]
    (folder / f"{LOGS}ddp").rmdir()
    folder.rmdir()
    with trace_room() as folder:
        (folder / "trace").mkdir()
    assert not folder.exists()


def test_a_termination_leaves_nothing() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_A_ROOM], stdout=subprocess.PIPE, text=True, env=jobs.environment()
    ) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert (folder / "trace" / "0.bin").is_file()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert not folder.exists()
