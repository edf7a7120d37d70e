"""The largest micro-batch that fits, measured by real processes under real limits."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from packages.unisono.tests.launch import jobs
from unisono.engines.torch.guards.oom import is_out_of_memory
from unisono.launch.autobatch import memory, search
from unisono.runtime.errors import ConfigError
from unisono.task_config import load_config

TASK = '''
import numpy as np, torch, unisono
from torch import nn

class Wide(unisono.Task):
    """Some 2 MB of activations per row, in fp64."""

    def data(self):
        rng = np.random.default_rng(0)
        return [{"x": x.astype(np.float32)} for x in rng.normal(size=(1260, 4))]

    def build(self):
        return nn.Sequential(nn.Linear(4, 40000), nn.Linear(40000, 1))

    def counts(self, batch):
        return {"square": float(len(batch["x"]))}

    def outputs(self, model, batch, context):
        x = model[0](batch["x"])
        for _ in range(5):
            x = torch.tanh(x)
        return model[1](x)[:, 0]

    def loss(self, outputs, batch, context):
        return unisono.Loss({"square": (outputs - batch["x"].sum(1)).square().sum()})
'''
WORDS = (
    "wide.py:Wide", "layout.device=cpu", "train.precision=fp64", "train.global_batch=1260", "train.steps=1",
    "observe.progress=false", "layout.threads=1", "checkpoint.at_end=false", "data.workers=1", "optim.lr=1e-5",
)  # fmt: skip
SPACE = 2_400_000_000


def limited(folder: Path, *words: str, space: int | None) -> subprocess.CompletedProcess[str]:
    """The command under a limit of the address space, which a process that reaches it gets no memory beyond."""

    def limit() -> None:
        if space is not None:
            resource.setrlimit(resource.RLIMIT_AS, (space, space))

    return subprocess.run(
        [sys.executable, "-m", "unisono", *words],
        cwd=folder, capture_output=True, text=True, timeout=300, preexec_fn=limit,
        env=jobs.environment(), check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_size_within_a_tenth_of_the_limit_is_found_without_running_out_of_memory(tmp_path: Path) -> None:
    (tmp_path / "wide.py").write_text(TASK)
    found = limited(tmp_path, "autobatch", *WORDS, space=SPACE)
    assert found.returncode == 0, found.stderr
    assert "limit of the address space" in found.stdout
    assert "ran out" not in found.stderr
    chosen = int(re.search(r"micro-batch (\d+) of 1260", found.stdout)[1])  # type: ignore[index]
    fits = float(re.search(r"about (\d+) would fit", found.stdout)[1])  # type: ignore[index]
    assert 16 < chosen <= fits < 1260

    auto = limited(tmp_path, "train", *WORDS, "layout.micro_batch=auto", "run.name=auto", space=SPACE)
    assert auto.returncode == 0, "what was found fits: " + auto.stderr
    assert "measured by an earlier start" in auto.stdout
    config = yaml.safe_load((tmp_path / "runs" / "auto" / "config.yaml").read_text())
    assert config["layout"]["micro_batch"] == chosen, "the number is frozen in the run"
    a_tenth_more = min(n for n in range(1, 5041) if 1260 % n == 0 and n >= 1.1 * fits)
    more = limited(tmp_path, "train", *WORDS, f"layout.micro_batch={a_tenth_more}", "run.name=more", space=SPACE)
    assert more.returncode != 0, f"{a_tenth_more} rows fit, so {fits} is not near the limit"
    assert "memory" in more.stderr

    other = limited(tmp_path, "train", *WORDS, "layout.micro_batch=63", "run.name=other", space=None)
    assert other.returncode == 0, other.stderr
    losses = [jobs.events(tmp_path / "runs" / name)[0] for name in ("auto", "other")]
    assert losses[0]["loss"] == pytest.approx(losses[1]["loss"], rel=1e-12)
    assert losses[0]["grad_norm"] == pytest.approx(losses[1]["grad_norm"], rel=1e-12)


def config(folder: Path, *words: str) -> Any:
    (folder / "wide.py").write_text(TASK)
    task = f"{folder / 'wide.py'}:Wide"
    return load_config(task, [*WORDS[1:], "layout.world_size=1", "layout.strategy=single", *words])[0]


def kept(told: Any, peaks: dict[int, int], **more: Any) -> None:
    """Put measurements where a search leaves them."""
    path = search.cache_dir() / "autobatch" / f"{search._cache_key(told)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {"peaks": peaks, "kind": "resident", "limit": 0, "source": "", "failed": None, **more}
    path.write_text(search.json.dumps(values))


def test_what_was_measured_is_used_for_another_limit_where_it_says_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))
    peaks = {1: 101_000_000, 4: 104_000_000, 15: 115_000_000, 60: 160_000_000, 210: 310_000_000}
    kept(config(tmp_path), peaks)
    for limit, expected in ((0.34, 210), (0.166, 60)):
        found = search.find_micro_batch(config(tmp_path, f"layout.max_memory_gb={limit}"), processes=False)
        assert (found.micro_batch, found.rows, found.from_cache) == (expected, 1260, True)
    with pytest.raises(ConfigError, match="measures with processes of its own"):
        search.find_micro_batch(config(tmp_path, "layout.max_memory_gb=9"), processes=False)
    with pytest.raises(ConfigError, match="measures with processes of its own"):
        search.find_micro_batch(config(tmp_path, "layout.max_memory_gb=0.34", "optim.lr=1"), processes=False)


def test_a_terminal_shows_that_something_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))
    seen: list[str] = []

    def launch(config: Any, folder: Path, *_: Any, **__: Any) -> None:
        seen.append((tmp_path / "screen").read_text())
        peaks = {str(size): 10**6 * size for size in (1, 2, 1260)}
        told = {"peaks": peaks, "kind": "resident", "limit": 10**10, "source": "it"}
        (folder / search.RESULT_FILE).write_text(search.json.dumps(told))

    monkeypatch.setattr(search.local_processes, "launch", launch)
    with (tmp_path / "screen").open("w") as screen:
        monkeypatch.setattr(screen, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stdout", screen)
        assert search.find_micro_batch(config(tmp_path, "observe.progress=true")).micro_batch == 1260
    assert "measuring micro-batches" in seen[0]


def test_a_limit_that_one_row_does_not_fit_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = config(tmp_path, "layout.max_memory_gb=0.05")
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))
    measured = {"peaks": {"1": 101_000_000}, "kind": "resident", "limit": 50_000_000, "source": "it", "failed": None}
    monkeypatch.setattr(search, "_measure", lambda *_: measured)
    with pytest.raises(ConfigError, match=r"a micro-batch of one row takes 0\.101 GB, but a process may use 0\.050 GB"):
        search.find_micro_batch(told)


def test_what_a_process_has_is_given_or_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = memory.memory_limit(config(tmp_path, "layout.max_memory_gb=1.5"), "cpu", 2)
    assert (told.amount, told.source, told.kind) == (1_500_000_000, "layout.max_memory_gb", "resident")
    host = memory.memory_limit(config(tmp_path), "cpu", 1)
    assert 0 < host.amount < 1 << 50
    group = tmp_path / "group"
    group.mkdir()
    for name, text in (("memory.max", "800000000"), ("memory.current", "500000000")):
        (group / name).write_text(text)
    (group / "memory.stat").write_text("anon 1\ninactive_file 100000000\n")
    monkeypatch.setattr(memory, "_own_cgroups", lambda: [group, tmp_path])
    mine = memory.memory_limit(config(tmp_path), "cpu", 2)
    assert mine.source == "the control group"
    assert mine.amount == pytest.approx(200_000_000 + memory._read_status()["VmRSS"], abs=5e7)
    (group / "memory.max").write_text("max")
    assert memory.memory_limit(config(tmp_path), "cpu", 1).source != "the control group"


def test_the_peak_is_that_of_what_was_done_since_it_was_forgotten() -> None:
    memory.reset_peak("resident")
    before = memory.read_peak("resident")
    block = torch.ones(25_000_000, dtype=torch.float64)
    assert memory.read_peak("resident") - before > 150_000_000
    del block
    memory.reset_peak("resident")
    assert memory.read_peak("resident") - before < 100_000_000
    assert memory.read_peak("address space") > before


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("not enough memory of what was said"), False),
    ],
)
def test_an_error_about_memory_is_known(error: Exception, told: bool) -> None:
    assert is_out_of_memory(error) is told
