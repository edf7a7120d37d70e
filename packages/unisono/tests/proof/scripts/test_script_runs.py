"""What `unisono prove train.py` says of how a script starts, joins its processes and ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from packages.unisono.tests.launch import jobs
from packages.unisono.tests.proof.small_scripts import HEAD, SEEDED, STEP, SYNCHRONISED, prove
from unisono.launch.processes.local_processes import WorkerError
from unisono.proof.scripts import script_proof
from unisono.proof.scripts.judging.script_comparison import LATE
from unisono.proof.scripts.recording import script_hooks
from unisono.proof.scripts.recording.rank_facts import ScriptTrace
from unisono.proof.scripts.recording.script_process import ScriptRun
from unisono.proof.scripts.recording.script_recorder import World
from unisono.proof.scripts.script_proof import ScriptSettings, prove_script
from unisono.runtime.errors import ConfigError, RunError


def test_a_script_that_makes_no_update_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.py ended without an update by a torch optimizer"):
        prove(tmp_path, HEAD + "sys.exit(0)\n")


def test_a_script_that_raises_is_told_with_its_line(tmp_path: Path) -> None:
    """Nothing was compared, so this is no FAIL: the exit code of the command is 2."""
    with pytest.raises(RunError, match="fails on one process, so nothing was compared") as caught:
        prove(tmp_path, HEAD + "raise KeyError(sys.argv[1])\n")
    assert caught.value.exit_code == 2
    assert "rank 0: KeyError: '--as-given' (train.py, line 8, in <module>: raise KeyError(sys.argv[1])" in str(
        caught.value
    )


@pytest.mark.slow
def test_processes_that_never_join_fail_by_name(tmp_path: Path) -> None:
    text = (
        HEAD + "torch.manual_seed(0)\nfor _ in range(9):\n"
        "    model(torch.ones(2, 3)).sum().backward()\n    optimizer.step()\n"
    )
    report = prove(tmp_path, text)
    assert report.exit_code == 1
    assert report.verdicts[0].diagnosis is not None
    assert report.verdicts[0].diagnosis.fault == "Every process trains alone"
    assert "the script has not joined its 2 processes: each trains alone" in "\n".join(report.lines)


@pytest.mark.slow
def test_processes_may_join_after_a_first_forward_pass(tmp_path: Path) -> None:
    """A trial on one process (shapes, a sanity check) comes before `init_process_group` in some scripts."""
    text = SYNCHRONISED.replace("dist.init_process_group", "model(torch.ones(1, 3))\ndist.init_process_group", 1)
    report = prove(tmp_path, text + "for _ in range(4):\n    step(x[dist.get_rank()::dist.get_world_size()])\n")
    assert report.mark == "PASS", report.lines


class _Meter:
    """Of a script: what it does when it is left fails where the loop was not finished."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        raise AttributeError("no end was measured")


def test_what_fails_while_a_script_is_ended_is_no_error_of_it(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        with _Meter():
            for _ in range(5):
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()

    records = script_hooks.run_watched(train, "train", World(0, 1, 0, tmp_path, 60.0), 2)
    assert records.steps == 2
    with pytest.raises(AttributeError, match="no end was measured"):
        script_hooks.run_watched(train, "train", World(0, 1, 0, tmp_path, 60.0), 9)


def test_what_a_scheduler_is_given_is_recorded_with_the_next_update(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        for number in range(3):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            scheduler.step(metrics=torch.tensor(float(number)))

    records = script_hooks.run_watched(train, "train", World(0, 1, 0, tmp_path, 60.0), 3)
    records.close()
    assert [seen[0].watched for seen in ScriptTrace(tmp_path, "fp64").ranks] == [[], [0.0], [1.0]]


@pytest.mark.slow
def test_a_script_that_writes_nowhere_twice_is_given_a_name_for_every_start(tmp_path: Path) -> None:
    once = "import os\nif dist.get_rank() == 0:\n    os.mkdir(sys.argv[1])\n"
    loop = "for _ in range(4):\n    step(x[dist.get_rank()::dist.get_world_size()])\n"
    (tmp_path / "train.py").write_text(SYNCHRONISED + once + loop)
    report = prove_script(tmp_path / "train.py", [f"{tmp_path}/{{run}}"], ScriptSettings(precision="fp64"), quiet=True)
    assert report.mark == "PASS", report.lines
    assert len([*tmp_path.glob("*processes*")]) == 1


@pytest.mark.slow
def test_a_script_that_ends_early_is_compared_as_far_as_it_goes(tmp_path: Path) -> None:
    report = prove(tmp_path, SYNCHRONISED + "for _ in range(2):\n    step(x[dist.get_rank()::dist.get_world_size()])\n")
    assert report.mark == "PASS", report.lines
    assert "the script ended after 2 of 4 steps (steps=4)" in report.lines


@pytest.mark.slow
def test_a_termination_ends_all_processes_of_a_script_at_once(tmp_path: Path) -> None:
    """The ranks write who they are, and wait for each other for longer than the test."""
    path = tmp_path / "train.py"
    tell = f"open('{tmp_path}/pid-' + str(os.getpid()), 'w').close()\n"
    path.write_text(
        SEEDED + "import os\n" + STEP + tell + "if dist.get_world_size() > 1:\n    time.sleep(600)\nstep(x)\n"
    )
    command = [sys.executable, "-m", "unisono", "prove", str(path), "steps=1", "--", ""]
    with subprocess.Popen(command, env=jobs.environment(), stderr=subprocess.PIPE, text=True) as process:
        ranks: list[int] = []
        while len(ranks) < 3:  # one process alone, then two
            assert process.poll() is None, process.communicate()[1]
            ranks = [int(one.name.removeprefix("pid-")) for one in tmp_path.glob("pid-*")]
            time.sleep(0.1)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) > 128
        assert time.monotonic() - began < 30
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


AVERAGE = """
import copy
average = copy.deepcopy(model).requires_grad_(False)
for _ in range(4):
    step(x[dist.get_rank()::dist.get_world_size()] + 1)
    for kept, new in zip(average.parameters(), model.parameters()):
        kept.lerp_(new, 1 - DECAY)
"""
DISTRIBUTED = """
data = torch.utils.data.TensorDataset(torch.arange(24.0).reshape(8, 3) / 10)
world = dist.get_world_size()
class Epochs(torch.utils.data.Sampler):
    epoch = 0
    def __iter__(self):
        order = torch.randperm(8, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter(order[dist.get_rank()::world])
    def __len__(self):
        return 8 // world
sampler = Epochs()
for epoch in range(4):
    sampler.epoch = EPOCH
    for (rows,) in torch.utils.data.DataLoader(data, 4 // world, sampler=sampler):
        step(rows)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("epoch", "mark"), [("epoch", "PASS"), ("epoch if world == 1 else 0", "FAIL")])
def test_a_short_epoch_is_followed_into_the_next_one(tmp_path: Path, epoch: str, mark: str) -> None:
    """Four updates an epoch: as many as are compared if nothing is asked for, of which none is of the second."""
    text = SYNCHRONISED + DISTRIBUTED.replace("EPOCH\n", f"{epoch}\n").replace("(24.0).reshape(8", "(48.0).reshape(16")
    text = text.replace("randperm(8", "randperm(16").replace("return 8 //", "return 16 //")  # four, and steps=4
    report = prove(tmp_path, text)
    assert report.mark == mark, report.lines
    if mark == "FAIL":
        assert report.verdicts[0].diagnosis is not None
        assert report.verdicts[0].diagnosis.fault == "Every epoch has the same order"
    assert "updates after the first 16" in "\n".join(report.lines)


LATER = """
for update in range(20):
    step(x[dist.get_rank()::dist.get_world_size()] * (1 + update % 3))
    if update == 10 and RANK:
        optimizer.state.clear()  # the momentum, as of a rank that restores no checkpoint
"""


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "mark"), [("False", "PASS"), ("dist.get_rank() > 0", "FAIL")])
def test_a_script_of_cheap_updates_is_followed_past_those_that_are_asked_for(
    tmp_path: Path, rank: str, mark: str
) -> None:
    """So a fault in update 12 is seen; the first run decides for all, and says how far."""
    text = SYNCHRONISED.replace("lr=0.1", "lr=0.001, momentum=0.9") + LATER.replace("RANK", rank)
    report = prove(tmp_path, text)
    assert report.mark == mark, report.lines
    first = report.verdicts[0].first
    assert (first.quantity, first.worst.step) == ("replicas", 12) if mark == "FAIL" and first else first is None
    assert "updates after the first 17" in "\n".join(report.lines)


BY_EPOCH = """
data = torch.utils.data.TensorDataset(torch.arange(96.0).reshape(32, 3) / 40)
sampler = torch.utils.data.DistributedSampler(data, shuffle=True)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for (rows,) in torch.utils.data.DataLoader(data, 4, sampler=sampler):
        step(rows * (1 + epoch))
"""


@pytest.mark.slow
def test_what_a_script_does_by_its_epoch_is_compared_within_the_shortest_alone(tmp_path: Path) -> None:
    """Batches are per process, so two processes are in their second epoch where the one that has their rows is not."""
    report = prove(tmp_path, SYNCHRONISED + BY_EPOCH)
    said = "\n".join(report.lines)
    assert "(given to one process side by side)? PASS" in said, said
    assert "updates after the first 4" in said


@pytest.mark.slow
@pytest.mark.parametrize(("decay", "mark"), [("0.9", "PASS"), ("0.9 ** dist.get_world_size()", "FAIL")])
def test_a_moving_average_beside_the_model_is_compared(tmp_path: Path, decay: str, mark: str) -> None:
    report = prove(tmp_path, SYNCHRONISED + AVERAGE.replace("DECAY", decay))
    assert report.mark == mark, report.lines
    first = report.verdicts[0].first
    assert (first.quantity if first else "") == ("EMA" if mark == "FAIL" else "")
    assert any(one.quantity == "EMA" and one.mark == mark for one in report.verdicts[0].compared)


UNEVEN = """
for at in range(3 if dist.get_rank() == 0 or dist.get_world_size() == 1 else 2):
    step(x[dist.get_rank()::dist.get_world_size()])
"""
SKIPPED = """
for at in range(4):
    model(x[dist.get_rank()::dist.get_world_size()]).square().mean().backward()
    if at != 1 or dist.get_rank() == 0:
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "line"), [(UNEVEN, 14), (SKIPPED, 22)])
def test_ranks_that_make_other_numbers_of_updates_end_at_once_with_a_line_of_the_user(
    tmp_path: Path, loop: str, line: int
) -> None:
    """Shards of unequal length, or an update that one rank leaves out: another waits in the script's collective."""
    began = time.monotonic()
    report = prove(tmp_path, SYNCHRONISED + loop, timeout=300)
    assert time.monotonic() - began < 120
    said = "\n".join(report.lines)
    assert report.exit_code == 1
    assert "likely: Ranks make different numbers of updates" in said
    assert f"which began at train.py:{line}" in said


@pytest.mark.slow
def test_a_script_that_hangs_on_many_processes_is_named_with_its_lines(tmp_path: Path) -> None:
    script = SYNCHRONISED + "if dist.get_rank():\n    time.sleep(900)\nfor _ in range(9):\n    step(x)\n"
    for timeout in (25, 120):  # on a busy machine, 25 s may be over before rank 1 has begun its script
        began = time.monotonic()
        report = prove(tmp_path, script, timeout=timeout)
        assert time.monotonic() - began < timeout + 125
        told = "\n".join(report.lines)
        assert report.exit_code == 1
        assert f"it did not finish within {timeout} s" in told
        if found := re.search(r"rank 1 was at \S+train\.py:\d+ in <module>", told):
            break
    assert found, told
    assert "likely: Processes wait for each other" in told


@pytest.mark.parametrize(
    ("error", "tried"),
    [(f"{LATE} 25 s (timeout=25): rank 0 was at …", ["fp64"]), ("TypeError: no kernel for this", ["fp64", "fp32"])],
)
def test_a_run_that_took_too_long_is_not_tried_again_in_single_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, tried: list[str]
) -> None:
    asked: list[str] = []

    def run(settings: ScriptRun, *_: object) -> SimpleNamespace:
        asked.append(settings.precision)
        ended = {"2 processes": WorkerError(error, 1)}

        def refuse() -> None:
            raise RunError(error)

        return SimpleNamespace(
            cases=[None, None], record=lambda case: None, ended=ended, refuse_unrunnable=refuse, traces={}, run=settings
        )

    monkeypatch.setattr(script_proof, "ScriptRuns", run)
    with pytest.raises(RunError, match=re.escape(error)):
        prove(tmp_path, "", precision=None)
    assert asked == tried


@pytest.mark.slow
def test_the_command_prints_the_table_and_ends_with_the_code_of_the_verdict(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        SYNCHRONISED + "n = int(sys.argv[1])\nfor _ in range(9):\n    step(x[:n] * (1 + dist.get_rank()))\n"
    )
    done = jobs.finished(
        [
            str(Path(sys.executable).with_name("unisono")),
            "prove",
            "train.py",
            "worlds=[1,2]",
            "steps=2",
            "--",
            "{8//world}",
        ],
        cwd=tmp_path,
    )
    assert done.returncode in (1, 2), done.stderr
    assert "the gradient of an update is the mean of those of the ranks" in done.stdout
    assert "not seen:" in done.stdout
