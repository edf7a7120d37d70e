"""The launcher's fork server, by what a user sees of it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from unisono.launch.processes.fork_server import ForkServer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are for Linux")


def test_a_server_that_is_not_needed_ends_without_finishing_its_imports(tmp_path: Path) -> None:
    """A typo in a setting is reported at once, not after the seconds that importing torch takes."""
    (tmp_path / "long_import.py").write_text(
        "import time\nfrom pathlib import Path\n"
        f"Path({str(tmp_path / 'begun')!r}).touch()\ntime.sleep(2)\nPath({str(tmp_path / 'finished')!r}).touch()\n"
    )
    variables = {"PYTHONPATH": str(tmp_path)}
    server = ForkServer(["long_import"], variables)
    deadline = time.monotonic() + 120
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    server.close()
    assert not (tmp_path / "finished").exists()
