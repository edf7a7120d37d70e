"""A job under a real Slurm: two nodes with two tasks each, and what happens where one task fails."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from packages.unisono.tests.launch import jobs, slurm_cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(slurm_cluster.missing() is not None, reason=f"no Slurm: {slurm_cluster.missing()}"),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


FOUR = ("--nodes=2", "--ntasks-per-node=2")


def srun(
    slurm: dict[str, str], cwd: Path, *words: str, tasks: Sequence[str] = FOUR
) -> subprocess.CompletedProcess[str]:
    jobs.task_file(cwd)
    command = ["srun", *tasks, jobs.UNISONO]
    return jobs.finished([*command, "train", "small.py:Small", "train.global_batch=8", *words], cwd, **slurm)


@pytest.fixture(scope="module")
def job(
    slurm: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A finished job, and its only run."""
    folder = tmp_path_factory.mktemp("job")
    done = srun(slurm, folder, "train.steps=4", "layout.world_size=9")
    return folder, done


def test_srun_starts_the_processes_of_a_run(job: tuple[Path, subprocess.CompletedProcess[str]]):
    folder, done = job
    assert done.returncode == 0, done.stderr
    (run,) = (folder / "runs").iterdir()
    layout: dict[str, Any] = yaml.safe_load((run / "config.yaml").read_text())["layout"]
    assert (layout["world_size"], layout["strategy"], layout["micro_batch"]) == (4, "ddp", 2)


def test_a_job_s_run_has_the_job_s_number(job: tuple[Path, subprocess.CompletedProcess[str]]):
    assert [run.name for run in (job[0] / "runs").iterdir()] == ["small-job1"]


def test_a_job_says_everything_once(job: tuple[Path, subprocess.CompletedProcess[str]]):
    assert sum(line.startswith("step 4/4") for line in job[1].stdout.splitlines()) == 1


def test_every_task_keeps_a_log_of_its_own(job: tuple[Path, subprocess.CompletedProcess[str]]):
    logs = sorted((job[0] / "runs" / "small-job1" / "logs").glob("*.log"))
    assert [path.name for path in logs] == [f"rank-{rank:05d}.log" for rank in range(4)]


def test_a_job_computes_what_one_process_computes(job: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path):
    jobs.task_file(tmp_path)
    done = jobs.unisono("train", "small.py:Small", *jobs.QUIET, "train.steps=4", "run.name=a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    mine, theirs = jobs.events(tmp_path / "runs" / "a"), jobs.events(job[0] / "runs" / "small-job1")
    assert [event["loss"] for event in theirs] == pytest.approx([event["loss"] for event in mine], rel=1e-5)


def test_a_mistake_ends_the_job_and_is_told_by_every_task(slurm: dict[str, str], tmp_path: Path):
    done = srun(slurm, tmp_path, "optim.lrr=3")
    assert done.returncode == 2
    mistake = "unknown key 'optim.lrr' (override 'optim.lrr=3'), did you mean 'optim.lr'?"
    assert {rank for rank in range(4) if f"unisono: error on rank {rank}: {mistake}" in done.stderr} == {0, 1, 2, 3}


def test_a_job_of_one_task_is_a_single_process(slurm: dict[str, str], tmp_path: Path):
    done = srun(slurm, tmp_path, "train.steps=3", tasks=("--nodes=1", "--ntasks=1"))
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    layout: dict[str, Any] = yaml.safe_load((run / "config.yaml").read_text())["layout"]
    assert (layout["world_size"], layout["strategy"]) == (1, "single")


BATCH = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --requeue
srun {unisono} train small.py:Small train.global_batch=8 run.name=a train.steps=5000 task.sleep=0.02 task.marks=marks
code=$?
echo $code > code
exit $code
"""


def test_a_signal_to_a_job_s_tasks_is_answered_by_all_of_them(slurm: dict[str, str], tmp_path: Path):
    job, elsewhere = tmp_path / "job", tmp_path / "elsewhere"
    (job / "marks").mkdir(parents=True)
    elsewhere.mkdir()
    jobs.task_file(job)
    (job / "batch.sh").write_text(BATCH.format(unisono=jobs.UNISONO))
    batch = ["sbatch", "--parsable", f"--chdir={job}", str(job / "batch.sh")]
    number = jobs.finished(batch, elsewhere, **slurm).stdout.strip()
    jobs.training(job / "marks", 1)  # srun sets no RANK, so both tasks leave the same mark
    jobs.finished(["scancel", "--signal=USR1", number], elsewhere, **slurm)
    jobs.wait_for(lambda: (job / "code").is_file() and bool((job / "code").read_text()), 60)
    assert (job / "code").read_text() == "75\n", (job / f"slurm-{number}.out").read_text()
    assert len(list((job / "runs" / "a" / "checkpoints").glob("step-*"))) == 1
