"""The collector is off while libraries are imported, and afterwards as it was."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from unisono.runtime.collector import paused_collector


def test_the_collector_is_off_within_and_on_afterwards_also_after_an_error() -> None:
    with paused_collector():
        assert not gc.isenabled()
        with paused_collector():
            pass
        assert not gc.isenabled(), "the outer context goes on"
    assert gc.isenabled()
    with pytest.raises(ImportError), paused_collector():
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_the_user_has_switched_off_stays_off() -> None:
    gc.disable()
    try:
        with paused_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_way_to_the_first_step_imports_no_reader_of_files() -> None:
    way = "import sys, unisono.launch.train, unisono.launch.resolving.preflight, unisono.training.parts; "
    done = subprocess.run(
        [sys.executable, "-c", way + "print({'pyarrow', 'fsspec', 'pandas', 'matplotlib'} & set(sys.modules))"],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == "set()"
