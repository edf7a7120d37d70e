"""Tests for a host with a GPU: `make test-gpu`, at most six minutes, from a checkout, with little more than torch.

Nothing here needs the conftest of the workspace or its plug-ins (hypothesis, xdist). On a host without an accelerator
the same tests run on the CPU, where that says something; what a host lacks is skipped by name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import checkout

_KEPT = tempfile.TemporaryDirectory(prefix="unisono-gpu-")  # until the session ends
MISSING = checkout.prepare(Path(_KEPT.name))
BUDGET = 360.0  # seconds of all tests on an accelerator
_BEGAN = time.monotonic()
collect_ignore = [] if not MISSING else [path.name for path in Path(__file__).parent.glob("test_*.py")]


def pytest_report_header() -> str:
    if MISSING:
        return f"tests/gpu: nothing runs, {', '.join(MISSING)} cannot be imported; see `make gpu-wheels`"
    return f"tests/gpu: {device_name()}"


def device_name() -> str:
    """The accelerator that torch has, in words."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return f"no accelerator (torch {torch.__version__}); on the CPU, where that says something"
    name = torch.cuda.get_device_name() if accelerator.type == "cuda" else accelerator.type
    return f"{name}, torch {torch.__version__}, Python {sys.version.split()[0]}"


def seconds_left(device: str) -> float:
    """Of the time that all tests have; on a CPU they take what they need."""
    return BUDGET - (time.monotonic() - _BEGAN) if device != "cpu" else float("inf")


@pytest.fixture(autouse=True)
def _budget(device: str) -> None:
    if seconds_left(device) < 5.0:
        pytest.skip(f"the {BUDGET:.0f} s of all tests on an accelerator are over")


@pytest.fixture(scope="session")
def device() -> str:
    """The kind of device that runs are tested on."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator is not None else "cpu"


@pytest.fixture
def gpu(device: str) -> str:
    """The same, for tests that say nothing of a CPU."""
    if device == "cpu":
        pytest.skip("no accelerator: this measures one, or compiles for one")
    return device


@pytest.fixture
def jax(device: str) -> Any:
    """JAX, with a backend for the device."""
    if lacking := checkout.missing(checkout.JAX):
        pytest.skip(f"JAX cannot be used: {', '.join(lacking)} cannot be imported")
    if device != "cpu":
        code = "import jax; print(jax.default_backend())"
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        if found.stdout.strip() == "cpu" or found.returncode:
            pytest.skip(f"JAX has no backend for {device} here: {(found.stdout + found.stderr).strip()[-200:]}")
    return checkout.JAX


@pytest.fixture
def unisono(tmp_path: Path, device: str) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command, as a user types it; fails the test where it fails, unless `code` says otherwise."""
    environment = {**os.environ, "UNISONO_CACHE": str(Path(_KEPT.name) / "cache")}
    environment.pop("XLA_FLAGS", None)
    if device != "cpu":  # the conftest of the workspace hides GPUs from JAX
        environment.pop("JAX_PLATFORMS", None)

    def run(*words: str, code: int = 0, timeout: float = 240.0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "unisono", *words]
        limit = min(timeout, max(5.0, seconds_left(device)))
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, cwd=tmp_path, env=environment, check=False
        )
        assert done.returncode == code, f"{' '.join(words)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done

    return run


@pytest.fixture
def train(unisono: Callable[..., Any], tmp_path: Path, device: str) -> Callable[..., list[dict[str, Any]]]:
    """Train a recipe on one process; returns its steps, from `events.jsonl`."""

    def run(recipe: str, name: str, *words: str, code: int = 0) -> list[dict[str, Any]]:
        own = [
            "layout.world_size=1", f"layout.device={device}", "eval.every=null", "checkpoint.at_end=false",
            "observe.progress=false", "observe.trackers=[]", f"run.dir={tmp_path}", f"run.name={name}",
            *(["layout.threads=1"] if device == "cpu" else []),
        ]  # fmt: skip
        unisono("train", recipe, *own, *words, code=code)
        lines = (tmp_path / name / "events.jsonl").read_text("utf-8").splitlines()
        events = [json.loads(line) for line in lines]
        return [event for event in events if "loss" in event and "eval" not in event]

    return run
