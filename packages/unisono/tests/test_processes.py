"""What tests on several processes can rely on."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packages.unisono.tests import processes


def facts(place: Any, group: Any, tensor: torch.Tensor) -> dict[str, Any]:
    numbers = group.gather(place.rank, "the ranks")
    return {
        "pid": os.getpid(),
        "numbers": numbers,
        "tensor": tensor + place.rank,
        "variable": os.environ.get("A_TEST_S_OWN"),
        "folder": Path.cwd(),
        "draws": (random.random(), float(np.random.random())),
    }


def test_ranks_are_processes_of_this_test_s_folder_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("A_TEST_S_OWN", "yes")
    first, second = processes.run(facts, 2, torch.ones(2))
    assert first["numbers"] == second["numbers"] == [0, 1]
    assert second["tensor"].tolist() == [2.0, 2.0]
    assert len({first["pid"], second["pid"], os.getpid()}) == 3
    assert {(one["variable"], one["folder"]) for one in (first, second)} == {("yes", tmp_path)}
    assert first["draws"][0] != second["draws"][0]
    assert first["draws"][1] != second["draws"][1], "ranks that draw by themselves would draw the same"


def fails(place: Any, group: Any, how: str) -> None:
    print(f"rank {place.rank} was here")
    if place.rank == 1 and how == "raises":
        raise RuntimeError("the sky fell")
    if place.rank == 1 and how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if place.rank == 1 and how == "leaves":
        sys.stdout.flush()
        os._exit(0)
    group.barrier("the other rank") if how != "hangs" else time.sleep(600)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", "RuntimeError: the sky fell"),
        ("dies", "rank 1: ended with code -9"),
        ("leaves", "rank 1: ended with code 0"),
        ("hangs", "rank 1: ran for 10 s\n"),
    ],
    ids=["raises", "dies", "leaves", "hangs"],
)
def test_a_rank_that_fails_is_named_with_what_it_said(how: str, said: str) -> None:
    before = time.monotonic()
    with pytest.raises(AssertionError) as failure:
        processes.run(fails, 2, how, timeout=10 if how == "hangs" else 60)
    assert said in str(failure.value)
    assert "in fails\n" in str(failure.value) or how not in ("raises", "hangs"), "no line of the test's"
    assert time.monotonic() - before < 50, "nobody waits for those that wait in vain"
