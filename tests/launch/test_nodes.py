"""One job on two hosts, which are network namespaces here: that it computes what one process does, and how it ends.

Both hosts have the same hostname, which means 127.0.0.1, as on machines that were made from one image.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from packages.unisono.tests.launch import jobs
from tests.launch import namespaces
from tests.launch.namespaces import Host
from unisono.launch.nodes import agreement
from unisono.runtime.communication.communicator import Node
from unisono.runtime.errors import RunError

Done = subprocess.CompletedProcess[str]

TRAIN = ("train", "small.py:Small", "train.global_batch=8", "run.name=a")
MEET = ("launch.nodes=2", f"launch.rendezvous=10.99.0.1:{namespaces.PORT}")
NO_HOSTS = namespaces.missing()


def two_hosts(tests: type) -> type:
    """Tests that need namespaces, and take long."""
    return pytest.mark.slow(pytest.mark.skipif(NO_HOSTS is not None, reason=f"no namespaces: {NO_HOSTS}")(tests))


@pytest.fixture
def pair() -> Iterator[tuple[Host, Host]]:
    with namespaces.hosts() as found:
        yield found


@contextmanager
def job(
    pair: Sequence[Host],
    here: Path,
    *words: str,
    own: Sequence[Sequence[str]] = ((), ()),
    before: Sequence[str] = ("", ""),
) -> Iterator[list[subprocess.Popen[str]]]:
    """The same command on each host, with what is its own."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                jobs.started(
                    host.command(
                        jobs.UNISONO, *TRAIN, *MEET, f"launch.node_rank={rank}", *words, *own[rank], before=before[rank]
                    ),
                    here,
                )
            )
            for rank, host in enumerate(pair)
        ]


def run(pair: Sequence[Host], here: Path, *words: str, **options: Any) -> list[Done]:
    with job(pair, here, *words, **options) as processes:
        return jobs.ends(processes, 90)


def computed(folder: Path) -> list[dict[str, Any]]:
    """The events of a run, without what belongs to the clock and to the process."""
    timed = {"seconds", "rows_per_second", "data_wait", "memory_gb"}
    return [{k: v for k, v in event.items() if k not in timed} for event in jobs.events(folder / "runs" / "a")]


def fault(done: Done) -> str:
    """What a command said at last."""
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("unisono: error: ")]
    return line.removeprefix("unisono: error: ")


# a job that works ---------------------------------------------------------------------------------------------------


FOUR = ("train.steps=6", "layout.world_size=4", "layout.strategy=hsdp")


@pytest.fixture(scope="module", params=["fp64", "fp32"])
def precision(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory, precision: str) -> tuple[Path, list[Done]]:
    """A finished job of two hosts with two processes each."""
    folder = tmp_path_factory.mktemp("healthy")
    jobs.task_file(folder)
    with namespaces.hosts() as pair:
        return folder, run(pair, folder, *FOUR, f"train.precision={precision}")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, precision: str) -> Path:
    """The same run on one process."""
    folder = tmp_path_factory.mktemp("alone")
    jobs.task_file(folder)
    done = jobs.unisono(*TRAIN, "train.steps=6", f"train.precision={precision}", "layout.world_size=1", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@two_hosts
class TestTwoHosts:
    def test_finish_with_exit_code_0(self, healthy: tuple[Path, list[Done]]):
        assert [done.returncode for done in healthy[1]] == [0, 0], healthy[1]

    def test_compute_what_one_process_computes(self, healthy: tuple[Path, list[Done]], alone: Path, precision: str):
        mine, theirs = (computed(folder) for folder in (alone, healthy[0]))
        assert len(mine) == len(theirs) == 7
        assert mine[0]["loss"] != mine[5]["loss"]
        assert all(event["grad_norm"] > 0 for event in mine[:6])
        floor = {"fp64": 1e-12, "fp32": 1e-5}[precision]
        for one, other in zip(mine, theirs, strict=True):
            assert other == pytest.approx(one, rel=floor, abs=floor / 10)

    def test_go_on_after_an_interruption_as_if_there_had_been_none(
        self, healthy: tuple[Path, list[Done]], here: Path, precision: str
    ):
        words = (*FOUR, f"train.precision={precision}", "checkpoint.every=2")
        with namespaces.hosts() as pair:
            failed = run(pair, here, *words, "task.raises=3")
            assert [done.returncode for done in failed] == [1, 1]
            done = run(pair, here, *words, "run.resume=must", "run.allow_change=[task.raises]")
        assert [one.returncode for one in done] == [0, 0], done
        assert "resuming after step 2" in done[0].stdout
        assert computed(here)[-5:] == computed(healthy[0])[-5:]

    def test_keep_one_copy_of_the_model_each(self, healthy: tuple[Path, list[Done]]):
        layout = yaml.safe_load((healthy[0] / "runs" / "a" / "config.yaml").read_text())["layout"]
        assert (layout["world_size"], layout["strategy"], layout["shards"]) == (4, "hsdp", 2)

    def test_have_processes_on_both(self, healthy: tuple[Path, list[Done]]):
        logs = sorted((healthy[0] / "runs" / "a" / "logs").iterdir())
        assert [path.name for path in logs] == [f"rank-{rank:05d}.log" for rank in range(4)]
        assert all("step 6 loss" in path.read_text() for path in logs)

    def test_say_everything_once(self, healthy: tuple[Path, list[Done]]):
        first, second = healthy[1]
        assert sum(line.startswith("step 6/6") for line in first.stdout.splitlines()) == 1
        assert second.stdout == ""

    def test_leave_a_run_that_can_be_evaluated_and_goes_on_elsewhere(self, healthy: tuple[Path, list[Done]]):
        folder = healthy[0]
        told = jobs.unisono("evaluate", "runs/a", "--task", "small.py:Small", cwd=folder)
        assert told.returncode == 0, told.stderr
        precision = yaml.safe_load((folder / "runs" / "a" / "config.yaml").read_text())["train"]["precision"]
        words = ("train.steps=6", f"train.precision={precision}", "layout.world_size=1")
        done = jobs.unisono(*TRAIN, *words, cwd=folder)
        assert "nothing to do: all 6 steps are already done" in done.stdout


# a job that cannot start --------------------------------------------------------------------------------------------


@two_hosts
class TestAJobIsRefused:
    def test_where_a_node_does_not_come(self, pair: tuple[Host, Host], here: Path):
        (done,) = run(pair[:1], here, "layout.world_size=2", "launch.start_timeout=2")
        assert done.returncode == 5
        assert fault(done).startswith("node 1 of 2 did not connect to 10.99.0.1:29400 within 2 s")
        assert not list((here / "runs").glob("*")), "neither a run nor the token is left"

    def test_where_the_rendezvous_is_nobody_s(self, pair: tuple[Host, Host], here: Path):
        words = ("layout.world_size=2", "launch.start_timeout=2", "launch.rendezvous=10.99.0.7:29400")
        first, second = run(pair, here, *words)
        assert (first.returncode, second.returncode) == (2, 5)
        assert "launch.rendezvous=10.99.0.7:29400 must be an address of node 0" in fault(first)
        assert f"{pair[0].interface} 10.99.0.1" in fault(first)
        assert "node 1 could not connect to node 0 at 10.99.0.7:29400 within 2 s" in fault(second)

    def test_where_interfaces_do_not_lead_to_each_other(self, pair: tuple[Host, Host], here: Path):
        interfaces = ((f"launch.interface={pair[0].interface}",), ("launch.interface=other",))
        done = run(pair, here, "layout.world_size=2", own=interfaces)
        assert [one.returncode for one in done] == [2, 2]
        for one in done:
            assert f"node 0 ({pair[0].interface}, 10.99.0.1) cannot reach node 1 (other, 10.98.1.1): " in fault(one)

    def test_where_configurations_differ(self, pair: tuple[Host, Host], here: Path):
        done = run(pair, here, "layout.world_size=2", own=((), ("optim.lr=0.5",)))
        assert [one.returncode for one in done] == [2, 2]
        assert "differ in the configuration: optim.lr is 0.0003 on node 0 and 0.5 on node 1" in fault(done[0])
        assert fault(done[0]) == fault(done[1])

    def test_where_code_differs(self, pair: tuple[Host, Host], here: Path):
        (here / "other.py").write_text(jobs.SMALL + "\n# mended\n")
        hide = f"mount --bind {here}/other.py {here}/small.py"
        done = run(pair, here, "layout.world_size=2", before=("", hide))
        assert [one.returncode for one in done] == [2, 2]
        assert "differ in the code: small.py has changed" in fault(done[0])

    def test_where_the_folder_is_not_shared(self, pair: tuple[Host, Host], here: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("UNISONO_TOKEN", "a" * 64)
        (here / "runs").mkdir()
        done = run(pair, here, "layout.world_size=2", before=("", f"mount -t tmpfs none {here}/runs"))
        assert [one.returncode for one in done] == [2, 2]
        told = f"{here}/runs/a, which node 0 created for this run, does not exist on this node: run.dir must be on a "
        assert [told in fault(one) for one in done] == [True, True]

    def test_where_the_token_of_node_0_is_in_a_folder_that_is_not_shared(self, pair: tuple[Host, Host], here: Path):
        (here / "runs").mkdir()
        words = ("layout.world_size=2", "launch.start_timeout=4")
        first, second = run(pair, here, *words, before=("", f"mount -t tmpfs none {here}/runs"))
        assert (first.returncode, second.returncode) == (5, 5)
        assert "node 1 of 2 did not connect" in fault(first)
        assert "run.dir must be on a file system that all nodes share, under the same path" in fault(second)

    def test_where_data_differ(self, pair: tuple[Host, Host], here: Path):
        more = jobs.SMALL.replace("self.config.rows)", "len(Path('rows').read_text()))")
        (here / "small.py").write_text(more)
        (here / "rows").write_text("." * 24)
        (here / "others").write_text("." * 25)
        done = run(pair, here, "layout.world_size=2", before=("", f"mount --bind {here}/others {here}/rows"))
        assert [one.returncode for one in done] == [2, 2]
        assert "differ in the data: rows is 24 on node 0 and 25 on node 1" in fault(done[0])


# a job that fails ---------------------------------------------------------------------------------------------------


LONG = ("train.steps=5000", "task.sleep=0.02", "checkpoint.at_end=false", "layout.world_size=2", "launch.timeout=5")


@two_hosts
class TestBothHostsEnd:
    def test_within_the_deadline_of_a_link_that_goes_down(self, pair: tuple[Host, Host], here: Path):
        with job(pair, here, *LONG, f"task.marks={here}/marks") as processes:
            jobs.training(here / "marks", 2)
            pair[1].link("down")
            began = time.monotonic()
            done = jobs.ends(processes, 40)
            assert time.monotonic() - began < 5 + 15
        assert [one.returncode for one in done] == [5, 5]
        assert all("waited for " in fault(one) and "the deadline of 5 s (launch.timeout)" in fault(one) for one in done)

    def test_where_a_process_raises_on_one_and_both_tell_why(self, pair: tuple[Host, Host], here: Path):
        done = run(pair, here, "train.steps=6", "layout.world_size=2", "task.raises=1")
        assert [one.returncode for one in done] == [1, 1]
        for one in done:
            assert "unisono: error: rank 1 failed" in one.stderr
            assert "RuntimeError: the sky fell" in one.stderr

    @pytest.mark.parametrize(("node", "sent", "code"), [(0, signal.SIGINT, 130), (1, signal.SIGKILL, -9)])
    def test_where_the_launcher_of_one_is_ended(
        self, pair: tuple[Host, Host], here: Path, node: int, sent: signal.Signals, code: int
    ):
        with job(pair, here, *LONG, f"task.marks={here}/marks") as processes:
            jobs.training(here / "marks", 2)
            os.kill(processes[node].pid, sent)
            done = jobs.ends(processes, 20)
        assert (done[node].returncode, done[1 - node].returncode) == (code, 5)
        assert f"rank {1 - node} waited for " in fault(done[1 - node])

    def test_where_a_process_of_one_is_stopped_and_the_other_gives_up(self, pair: tuple[Host, Host], here: Path):
        with job(pair, here, *LONG, f"task.marks={here}/marks") as processes:
            stopped = jobs.training(here / "marks", 2)[1]
            os.kill(stopped, signal.SIGSTOP)
            done = jobs.ends(processes, 60)
        assert [one.returncode for one in done] == [5, 5]
        assert "rank 0 waited for " in fault(done[0])
        assert "ended with an error (see its own output). The processes of this node were stopped" in fault(done[1])


# the folder, without processes --------------------------------------------------------------------------------------


def test_a_folder_that_holds_the_number_of_this_start_is_shared(tmp_path: Path):
    agreement.check_shared_directory(tmp_path, agreement.write_token(tmp_path))
    agreement.remove_token(tmp_path, Node(0, 2, "", 0, ""))
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


def test_a_folder_of_an_earlier_start_on_a_disk_of_its_own_is_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(agreement, "_PATIENCE", 0.3)
    agreement.write_token(tmp_path)
    with pytest.raises(
        RunError, match=r"is a different folder on this node: run\.dir must be on a file system that all nodes share"
    ):
        agreement.check_shared_directory(tmp_path, "the number of node 0")
    shutil.rmtree(tmp_path)
    with pytest.raises(RunError, match="does not exist on this node"):
        agreement.check_shared_directory(tmp_path, "the number of node 0")
