"""Under a limit of the address space, threads reserve none of it for themselves."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from packages.unisono.tests.launch import jobs
from unisono.launch.host import memory_allocators

THREADS = 6
RESERVED = f"""
import re, sys, threading
from pathlib import Path
if sys.argv[1] == "shared":
    from unisono.launch.host import memory_allocators
    memory_allocators.use_single_arena()
def size():
    return int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
ready, over = threading.Barrier({THREADS} + 1), threading.Event()
def work():
    kept = [bytearray(2000) for _ in range(100)]
    ready.wait()
    over.wait()
threading.stack_size(1 << 20)
before = size()
for _ in range({THREADS}):
    threading.Thread(target=work).start()
ready.wait()
print(size() - before)
over.set()
"""


def reserved(how: str, limit: int | None) -> float:
    """MB of address space that threads take."""

    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    return float(
        subprocess.run(
            [sys.executable, "-c", RESERVED, how],
            capture_output=True, text=True, check=True, preexec_fn=limited, env=jobs.environment(),
        ).stdout
    )  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_only_under_a_limit_threads_share_an_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    limit = 4_000_000_000
    assert reserved("as ever", limit) > 64 * THREADS, "this libc reserves nothing"
    assert reserved("shared", None) > 64 * THREADS
    assert reserved("shared", limit) < 10 * THREADS


def test_processes_that_are_started_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_allocators.arena_variables() == {}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (10**9, 10**9))
    assert memory_allocators.arena_variables() == ({"MALLOC_ARENA_MAX": "1"} if sys.platform == "linux" else {})
