"""Configurations, code and machines that differ between ranks, or that changed since the last start."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from unisono_faults import job, task, task_fault
from unisono_faults.job import Job
from unisono_faults.matrix import DIED, PREEMPTED, REFUSED, AbstainError, Outcome, Sandbox, scenario
from unisono_faults.scenarios.death import HELD, send_signal


def run_by_hand(
    folders: Sequence[Path],
    commands: Sequence[Sequence[str]],
    variables: Sequence[Mapping[str, str]] | None = None,
    engine: str = "torch",
) -> list[job.JobResult]:
    """Start processes one by one, with the variables of a launcher and additional ones for each; return their ends."""
    launcher = job.launcher_variables(len(commands))
    given = zip(folders, commands, variables or [{}] * len(commands), strict=True)
    with ExitStack() as stack:
        jobs = []
        for rank, (folder, command, extra) in enumerate(given):
            own = {**launcher, "RANK": str(rank), "LOCAL_RANK": str(rank), **extra}
            started = Job(folder, command=command, output=f"rank-{rank}.txt", engine=engine, variables=own)
            jobs.append(stack.enter_context(started))
        return [rank_job.finish(120) for rank_job in jobs]


def _check_refused(ends: Sequence[job.JobResult], *says: str) -> Outcome:
    """Check that all processes were refused, and that one of them said why."""
    outcome, output = Outcome(), "\n".join(done.output for done in ends)
    for done in reversed(ends):  # the message of the first
        outcome.expect(replace(done, output=output), REFUSED, *says)
    return outcome


@scenario("E36", "a different learning rate on one rank")
def _config(sandbox: Sandbox) -> Outcome:
    commands = [job.train_command(f"optim.lr={lr}") for lr in (1e-2, 2e-2)]
    return _check_refused(run_by_hand([sandbox.folder] * 2, commands), "optim.lr")


@scenario("E36b", "a different environment on one rank")
def _environment(sandbox: Sandbox) -> Outcome:
    ends = run_by_hand([sandbox.folder] * 2, [job.train_command()] * 2, [{}, {"OMP_NUM_THREADS": "2"}])
    return _check_refused(ends, "OMP_NUM_THREADS")


@scenario("E37", "different task code on one rank")
def _code(sandbox: Sandbox) -> Outcome:
    text = Path(task.__file__).read_text(encoding="utf-8")
    folders = []
    for rank, source in enumerate((text, text.replace("nn.Dropout(0.1)", "nn.Dropout(0.2)"))):
        folder = sandbox.folder / f"host-{rank}"
        folder.mkdir()
        (folder / "mine.py").write_text(source)
        folders.append(folder)
    assert "nn.Dropout(0.2)" in source
    command = [*job.verb_command("train", "mine.py:Small"), *job.SETTINGS, f"run.dir={sandbox.folder}/runs"]
    return _check_refused(run_by_hand(folders, [command] * 2), "mine.py")


@scenario("E37b", "a different library version on one rank")
def _library(sandbox: Sandbox) -> Outcome:
    """The metadata of another version, first on the path of rank 1, is what Python reports as installed there."""
    metadata = sandbox.folder / "other" / "numpy-9.9.9.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 9.9.9\n")
    path = [str(metadata.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    ends = run_by_hand([sandbox.folder] * 2, [job.train_command()] * 2, [{}, {"PYTHONPATH": os.pathsep.join(path)}])
    return _check_refused(ends, f"numpy is '{version('numpy')}' on rank 0 and '9.9.9' on rank 1")


@scenario("E38", "resumed on different data")
def _data(sandbox: Sandbox) -> Outcome:
    sandbox.train_to_end()
    done = sandbox.run("task.rows=41", "train.steps=20", "run.allow_change=[task.rows,train.steps]")
    return _check_refused([done], "rows")


@scenario("E38b", "different data on one rank under the same name")
def _data_of_a_rank(sandbox: Sandbox) -> Outcome:
    folders = [sandbox.folder / f"host-{rank}" for rank in range(2)]
    for rank, folder in enumerate(folders):
        (folder / "texts").mkdir(parents=True)
        (folder / "texts" / "part.jsonl").write_text('{"text": "a line of a text"}\n' * (40 + rank))
    command = job.verb_command(
        "train", "language", "run.name=a", "observe.progress=false", "layout.threads=1", "data=corpus",
        "data.path=texts", f"run.dir={sandbox.folder}/runs", "train.steps=4", "train.global_batch=4",
    )  # fmt: skip
    return _check_refused(run_by_hand(folders, [command] * 2), "the data", "rank 0 and rank 1")


@scenario("E39", "resumed on a different number of processes with a different strategy")
def _another_world(sandbox: Sandbox) -> Outcome:
    words = ("train.precision=fp64", "optim=sgd", "optim.lr=1e-2", "layout.micro_batch=2")
    before = sandbox.reference_arrays(*words)
    outcome = sandbox.run_with_fault("kill@forward:1:7", *words, code=DIED, resumes=False)
    for world, layout in ((4, "fsdp"), (1, "single")):
        done = sandbox.copy().run(*words, f"layout.strategy={layout}", world=world)
        outcome.expect(done, 0, name=f"{layout} × {world}")
        apart = job.max_distance(done.run, before) if done.code == 0 else 1.0
        outcome.check(apart < 1e-12, f"{layout} × {world}: {apart:.1e} from the reference run")
    outcome.expect(sandbox.copy().run(*words, world=3), REFUSED, "8", name="× 3")
    outcome.exact = not outcome.broken_promises
    return outcome


@scenario("E40", "resumed with a different learning rate")
def _changed_setting(sandbox: Sandbox) -> Outcome:
    sandbox.train_to_end()
    outcome = _check_refused([sandbox.run("optim.lr=2e-2", "train.steps=14")], "optim.lr", "allow_change")
    done = sandbox.run("optim.lr=2e-2", "train.steps=14", "run.allow_change=[optim.lr,train.steps]")
    outcome.expect(done, 0, name="the allowed run")
    outcome.check(job.last_step(done.run) == 14, "the allowed run did not reach step 14")
    return outcome


@scenario("E41", "a checkpoint in another format, or with a missing or extra array")
def _another_format(sandbox: Sandbox) -> Outcome:
    outcome, newest = Outcome(), sandbox.train_to_end()
    text = (newest / "manifest.json").read_text()
    less, more = "optimizer/0.bias/exp_avg", "model/new"
    changes: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "another format": lambda old: {**old, "format": old["format"] + 1},
        "an array less": lambda old: {**old, "arrays": {k: v for k, v in old["arrays"].items() if k != less}},
        "an array more": lambda old: {**old, "arrays": {**old["arrays"], more: old["arrays"]["model/0.bias"]}},
    }
    for name, change in changes.items():
        (newest / "manifest.json").write_text(text)
        job.rewrite_manifest(newest, change)
        done = sandbox.run("train.steps=14", "run.allow_change=[train.steps]", "run.resume=exact")
        outcome.expect(done, REFUSED, name=name)
    return outcome


@scenario("F43", "the OOM killer ends a rank")
def _memory(sandbox: Sandbox) -> Outcome:
    before = sandbox.reference_digests()
    with _memory_limited(100) as admit, sandbox.job(fault="eat@forward:1:7") as run:
        admit(run.wait_for_hold()[1])
        run.release()
        done = run.finish()
        outcome = sandbox.check_end(done, job.fault_time(sandbox.folder), DIED, ("rank 1", "memory"), 10.0)
        outcome.lost_steps = run.step() - max(job.newest_step(run.run), 0)
    sandbox.check_resume(outcome, before)
    return outcome


@contextmanager
def _memory_limited(megabytes: int) -> Iterator[Callable[[int], object]]:
    """Create a control group with a memory limit; yield a function that adds a process to it."""
    root = Path("/sys/fs/cgroup")
    first = root / "memory" if (root / "memory").is_dir() else root
    limit = "memory.limit_in_bytes" if (root / "memory").is_dir() else "memory.max"
    group = first / f"unisono-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(megabytes << 20))
    except OSError as error:
        raise AbstainError(f"cannot create a control group here ({error.strerror})") from error
    try:
        yield lambda pid: (group / "cgroup.procs").write_text(str(pid))
    finally:
        with suppress(OSError):
            group.rmdir()


@scenario("F43b", "an accelerator out of memory on one rank")
def _device_memory(sandbox: Sandbox) -> Outcome:
    raise AbstainError(
        "needs an accelerator; packages/unisono/tests/engines/torch/guards/test_oom.py raises the same error in a step"
    )


def _add_preemption(
    key: str, text: str, number: int = signal.SIGTERM, *, times: int = 1, rank: int | None = None, quick: bool = False
) -> None:
    """Add a row of the matrix: a signal to the launcher or to one rank, in a step."""

    @scenario(key, text, quick=quick)
    def _act(sandbox: Sandbox) -> Outcome:
        before = sandbox.reference_digests()
        with sandbox.job(fault=HELD) as run:
            ranks = run.wait_for_hold()
            target = run.process.pid if rank is None else ranks[rank]
            began = send_signal(target, number)
            for _ in range(times - 1):
                time.sleep(0.05)
                send_signal(target, number)
            run.release()
            outcome = sandbox.check_end(run.finish(), began, PREEMPTED, ("step",), 15.0)
            _check_saved(outcome, run)
            outcome.check(run.step() < job.STEPS, "it had ended before")
        sandbox.check_resume(outcome, before)
        return outcome


def _check_saved(outcome: Outcome, run: Job) -> None:
    outcome.lost_steps = run.step() - max(job.newest_step(run.run), 0)
    outcome.check(outcome.lost_steps == 0, f"{outcome.lost_steps} steps are lost")


_add_preemption("F44", "SIGTERM with a deadline", quick=True)
_add_preemption("F44b", "SIGTERM twice", times=2)
_add_preemption("F44c", "SIGUSR1, as Slurm sends before it reclaims the node", signal.SIGUSR1)
_add_preemption("F44d", "SIGTERM to one rank only", rank=1)


@scenario("F44e", "SIGTERM before the first step")
def _sigterm_early(sandbox: Sandbox) -> Outcome:
    before = sandbox.reference_digests()
    with sandbox.job() as run:
        run.wait_for_ranks(2)
        began = send_signal(run.process.pid, signal.SIGTERM)
        outcome = sandbox.check_end(run.finish(), began, PREEMPTED, (), 15.0)
    sandbox.check_resume(outcome, before)
    return outcome


@scenario("F44f", "SIGTERM during a save")
def _sigterm_saving(sandbox: Sandbox) -> Outcome:
    """A flush of rank 0 takes two seconds during a save, and the signal arrives in it."""
    words = ("task.sleep=0.05", "train.steps=100", "checkpoint.every=6")
    before, mark = sandbox.reference_digests(*words), sandbox.folder / task_fault.MARK
    with sandbox.job(*words, fault="pause@fsync:0:5") as run:
        job.wait_for(mark.exists, 120.0, "a save")
        was_saving = job.is_saving(run.run)
        began = send_signal(run.process.pid, signal.SIGTERM)
        outcome = sandbox.check_end(run.finish(), began, PREEMPTED, ("which is saved",), 15.0)
        outcome.check(was_saving, "no save was in progress")
        _check_saved(outcome, run)
        outcome.check(not job.is_saving(run.run), "an unfinished checkpoint is left")
    sandbox.check_resume(outcome, before, *words)
    return outcome


@scenario("F44h", "SIGTERM with too little time to save: the message names the newest checkpoint")
def _sigterm_short(sandbox: Sandbox) -> Outcome:
    """The only save so far took two additional seconds, so the next is expected to take as long."""
    words = ("task.sleep=0.05", "train.steps=100", "checkpoint.every=40", "launch.preempt_deadline=2")
    before = sandbox.reference_digests(*words)
    with sandbox.job(*words, fault="pause@fsync:0:5") as run:
        job.wait_for(lambda: job.newest_step(run.run) > 0 and not job.is_saving(run.run), 120.0, "a checkpoint")
        run.wait_for_step(run.step() + 1)
        began = send_signal(run.process.pid, signal.SIGTERM)
        says = ("not saved", "checkpoint is from step 40")
        outcome = sandbox.check_end(run.finish(), began, PREEMPTED, says, 15.0)
        outcome.lost_steps = run.step() - job.newest_step(run.run)
        outcome.check(outcome.lost_steps > 0, "it was saved")
    sandbox.check_resume(outcome, before, *words)
    return outcome


@scenario("F44g", "SIGTERM while the model compiles")
def _sigterm_compiling(sandbox: Sandbox) -> Outcome:
    if not shutil.which(os.environ.get("CXX", "g++")):
        raise AbstainError("compiling for a CPU needs a C++ compiler")
    cache = sandbox.folder / "cache"  # an empty one, since everything may have been compiled before
    (sandbox.folder / "texts").mkdir()
    (sandbox.folder / "texts" / "part.jsonl").write_text('{"text": "a line of a text"}\n' * 40)
    words = ("data=corpus", "data.path=texts", "run.name=a", "layout.world_size=2", "layout.compile=true")
    command = job.verb_command(
        "train", "language", "train.steps=9", "train.global_batch=4", "observe.progress=false", *words
    )
    with Job(sandbox.folder, command=command, variables={"TORCHINDUCTOR_CACHE_DIR": str(cache)}) as run:
        job.wait_for(lambda: any(cache.rglob("*.cpp")) or run.process.poll() is not None, 240.0, "something to compile")
        assert run.process.poll() is None, run.finish().output[-2000:]
        began = send_signal(run.process.pid, signal.SIGTERM)
        outcome = sandbox.check_end(run.finish(), began, PREEMPTED, (), 15.0)
        outcome.check(run.step() == 0, "steps had been run")
    return outcome


@scenario("F45", "a device falls off the bus")
def _device(sandbox: Sandbox) -> Outcome:
    raise AbstainError("needs several accelerators, one of which can be taken away")
