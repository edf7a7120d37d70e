"""Two nodes with disks of their own and an object store: a job that loses a node ends as the unbroken one.

The nodes are network namespaces, each with a mount of its own at the same path; the store is a process that speaks S3.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from packages.unisono.tests.checkpoint import saved
from packages.unisono.tests.launch import jobs
from tests.launch import namespaces, test_nodes
from tests.launch.namespaces import Host

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(test_nodes.NO_HOSTS is not None, reason=f"no namespaces: {test_nodes.NO_HOSTS}"),
]

ADDRESS = f"http://{namespaces.ADDRESSES[0]}:29500"
STORE = {
    "AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing", "AWS_ENDPOINT_URL": ADDRESS,
    "AWS_EC2_METADATA_DISABLED": "true", "UNISONO_TOKEN": "a" * 64,
}  # fmt: skip
WORDS = (
    "launch.shared_folder=false", "checkpoint.upload.url=s3://runs/all", "layout.world_size=2", "train.steps=12",
    "checkpoint.every=4", "eval.every=4", "task.sleep=0.05", "launch.timeout=20",
)  # fmt: skip
MAKE_BUCKET = "import s3fs; s3fs.S3FileSystem().mkdir('runs')"


@pytest.fixture(scope="module")
def pair() -> Iterator[Sequence[Host]]:
    """Two hosts; the first has the store, too."""
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    with namespaces.hosts() as found, pytest.MonkeyPatch.context() as changed:
        for name, value in STORE.items():
            changed.setenv(name, value)
        serve = [sys.executable, "-m", "moto.server", "-H", namespaces.ADDRESSES[0], "-p", "29500"]
        with subprocess.Popen(found[0].command(*serve), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as server:
            try:
                jobs.wait_for(lambda: _run(found[0], sys.executable, "-c", MAKE_BUCKET) == 0, 60)
                yield found
            finally:
                server.kill()


def _run(host: Host, *command: str) -> int:
    return subprocess.run(host.command(*command), capture_output=True).returncode


@contextmanager
def job(pair: Sequence[Host], here: Path, *words: str) -> Iterator[list[subprocess.Popen[str]]]:
    """The job on both hosts, each with the disk of its number as `runs`."""
    for name in ("runs", "disk-0", "disk-1"):
        (here / name).mkdir(exist_ok=True)
    mounts = [f"mount --bind {here}/disk-{node} {here}/runs" for node in range(2)]
    with test_nodes.job(pair, here, *WORDS, *words, before=mounts) as processes:
        yield processes


def finish(pair: Sequence[Host], here: Path, *words: str) -> list[subprocess.CompletedProcess[str]]:
    with job(pair, here, *words) as processes:
        return jobs.ends(processes, 180)


def computed(here: Path) -> list[dict[str, Any]]:
    """The events of node 0, without what belongs to the clock and to the process."""
    timed = {"seconds", "rows_per_second", "data_wait", "memory_gb"}
    events = [event for event in jobs.events(here / "disk-0" / "a") if "restored" not in event]
    return [{k: v for k, v in event.items() if k not in timed} for event in events]


@pytest.fixture(scope="module")
def unbroken(pair: Sequence[Host], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job that nothing happens to, called `a` as the others, in a store of its own."""
    here = tmp_path_factory.mktemp("unbroken")
    jobs.task_file(here)
    done = finish(pair, here, "checkpoint.upload.url=s3://runs/unbroken")
    assert [one.returncode for one in done] == [0, 0], done
    return here


def test_each_disk_has_its_part_and_node_0_the_last_checkpoint(unbroken: Path):
    found = [sorted(path.name for path in (unbroken / f"disk-{n}/a/checkpoints").rglob("*.safe*")) for n in range(2)]
    assert found == [["rank-00000.safetensors", "rank-00001.safetensors"], ["rank-00001.safetensors"]]
    logs = [sorted(path.name for path in (unbroken / f"disk-{n}/a/logs").glob("rank-*.log")) for n in range(2)]
    assert logs == [["rank-00000.log"], ["rank-00001.log"]]
    told = jobs.unisono("evaluate", "disk-0/a", "--task", "small.py:Small", cwd=unbroken)
    assert told.returncode == 0, told.stderr


@pytest.mark.parametrize("lost", [False, True], ids=["its disk remains", "its disk is lost"])
def test_a_job_whose_node_is_killed_ends_as_the_unbroken_one(
    pair: Sequence[Host], unbroken: Path, here: Path, lost: bool
):
    store = f"checkpoint.upload.url=s3://runs/{'lost' if lost else 'kept'}"
    marks = here / "marks"
    with job(pair, here, store, f"task.marks={marks}") as processes:
        rank = jobs.training(marks, 2)[1]
        parts = [here / f"disk-{node}" / "a" / "checkpoints" for node in range(2)]
        jobs.wait_for(lambda: all(list(path.glob(".fetching-step-*")) for path in parts), 120)
        for process in (processes[1].pid, rank):
            os.kill(process, signal.SIGKILL)
        done = jobs.ends(processes, 60)
    assert done[1].returncode == -9 and done[0].returncode not in (0, -9), done
    assert "The newest checkpoint is from step " in done[0].stderr, done[0].stderr
    if lost:
        shutil.rmtree(here / "disk-1")
    done = finish(pair, here, store, "run.resume=must", f"task.marks={marks}")
    assert [one.returncode for one in done] == [0, 0], done
    assert computed(here) == computed(unbroken)
    of_both = [saved.load(folder / "disk-0/a/checkpoints/step-00000012") for folder in (here, unbroken)]
    assert of_both[0].keys() == of_both[1].keys()
    assert all(bool((value == of_both[1][name]).all()) for name, value in of_both[0].items())


def test_a_job_moves_to_new_machines_with_its_store_alone(pair: Sequence[Host], unbroken: Path, here: Path):
    store = "checkpoint.upload.url=s3://runs/moved"
    assert [one.returncode for one in finish(pair, here, store, "run.stop_after=6")] == [0, 0]
    for disk in ("disk-0", "disk-1"):
        shutil.rmtree(here / disk)
    done = finish(pair, here, store)
    assert [one.returncode for one in done] == [0, 0], done
    assert "restored step-00000006 from s3://runs/moved/a" in done[0].stdout
    assert "resuming after step 6" in done[0].stdout
    last = [event for event in computed(unbroken) if event["step"] > 6]
    assert [event for event in computed(here) if event["step"] > 6] == last


def test_disks_that_are_one_folder_are_refused(pair: Sequence[Host], here: Path):
    words = [*WORDS, "checkpoint.upload.url=s3://runs/one"]
    done = test_nodes.run(pair, here, *words)
    assert [one.returncode for one in done] == [2, 2]
    told = f"{here}/runs/a is the folder of node 0, but launch.shared_folder=false"
    assert all(told in test_nodes.fault(one) for one in done)


def test_a_stop_asked_for_on_any_node_stops_the_job(pair: Sequence[Host], here: Path):
    with job(
        pair, here, "checkpoint.upload.url=s3://runs/stop", "train.steps=4000", f"task.marks={here}/marks"
    ) as both:
        jobs.training(here / "marks", 2)
        (here / "disk-1" / "a" / "stop").touch()
        done = jobs.ends(both, 120)
    assert [one.returncode for one in done] == [0, 0], done
    assert "stopped after step" in done[0].stdout
    config = yaml.safe_load((here / "disk-1" / "a" / "config.yaml").read_text())
    assert config["launch"]["shared_folder"] is False
