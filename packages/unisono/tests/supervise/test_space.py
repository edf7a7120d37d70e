"""Whether the checkpoints of a run fit is known before its first step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from packages.unisono.tests import runs
from packages.unisono.tests.runs import ADAMW, SGD, configuration
from packages.unisono.tests.tasks import LinearTask, TransformerTask
from unisono.runtime.errors import RunError
from unisono.supervise import disk_space


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what is free on every disk."""
    return lambda size: monkeypatch.setattr(
        disk_space, "shutil", SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=size))
    )


@pytest.mark.parametrize(
    ("groups", "bytes_each"),
    [
        ({"optim": ADAMW}, 12),
        ({"optim": SGD}, 8),
        ({"optim": {**SGD, "momentum": 0.0}}, 4),
        ({"optim": ADAMW, "ema": {"decay": 0.9}}, 16),
        ({"optim": ADAMW, "train": {"precision": "fp64"}}, 24),
        ({"optim": ADAMW, "train": {"precision": "bf16"}}, 12),
    ],
)
def test_a_checkpoint_has_weights_optimizer_and_average(groups: dict[str, Any], bytes_each: int):
    assert disk_space.estimate_size(configuration(**groups), 1000) == 1000 * bytes_each


@pytest.mark.parametrize("groups", [{"optim": ADAMW}, {"optim": SGD}, {"optim": ADAMW, "ema": {"decay": 0.9}}])
def test_the_estimate_is_what_a_run_writes(tmp_path: Path, groups: dict[str, Any]):
    config = configuration(**groups, eval={"at_end": False})
    task = TransformerTask()
    runs.train(tmp_path, config, task)
    parameters = sum(p.numel() for p in task.build().parameters())
    written = sum(file.stat().st_size for file in tmp_path.glob("checkpoints/*/*.safetensors"))
    assert (
        disk_space.estimate_size(config, parameters) <= written <= 1.6 * disk_space.estimate_size(config, parameters)
    )  # with its names
    assert disk_space.newest_size(tmp_path) >= written


@pytest.mark.parametrize(
    ("checkpoint", "first", "count"),
    [
        ({}, 0, 1), ({"every": 3}, 0, 4), ({"every": 5}, 0, 2), ({"every": 3}, 6, 2), ({"every": 3}, 10, 0),
        ({"at_end": False}, 0, 0), ({"every": 4, "at_end": False}, 0, 2),
    ],
)  # fmt: skip
def test_checkpoints_that_will_be_written_are_counted(checkpoint: dict[str, Any], first: int, count: int):
    assert disk_space.count_checkpoints(configuration(checkpoint=checkpoint), first, 10) == count


@pytest.mark.parametrize(("size", "fits"), [(3.1e9, True), (3.0e9, False)])
def test_the_older_ones_and_the_one_that_is_written_have_to_fit(tmp_path: Path, free: Any, size: float, fits: bool):
    free(size)
    config = configuration(checkpoint={"keep": 2})
    if fits:
        return disk_space.check_disk_space(tmp_path / "a" / "b", config, 10**9, 7)
    with pytest.raises(RunError) as caught:
        disk_space.check_disk_space(tmp_path / "a" / "b", config, 10**9, 7)
    assert "a/b needs 3.06 GB for 3 more checkpoints of 1 GB (checkpoint.keep=2, plus" in str(caught.value)
    assert f"but only 3 GB are free at {tmp_path}. Free some" in str(caught.value)
    return None


def test_no_more_is_asked_for_than_will_be_written(tmp_path: Path, free: Any):
    free(1.5e9)
    disk_space.check_disk_space(tmp_path, configuration(checkpoint={"keep": 9}), 10**9, 1)
    free(0)
    disk_space.check_disk_space(tmp_path, configuration(checkpoint={"keep": 9}), 10**9, 0)


def test_a_run_on_a_full_disk_is_refused_before_its_first_step(tmp_path: Path, free: Any):
    free(10)
    with pytest.raises(RunError, match=r"needs 3\.\d+e-08 GB for 1 more checkpoint of"):
        runs.train(tmp_path, configuration(), LinearTask())
    assert not (tmp_path / "checkpoints").exists()
