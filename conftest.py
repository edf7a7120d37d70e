"""What all tests share: a private cache, one thread, and no launcher's variables."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from packages.unisono.tests import fork_server
from tests.budget import pytest_addoption, pytest_configure  # noqa: F401

for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID"):
    os.environ.pop(name, None)
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.update(JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="4", XLA_FLAGS="--xla_backend_optimization_level=0")
# A machine with other work to do is slow at times, which says nothing of a test.
settings.register_profile("unisono", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unisono")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's job in the background, and all that tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)
fork_server.install()
torch.set_num_threads(1)  # the number of threads is part of the order of sums


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """No test waits for ever: one that hangs fails, with its name. One that needs a library is skipped without it."""
    for item in items:
        needed = {name for mark in item.iter_markers("needs") for name in mark.args}
        for name in sorted(name for name in needed if importlib.util.find_spec(name) is None):
            item.add_marker(pytest.mark.skip(reason=f"{name} is not installed"))
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(1200 if item.get_closest_marker("slow") else 300, method="signal"))


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache for tokenised documents that all tests of a session share."""
    path = tmp_path_factory.mktemp("cache")
    os.environ["UNISONO_CACHE"] = str(path)
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))  # the key of own runs
    return path


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command `unisono`, in this process: its exit code, and what it wrote to the two outputs."""
    from unisono.cli import main

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main.main([str(word) for word in words])
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def real_processes() -> Iterator[None]:
    """Processes that a module's tests start begin as a user's do, imports and all."""
    with fork_server.real():
        yield


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """What was there before a module is looked at by no collection of garbage.

    The end of every run collects; all that test processes have imported would be most of what a short run takes.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """A test that changes what belongs to the whole process fails itself, not the test that comes after it."""
    before = torch.get_default_dtype(), torch.get_num_threads(), torch.is_deterministic_algorithms_warn_only_enabled()
    if "jax" in sys.modules:  # an import of scikit-bio switches JAX to 64 bits
        sys.modules["jax"].config.update("jax_enable_x64", False)
    yield
    after = torch.get_default_dtype(), torch.get_num_threads(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.set_default_dtype(before[0])
    torch.set_num_threads(before[1])
    assert after == before
