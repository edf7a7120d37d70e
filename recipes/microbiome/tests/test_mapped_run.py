"""A table that is mapped from a file is trained on, killed, resumed, evaluated and predicted as one in memory is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from packages.unisono.tests.launch import jobs
from packages.unisono.tests.real_data import real
from recipes.microbiome.tests.made import TINY
from unisono.checkpoint.core import commit
from unisono.checkpoint.core.arrays import ArrayReader

STEPS = 40


def settings(folder: Path, in_memory: bool) -> list[str]:
    study, model = real("microbiome_ibd"), {**TINY, "encoder": "taxon"}
    data = {
        "table": study / "table.biom", "metadata": study / "metadata.tsv", "tree": study / "tree.nwk",
        "group": "host_subject_id", "target": "ibd", "distances_of": "rarefied", "rarefy": 1000, "max_taxa": 24,
        "cache": folder / "cache", "in_memory": str(in_memory).lower(),
    }  # fmt: skip
    return [
        "data=study", *(f"data.{key}={value}" for key, value in data.items()),
        *(f"model.{key}={value}" for key, value in model.items()),
        "task.weights={distance: 1, target: 1, shannon: 1, faith_pd: 1, counts: 1}", "train.global_batch=16",
        f"train.steps={STEPS}", "layout.world_size=2", "layout.threads=1", "checkpoint.every=4", "eval.every=null",
        "observe.progress=false", "run.name=a",
    ]  # fmt: skip


def read_state(run: Path) -> dict[str, bytes]:
    """The arrays of the last checkpoint."""
    newest = commit.open_checkpoint(commit.find_checkpoints(run / "checkpoints")[-1])
    assert newest.step == STEPS
    reader = ArrayReader(newest.path, newest.arrays)
    return {name: reader.read(name, (0,) * len(shape), shape).tobytes() for name, shape in reader.shapes.items()}


def read_losses(run: Path) -> dict[int, float]:
    """Loss of each step, as told last."""
    return {
        line["step"]: line["loss"] for line in read_lines(run / "events.jsonl") if "loss" in line and "eval" not in line
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_a_run_on_a_mapped_table_that_was_killed_is_the_run_from_memory(tmp_path: Path) -> None:
    """Two processes; every process is killed by SIGKILL; weights, moments, losses and predictions are the same bits."""
    told, predicted = {}, {}
    for name, in_memory in (("memory", True), ("mapped", False)):
        folder = tmp_path / name
        folder.mkdir()
        train, run = ["train", "microbiome", *settings(folder, in_memory)], folder / "runs" / "a"
        if not in_memory:
            with jobs.started([jobs.UNISONO, *train], folder):
                jobs.wait_for(lambda run=run: (run / "checkpoints" / "step-00000004").is_dir(), 200)
            assert not (run / "checkpoints" / f"step-{STEPS:08}").exists(), "it was not killed in time"
        done = jobs.unisono(*train, cwd=folder, timeout=280)
        assert done.returncode == 0, done.stderr
        starts = [line for line in read_lines(run / "ledger" / "rank-00000.jsonl") if "start" in line]
        assert [line["first"] > 0 for line in starts] == [False] + [True] * (not in_memory)
        written = [path.name for path in (folder / "cache").rglob("indices.npy")]
        assert bool(written) is not in_memory
        evaluated = jobs.unisono("evaluate", str(run), cwd=folder)
        asked = jobs.unisono("predict", str(run), "out=p.tsv", "draws=2", "baseline=false", cwd=folder)
        assert (evaluated.returncode, asked.returncode) == (0, 0), evaluated.stderr + asked.stderr
        told[name] = (read_state(run), read_losses(run), evaluated.stdout)
        predicted[name] = [(folder / file).read_bytes() for file in ("p.tsv", "p.distances.tsv")]
    assert len(told["memory"][0]) > 10
    assert sorted(told["memory"][1]) == list(range(1, STEPS + 1))
    assert told["mapped"] == told["memory"]
    assert predicted["mapped"] == predicted["memory"]
