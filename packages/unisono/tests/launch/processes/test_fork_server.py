"""The launcher's fork server, by what a user sees of it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from unisono.launch.processes import preloading
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


def test_a_server_imports_more_before_it_forks_and_survives_what_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text("raise ValueError('no')\n")
    (tmp_path / "later.py").write_text("")
    (tmp_path / "forked.py").write_text(
        "import sys\n\ndef main(folder):\n    (folder / 'found').write_text(str('later' in sys.modules))\n"
    )
    with ForkServer(["first"], {"PYTHONPATH": str(tmp_path)}) as server:
        server.preload(["later"])
        assert server.ready
        (pid,) = server.fork("forked", [str(tmp_path)], [{**os.environ, "PYTHONPATH": str(tmp_path)}])
        assert server.collect_exit_codes(60.0) == {pid: 0}
    assert (tmp_path / "found").read_text() == "True"


def test_of_imported_modules_those_of_libraries_that_may_be_preloaded_are_listed() -> None:
    import numpy.testing  # noqa: F401

    found = preloading.imported_libraries()
    assert "numpy.testing" in found
    assert not {name for name in found if name.partition(".")[0] in ("torch", "tests", "packages", "unisono")}
