"""`launcher=ray`, on a cluster of two hosts that are processes of this one."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from packages.unisono.tests.launch import jobs
from unisono.supervise.run_facts import read_run_facts

from ..eight import STEPS, half_done, measured_table, sweep_process
from ..written import TASK

pytest.importorskip("ray", reason="ray is not installed")

pytestmark = pytest.mark.slow
BASE = ("optim=adamw", "train.global_batch=8", "layout.device=cpu", "trial=false")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster of two hosts with two cores each."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    made.add_node(num_cpus=2)
    yield made.address
    made.shutdown()


@pytest.fixture
def ask(cluster: str, here: Path) -> Callable[..., str]:
    """What a command says on the cluster, by default a sweep."""

    def run(*words: str, code: int = 0, verb: str = "sweep", task: str = TASK) -> str:
        command = [sys.executable, "-m", "unisono", *verb.split(), task, "launcher=ray", f"address={cluster}"]
        command += [*{"sweep": BASE, "data prepare": ()}.get(verb, BASE[:3]), *words]
        done = jobs.finished(command, here)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def test_a_sweep_that_is_killed_and_resumed_equals_an_unbroken_one_bit_for_bit(here: Path, cluster: str) -> None:
    """Of 8 runs, two at a time: the command is killed, and its runs end with it; the table is the same."""
    whole, broken = here / "whole", here / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    words = ("launcher=ray", f"address={cluster}", "jobs=2")
    assert sweep_process(whole).wait(900) == 0
    first = sweep_process(broken, *words)
    jobs.wait_for(lambda: len(half_done(broken)) > 0 or first.poll() is not None, 600)
    cut = half_done(broken)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert cut
    assert sweep_process(broken, *words).wait(900) == 0
    outcomes = [json.loads(line) for line in (broken / "runs/s/outcomes.jsonl").read_text().splitlines()]
    assert {run.name for run in cut} <= {one["run"] for one in outcomes if one["code"] == 0}
    tables = [measured_table(folder / "runs/s") for folder in (whole, broken)]
    assert tables[0].num_rows == 8
    assert tables[0].equals(tables[1])


def test_a_run_may_have_several_hosts_and_one_that_fails_ends_no_other(ask: Callable[..., str], here: Path) -> None:
    said = ask("optim.lr=1e30,0.01", "train.steps=6", "layout.world_size=2", "nodes=2", "cpus=1", "name=s", code=1)
    assert "lr1e+30: failed with exit code 3: step 2: the loss is not finite" in said
    assert "lr0.01: finished" in said
    many = read_run_facts(here / "runs/s/lr0.01")
    assert many.config["launch"]["nodes"] == 2
    assert many.steps_done == 6


def test_what_no_host_has_is_refused(ask: Callable[..., str]) -> None:
    assert "needs 1 × (3 CPU), and of the cluster's 2 hosts 0 have that" in ask("optim.lr=1,2", "cpus=3", code=2)
    assert "needs 3 × (1 CPU), and of the cluster's 2 hosts 2 have that" in ask(
        "optim.lr=1,2", "nodes=3", "layout.world_size=3", "train.global_batch=9", code=2
    )
    assert "launcher=ray: no cluster at address=127.0.0.1:1" in ask("optim.lr=1,2", "address=127.0.0.1:1", code=2)


def test_a_search_a_single_run_and_a_proof_run_there_too(ask: Callable[..., str], here: Path) -> None:
    pytest.importorskip("optuna")
    words = ("optim.lr=tag(log,interval(1e-3,1e-1))", "train.steps=6", "metric=loss", "name=q", "jobs=2")
    assert "best of 3: trial-" in ask(*words, "trials=3", verb="search")
    assert "best of 4: trial-" in ask(*words, "trials=4", verb="search")
    tried = sorted((here / "runs/q").glob("trial-*"))
    assert [read_run_facts(run).steps_done for run in tried] == [6] * 4
    assert "step 5/5" in ask("train.steps=5", "run.name=mine", "layout.world_size=2", "cpus=1", verb="train")
    assert read_run_facts(here / "runs/mine").config["layout"]["world_size"] == 2
    assert "exit code 3" in ask("train.steps=5", "optim.lr=1e30", verb="train", code=3)
    assert "PASS" in ask("layouts=[ddp:2]", "vary=[]", verb="prove")


def test_a_run_whose_host_dies_resumes_on_another_one_and_the_others_do_not_notice(here: Path) -> None:
    """A raylet is killed, as a host that loses its power; the tables are those of an unbroken sweep."""
    from ray.cluster_utils import Cluster

    whole, broken = here / "whole", here / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    assert sweep_process(whole).wait(900) == 0
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    mortal = made.add_node(num_cpus=1)
    try:
        words = ("launcher=ray", f"address={made.address}", "jobs=2", "cpus=1")
        with (broken / "said").open("wb") as said:
            first = sweep_process(broken, *words, steps=STEPS, output=said)
        jobs.wait_for(lambda: len(half_done(broken)) > 0 or first.poll() is not None, 600)
        made.remove_node(mortal, allow_graceful=False)  # each of the two hosts has a run
        lost = "a host of the run is lost"
        jobs.wait_for(lambda: lost in (broken / "said").read_text() or first.poll() is not None, 600)
        made.add_node(num_cpus=1)
        assert first.wait(900) == 0
    finally:
        made.shutdown()
    text = (broken / "said").read_text()
    assert text.count("it resumes on another one") == 1
    assert ": failed with exit code" not in text
    tables = [measured_table(folder / "runs/s") for folder in (whole, broken)]
    assert tables[0].num_rows == 8
    assert tables[0].equals(tables[1])


def test_data_that_a_host_prepares_are_those_of_this_one_byte_for_byte(ask: Callable[..., str], here: Path) -> None:
    (here / "texts").mkdir()
    for number in range(40):
        (here / f"texts/{number}.txt").write_text(f"text {number} of a small corpus\n" * (number + 1))
    words = ("data", "prepare", "language", "data=corpus", "data.path=texts")
    alone = jobs.finished([sys.executable, "-m", "unisono", *words, "out=here"], here)
    assert alone.returncode == 0, alone.stderr
    assert "submitted" in ask(
        "data=corpus", "data.path=texts", "out=there", "workers=2", verb="data prepare", task=words[2]
    )
    files = [
        {path.name: path.read_bytes() for path in (here / name).iterdir() if path.suffix != ".json"}
        for name in ("here", "there")
    ]
    assert files[0]
    assert files[0] == files[1]
