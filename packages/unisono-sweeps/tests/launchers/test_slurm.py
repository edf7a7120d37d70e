"""`launcher=slurm`, on a real Slurm of two nodes: jobs outlive the command, and are exact whatever happens to them."""

from __future__ import annotations

import getpass
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from packages.unisono.tests.launch import jobs, slurm_cluster
from unisono.supervise.run_facts import read_run_facts

from ..eight import half_done, measured_table, sweep_process
from ..written import TASK

pytest.importorskip("submitit", reason="submitit is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(slurm_cluster.missing() is not None, reason=f"no Slurm: {slurm_cluster.missing()}"),
]
STEPS = 2000
SLURM = ("launcher=slurm", "time=1h")
BASE = ("optim=adamw", "train.global_batch=8", "layout.device=cpu", "name=s", "trial=false", *SLURM)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment
        subprocess.run(["scancel", "--user", getpass.getuser()], env={**os.environ, **environment}, check=False)
        jobs.wait_for(lambda: not _list_all(environment), 60)  # a test that failed leaves none of its jobs behind


def _list_all(environment: dict[str, str]) -> str:
    command = ["squeue", "--noheader", "--states=running,completing"]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def ask(cluster: dict[str, str]) -> Callable[..., str]:
    """What a command says that is run on the login node of the cluster."""

    def run(*command: str, code: int = 0) -> str:
        done = subprocess.run(command, env={**os.environ, **cluster}, capture_output=True, text=True, timeout=900)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def sweep(*words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "unisono", "sweep", TASK, *BASE, *words)


def release_held(ask: Callable[..., str]) -> None:
    """Slurm holds a job that it has requeued for two minutes; nobody waits for that here."""
    for line in ask("squeue", "--noheader", "--array", "--states=pending", "--format=%i %r").splitlines():
        number, reason = line.split(maxsplit=1)
        if reason == "BeginTime":
            ask("scontrol", "update", f"jobid={number}", "starttime=now")


def queued(ask: Callable[..., str], state: str) -> list[str]:
    return ask("squeue", "--noheader", "--array", f"--states={state}", "--format=%i").split()


def test_a_sweep_that_is_killed_cancelled_and_preempted_equals_an_unbroken_one_bit_for_bit(
    here: Path, cluster: dict[str, str], ask: Callable[..., str]
) -> None:
    """Of 8 runs: the command is killed, one job is cancelled, another is preempted; the table is the same."""
    whole, broken = here / "whole", here / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    assert sweep_process(whole, steps=STEPS).wait(900) == 0
    first = sweep_process(broken, *SLURM, "jobs=2", steps=STEPS, environment=cluster)
    jobs.wait_for(lambda: len(half_done(broken, STEPS)) == 2 or first.poll() is not None, 600)
    cut = half_done(broken, STEPS)
    first.send_signal(signal.SIGKILL)
    first.wait()
    numbers = [json.loads((broken / f"runs/s/console/{run.name}.slurm.json").read_text())["job"] for run in cut]
    ask("scancel", numbers[0])
    urgent = ask("sbatch", "--parsable", "-p", "urgent", "--exclusive", "-N2", "-o", "/dev/null", "--wrap", "true")
    jobs.wait_for(lambda: urgent.strip() not in queued(ask, "pending,running"), 120)
    assert "Restarts=1 " in ask("scontrol", "show", "job", "--oneliner", numbers[1])
    second = sweep_process(broken, *SLURM, "jobs=2", steps=STEPS, environment=cluster)
    while second.poll() is None:
        release_held(ask)
        time.sleep(1)
    assert second.wait() == 0
    assert all("resuming after step" in printed(run) for run in cut)
    assert "preempted after step" in printed(cut[0])
    tables = [measured_table(folder / "runs/s") for folder in (whole, broken)]
    assert tables[0].num_rows == 8
    assert tables[0].equals(tables[1])


def printed(run: Path) -> str:
    """All that a run printed."""
    return (run.parent / "console" / f"{run.name}.log").read_text()


def test_a_run_that_reaches_its_time_limit_saves_and_continues_in_the_queue(
    here: Path, cluster: dict[str, str], ask: Callable[..., str]
) -> None:
    """Slurm's warning is sent by hand; another run fails, is reported by its sentence, and ends no other."""
    words = sweep("optim.lr=1e30,0.01", "train.steps=1500", "checkpoint.every=1000")
    process = subprocess.Popen(
        words, env={**os.environ, **cluster}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    run = here / "runs/s/lr0.01"
    jobs.wait_for(lambda: (run / "config.yaml").is_file() and read_run_facts(run).steps_done > 50, 300)
    number = json.loads((here / "runs/s/console/lr0.01.slurm.json").read_text())["job"]
    ask("scancel", "--signal=USR1", number)
    jobs.wait_for(lambda: number in queued(ask, "pending"), 120)
    step = int(sorted((run / "checkpoints").glob("step-*"))[-1].name.removeprefix("step-"))
    assert 50 <= step < 1000
    while process.poll() is None:
        release_held(ask)
        time.sleep(1)
    said = process.communicate()[0]
    assert process.returncode == 1
    assert "lr1e+30: failed with exit code 3: step 2: the loss is not finite" in said
    assert "lr0.01: finished" in said
    assert f"resuming after step {step}" in printed(run)
    assert read_run_facts(run).steps_done == 1500


def test_a_run_may_have_several_nodes(here: Path, ask: Callable[..., str]) -> None:
    """Slurm starts its processes, two on each node; the losses are those of one process."""
    said = ask(*sweep("optim.lr=0.01", "train.steps=6", "layout.world_size=4", "nodes=2", "jobs=1"))
    assert "run: finished" in said
    many = read_run_facts(here / "runs/s/run")
    assert (many.config["layout"]["world_size"], many.config["layout"]["strategy"]) == (4, "ddp")
    words = (*BASE[:3], "optim.lr=0.01", "train.steps=6", "run.name=alone")
    ask(sys.executable, "-m", "unisono", "train", TASK, *words)
    alone = read_run_facts(here / "runs/alone")
    assert [step["loss"] for step in many.steps] == pytest.approx([step["loss"] for step in alone.steps], rel=1e-5)
    fault = ask(*sweep("optim.lr=1e30", "train.steps=6", "layout.world_size=2", "nodes=2", "name=bad"), code=1)
    assert "run: failed with exit code 3: rank 0: step 2: the loss is not finite" in fault


def test_a_command_that_is_interrupted_leaves_the_jobs_with_slurm_and_says_how_to_end_them(
    here: Path, cluster: dict[str, str], ask: Callable[..., str]
) -> None:
    words = ("train.steps=100000", "checkpoint.every=5000")
    command = sweep("optim.lr=0.1,0.01", *words)
    process = subprocess.Popen(command, env={**os.environ, **cluster}, stderr=subprocess.PIPE, text=True)
    run = here / "runs/s/lr0.01"
    jobs.wait_for(lambda: (run / "config.yaml").is_file() and read_run_facts(run).steps_done > 10, 300)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    (number,) = re.findall(r"2 jobs stay with Slurm, .* scancel (\d+)", said)
    assert "train.steps was 100000 and is 7" in ask(*sweep("optim.lr=0.1,0.01", "train.steps=7"), code=2)
    other = ask(*sweep("optim.lr=0.1,0.01", *words, "launch.timeout=300"), code=2)
    assert f"lr0.1 is with Slurm already, as job {number}_0, with another command: scancel {number}_0" in other
    ask("scancel", number)
    jobs.wait_for(lambda: not queued(ask, "running,completing"), 120)
    assert json.loads((here / "runs/s/console/lr0.01.ended.json").read_text())["code"] == 75
    assert "resumes after step" in ask(*command, "--dry-run")


def test_what_slurm_would_refuse_is_refused_before_anything_starts(here: Path, ask: Callable[..., str]) -> None:
    said = ask(*sweep("optim.lr=0.1", "train.steps=3", "partition=nowhere", "--dry-run"), code=2)
    assert "Slurm refuses a job of run (--partition=nowhere" in said
    assert "Invalid partition name specified" in said
    said = ask(*sweep("optim.lr=0.1", "train.steps=3", "memory_gb=900"), code=2)
    assert "--mem=921600M" in said
    said = ask(*sweep("optim.lr=0.1", "train.steps=3", "time=3m"), code=2)
    assert "time=3m: Slurm warns a job warn_seconds=120 before its limit" in said
    assert "use time=4m or more, or a smaller warn_seconds=" in said
    said = ask(*sweep("optim.lr=0.1", "train.steps=3", "nodes=2", "layout.world_size=1"), code=2)
    assert "nodes=2: run has 1 process, which cannot be divided among them" in said
    assert not (here / "runs").exists()


def test_a_single_run_and_a_proof_are_jobs_too(here: Path, ask: Callable[..., str]) -> None:
    unisono, words = (sys.executable, "-m", "unisono"), (*BASE[:3], "train.steps=5", *SLURM)
    said = ask(*unisono, "train", TASK, *words, "run.name=mine", "layout.world_size=2")
    assert "mine: submitted" in said
    assert "step 5/5" in said
    assert read_run_facts(here / "runs/mine").config["layout"]["world_size"] == 2
    assert "exit code 3" in ask(*unisono, "train", TASK, *words, "optim.lr=1e30", code=3)
    assert "PASS" in ask(*unisono, "prove", TASK, *BASE[:3], "layouts=[ddp:2]", "vary=[]", *SLURM)
    assert "unknown key 'optim.lrr'" in ask(*unisono, "train", TASK, *words, "optim.lrr=1", code=2)
    assert len(list((here / "runs/launched").glob("*.ended.json"))) == 3


def test_a_job_reserves_what_its_words_and_its_run_say(here: Path, ask: Callable[..., str]) -> None:
    """Cores: a tenth of the memory in GB, or the workers of the run if these are more; Slurm may requeue it."""
    words = ("gpus=2", "memory_gb=32", "partition=urgent", "sbatch={comment: mine}", "train.steps=3")
    ask(*sweep("optim.lr=0.1", *words, "data.workers=2"))
    ask(*sweep("optim.lr=0.1", *words, "data.workers=4", "name=t"))
    for name, cores in (("s", 3), ("t", 4)):
        number = json.loads((here / f"runs/{name}/console/run.slurm.json").read_text())["job"]
        shown = ask("scontrol", "show", "job", "--oneliner", number)
        for said in (
            f"NumCPUs={cores} ",
            "TresPerNode=gres:gpu:2",
            "MinMemoryNode=32G",
            "Partition=urgent",
            "Requeue=1",
        ):
            assert said in shown
        assert "TimeLimit=01:00:00" in shown
        assert "Comment=mine" in shown
    assert "--gpus-per-node=3" in ask(*sweep("optim.lr=0.1", "gpus=3", "train.steps=3", "--dry-run"), code=2)


def train_some_steps(
    command: Sequence[str], here: Path, cluster: Mapping[str, str]
) -> tuple[subprocess.Popen[str], Path]:
    """A command that goes on, and the folder of its run, which has made some steps."""
    process = subprocess.Popen(command, env={**os.environ, **cluster}, stdout=subprocess.PIPE, text=True)
    run = here / "runs/s/run"
    jobs.wait_for(lambda: (run / "config.yaml").is_file() and read_run_facts(run).steps_done > 50, 300)
    return process, run


def test_a_run_that_reaches_its_limit_too_often_stays_saved_and_the_same_command_resumes_it(
    here: Path, cluster: dict[str, str], ask: Callable[..., str]
) -> None:
    command = sweep("optim.lr=0.01", "train.steps=1500", "checkpoint.every=1000", "time=10m", "max_num_timeout=0")
    process, run = train_some_steps(command, here, cluster)
    ask("scancel", "--signal=USR1", json.loads((here / "runs/s/console/run.slurm.json").read_text())["job"])
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 1
    assert "run: saved and stopped: " in said
    assert "timed-out too many times. What it has saved resumes with the same command" in said
    step = read_run_facts(run).steps_done
    assert f"run: resumes after step {step}" in ask(*command)
    assert read_run_facts(run).steps_done == 1500


def test_a_run_of_several_nodes_that_is_warned_saves_and_continues_in_the_queue(
    here: Path, cluster: dict[str, str], ask: Callable[..., str]
) -> None:
    words = sweep("optim.lr=0.01", "train.steps=1500", "checkpoint.every=1000", "layout.world_size=2", "nodes=2")
    process, run = train_some_steps(words, here, cluster)
    number = json.loads((here / "runs/s/console/run.slurm.json").read_text())["job"]
    ask("scancel", "--signal=USR1", number)
    jobs.wait_for(lambda: number in queued(ask, "pending"), 120)
    while process.poll() is None:
        release_held(ask)
        time.sleep(1)
    assert "run: finished" in process.communicate()[0]
    assert "resuming after step" in printed(run)
    assert read_run_facts(run).steps_done == 1500


SPACE = """
def space(trial):
    number = trial.suggest_int("number", 0, 99)  # the sixth trial learns nothing, and is long
    bad = trial.number == 5
    return {"optim.lr": 1e-9 if bad else 0.01, "train.steps": 20000 if bad else 40, "eval.every": 10}
"""


def test_a_search_survives_its_command_and_prunes(here: Path, cluster: dict[str, str], ask: Callable[..., str]) -> None:
    pytest.importorskip("optuna")
    Path("mine.py").write_text(SPACE)
    evaluated = TASK.replace("LinearTask", "TransformerTask")
    base = ("optim=adamw", "train.global_batch=9", "layout.device=cpu", *SLURM)
    command = (
        sys.executable, "-m", "unisono", "search", evaluated, *base, "space=mine.py", "trials=6", "jobs=1", "name=q"
    )  # fmt: skip
    first = subprocess.Popen(command, env={**os.environ, **cluster})
    jobs.wait_for(lambda: (here / "runs/q/trial-00001/config.yaml").exists() or first.poll() is not None, 300)
    first.send_signal(signal.SIGKILL)
    first.wait()
    said = ask(*command)
    assert "trial-00005: pruned after step" in said
    assert "best of 5: trial-" in said
    assert [read_run_facts(here / f"runs/q/trial-0000{number}").steps_done for number in range(5)] == [40] * 5
    assert read_run_facts(here / "runs/q/trial-00005").steps_done < 20000


def test_data_that_a_job_prepares_are_those_of_this_host_byte_for_byte(here: Path, ask: Callable[..., str]) -> None:
    Path("texts").mkdir()
    for number in range(40):
        Path(f"texts/{number}.txt").write_text(f"text {number} of a small corpus\n" * (number + 1))
    command = (sys.executable, "-m", "unisono", "data", "prepare", "language", "data=corpus", "data.path=texts")
    ask(*command, "out=here")
    assert "submitted" in ask(*command, "out=there", "workers=2", *SLURM)
    files = [
        {path.name: path.read_bytes() for path in (here / name).iterdir() if path.suffix != ".json"}
        for name in ("here", "there")
    ]
    assert files[0]
    assert files[0] == files[1]
