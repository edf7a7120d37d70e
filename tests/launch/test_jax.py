"""Runs in JAX that torchrun, srun or several hosts start: they compute what one process does, and end as promised."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from packages.unisono.tests.engines.jax.test_processes import TRAIN, assert_same_runs, train
from packages.unisono.tests.launch import jobs, slurm_cluster
from tests.launch import namespaces
from tests.launch.namespaces import Host
from tests.launch.test_nodes import MEET, fault
from unisono.checkpoint.core import commit

Done = subprocess.CompletedProcess[str]
NO_HOSTS, NO_SLURM = namespaces.missing(), slurm_cluster.missing()
hosts_needed = pytest.mark.skipif(NO_HOSTS is not None, reason=f"no namespaces: {NO_HOSTS}")
pytestmark = pytest.mark.slow

STEPS = ("run.name=a", "train.steps=10")
FSDP = ("layout.devices=2", "layout.strategy=fsdp")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("one"), "one", "layout.micro_batch=8", "train.steps=10")


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Host, Host]]:
    with namespaces.hosts() as found:
        yield found


def both(folder: Path, commands: Sequence[Sequence[str]], variables: Sequence[Mapping[str, str]] = ()) -> list[Done]:
    with ExitStack() as stack:
        given = variables or [{}] * len(commands)
        return jobs.ends(
            [stack.enter_context(jobs.started(c, folder, **own)) for c, own in zip(commands, given, strict=True)], 300
        )


def nodes(pair: Sequence[Host], folder: Path, *words: str) -> list[Done]:
    """The same command on each host, with our own launcher."""
    command = [jobs.UNISONO, *TRAIN, *STEPS, *FSDP, *MEET, "layout.world_size=2", *words]
    return both(folder, [host.command(*command, f"launch.node_rank={rank}") for rank, host in enumerate(pair)])


def by_hand(pair: Sequence[Host], folder: Path, own: Mapping[int, Sequence[str]], before: str = "") -> list[Done]:
    """Two processes on each host with torchrun's variables; on the first host rank 0's name means the loopback."""
    commands, variables = [], []
    for rank in range(4):
        words = [jobs.UNISONO, *TRAIN, *STEPS, "layout.strategy=fsdp", *own.get(rank, ())]
        commands.append(pair[rank // 2].command(*words, before=before if rank > 1 else ""))
        variables.append(
            {
                "RANK": f"{rank}", "WORLD_SIZE": "4", "LOCAL_RANK": f"{rank % 2}", "LOCAL_WORLD_SIZE": "2",
                "GROUP_RANK": f"{rank // 2}",
                "MASTER_ADDR": "10.99.0.1" if rank > 1 else socket.gethostname(), "MASTER_PORT": "29410",
            }
        )  # fmt: skip
    return both(folder, commands, variables)


def test_torchrun_starts_the_processes(one: Path, tmp_path: Path) -> None:
    command = [*jobs.torchrun("--nproc-per-node=2", "--no-python"), jobs.UNISONO]
    done = jobs.finished([*command, *TRAIN, *STEPS, *FSDP, "layout.world_size=7"], tmp_path, 300)
    assert done.returncode == 0, done.stderr
    assert_same_runs(tmp_path / "runs" / "a", one, 1e-12)


@hosts_needed
def test_two_hosts_compute_what_one_device_computes_and_go_on_after_a_kill(
    pair: tuple[Host, Host], one: Path, tmp_path: Path
) -> None:
    """Both hosts have a name that means 127.0.0.1, where gloo and JAX's coordinator must not listen."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    assert [done.returncode for done in nodes(pair, whole)] == [0, 0]
    assert_same_runs(whole / "runs" / "a", one, 1e-12)
    killed = nodes(pair, cut, "checkpoint.every=3", "--fault", "rank=1,step=5,phase=forward,act=kill")
    assert [done.returncode for done in killed] == [5, 9], killed
    assert "rank 1 (" in fault(killed[1]) and "died without a message, in step 5" in fault(killed[1])
    assert len(commit.find_checkpoints(cut / "runs" / "a" / "checkpoints")) == 1
    gone_on = nodes(pair, cut, "checkpoint.every=3")
    assert [done.returncode for done in gone_on] == [0, 0], gone_on
    assert_same_runs(cut / "runs" / "a", whole / "runs" / "a", 0.0)


@hosts_needed
def test_processes_of_two_hosts_that_a_launcher_numbers_find_each_other(
    pair: tuple[Host, Host], one: Path, tmp_path: Path
) -> None:
    """Two of them meet through a loopback address, where those of the other host would not find them."""
    done = by_hand(pair, tmp_path, {})
    assert [each.returncode for each in done] == [0] * 4, done
    assert_same_runs(tmp_path / "runs" / "a", one, 1e-12)


@hosts_needed
def test_other_settings_are_found_without_a_shared_file_system(pair: tuple[Host, Host], tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    done = by_hand(pair, tmp_path, {3: ["optim.lr=0.5"]}, f"mount -t tmpfs none {tmp_path}/runs")
    assert [each.returncode for each in done] == [2] * 4, done
    assert "differ in the configuration: optim.lr is 0.003 on rank 0 and 0.5 on rank 3" in done[0].stderr
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.skipif(NO_SLURM is not None, reason=f"no Slurm: {NO_SLURM}")
def test_srun_starts_the_processes_of_two_nodes(one: Path, tmp_path: Path) -> None:
    job = tmp_path / "job"
    job.mkdir()
    slurmd = tmp_path / "slurm"
    slurmd.mkdir()
    with slurm_cluster.cluster(slurmd) as slurm:
        command = ["srun", "--nodes=2", "--ntasks-per-node=1", jobs.UNISONO, *TRAIN, *STEPS, *FSDP]
        done = jobs.finished(command, job, 300, **slurm)
        wrong = jobs.finished([*command, "run.name=b", "optim.lrr=3"], job, 300, **slurm)
    assert done.returncode == 0, done.stderr
    assert_same_runs(job / "runs" / "a", one, 1e-12)
    assert len(list((job / "runs" / "a" / "logs").glob("rank-*.log"))) == 2
    assert wrong.returncode == 2 and "unknown key 'optim.lrr'" in wrong.stderr
