"""Configurations, code and machines that are not the same everywhere, or not what they were."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from unisono.faults import job, task
from unisono.faults.job import Job, free_port
from unisono.faults.matrix import Abstain, Ground, Outcome, fault
from unisono.faults.scenarios.death import DIED, HELD, kill

REFUSED, PREEMPTED = 2, 75


def by_hand(
    folders: Sequence[Path], commands: Sequence[Sequence[str]], variables: Sequence[Mapping[str, str]] | None = None
) -> list[job.Done]:
    """Processes that were started one by one, with the variables of a launcher and each with some of its own."""
    size = str(len(commands))
    launcher = {
        "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(
                Job(
                    folder, command=command, output=f"rank-{rank}.txt",
                    variables={**launcher, "RANK": str(rank), "LOCAL_RANK": str(rank), **own},
                )
            )
            for rank, (folder, command, own) in enumerate(
                zip(folders, commands, variables or [{}] * len(commands), strict=True)
            )
        ]  # fmt: skip
        return [each.finish(120) for each in jobs]


def _refused(outcome: Outcome, ends: Sequence[job.Done], *says: str) -> Outcome:
    told = "\n".join(done.said for done in ends)
    outcome.said = next((done.sentence for done in ends if done.sentence), "")
    outcome.promise(all(done.code == REFUSED for done in ends), f"{[done.code for done in ends]}: {told[-1500:]}")
    for word in says:
        outcome.promise(word in told, f"'{word}' is not said: {told[-1500:]}")
    return outcome


@fault("E36", "another learning rate on one rank")
def _config(ground: Ground) -> Outcome:
    commands = [job.train(f"optim.lr={lr}") for lr in (1e-2, 2e-2)]
    return _refused(Outcome(), by_hand([ground.own] * 2, commands), "optim.lr")


@fault("E36b", "another environment on one rank")
def _environment(ground: Ground) -> Outcome:
    ends = by_hand([ground.own] * 2, [job.train()] * 2, [{}, {"OMP_NUM_THREADS": "2"}])
    return _refused(Outcome(), ends, "OMP_NUM_THREADS")


@fault("E37", "other code of the task on one rank")
def _code(ground: Ground) -> Outcome:
    text = Path(task.__file__).read_text(encoding="utf-8")
    folders = []
    for rank, own in enumerate((text, text.replace("0.1 * rng", "0.2 * rng"))):
        folder = ground.own / f"host-{rank}"
        folder.mkdir()
        (folder / "mine.py").write_text(own)
        folders.append(folder)
    assert "0.2 * rng" in own
    command = [*job.verb("train", "mine.py:Small"), *job.WORDS, f"run.dir={ground.own}/runs"]
    return _refused(Outcome(), by_hand(folders, [command] * 2), "mine.py")


@fault("E37b", "another version of a library on one rank")
def _library(ground: Ground) -> Outcome:
    """What an installer leaves of a version, first on the path of rank 1, is what Python says is installed there."""
    metadata = ground.own / "other" / "numpy-9.9.9.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 9.9.9\n")
    path = [str(metadata.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    ends = by_hand([ground.own] * 2, [job.train()] * 2, [{}, {"PYTHONPATH": os.pathsep.join(path)}])
    return _refused(Outcome(), ends, f"numpy is '{version('numpy')}' on rank 0 and '9.9.9' on rank 1")


@fault("E38", "other data than the commit was made from")
def _data(ground: Ground) -> Outcome:
    job.finished(ground)
    with ground.job("task.rows=41", "train.steps=20", "run.allow_change=[task.rows,train.steps]") as run:
        return _refused(Outcome(), [run.finish()], "rows")


@fault("E38b", "other data on one rank, under the same name")
def _data_of_a_rank(ground: Ground) -> Outcome:
    folders = [ground.own / f"host-{rank}" for rank in range(2)]
    for rank, folder in enumerate(folders):
        (folder / "texts").mkdir(parents=True)
        (folder / "texts" / "part.jsonl").write_text('{"text": "a line of a text"}\n' * (40 + rank))
    words = ("data=corpus", "data.path=texts", f"run.dir={ground.own}/runs", "train.steps=4", "train.global_batch=4")
    command = job.verb("train", "language", "run.name=a", "observe.progress=false", "layout.threads=1", *words)
    return _refused(Outcome(), by_hand(folders, [command] * 2), "the data", "rank 0 and rank 1")


@fault("E39", "resumed on another number of processes and another strategy")
def _another_world(ground: Ground) -> Outcome:
    words = ("train.precision=fp64", "optim=sgd", "optim.lr=1e-2", "layout.micro_batch=2")
    before = ground.unharmed_values(*words)
    outcome = ground.harmed("kill@forward:1:7", *words, code=DIED, goes_on=False)
    for world, layout in ((4, "fsdp"), (1, "single")):
        with ground.for_copy().job(*words, f"layout.strategy={layout}", world=world) as run:
            done = run.finish()
            outcome.promise(done.code == 0, f"{layout} × {world}: {done.code}: {done.said[-1500:]}")
            apart = job.apart(run.run, before) if done.code == 0 else 1.0
            outcome.promise(apart < 1e-12, f"{layout} × {world}: {apart:.1e} from the run that never failed")
    with ground.for_copy().job(*words, world=3) as run:
        done = run.finish()
        outcome.promise(done.code == REFUSED and "8" in done.sentence, f"× 3: {done.code}: {done.said[-800:]}")
    outcome.exact = not outcome.wrong
    outcome.said = done.sentence
    return outcome


@fault("E40", "resumed with another learning rate")
def _changed(ground: Ground) -> Outcome:
    job.finished(ground)
    with ground.job("optim.lr=2e-2", "train.steps=14") as run:
        outcome = _refused(Outcome(), [run.finish()], "optim.lr", "allow_change")
    with ground.job("optim.lr=2e-2", "train.steps=14", "run.allow_change=[optim.lr,train.steps]") as run:
        done = run.finish()
        outcome.promise(done.code == 0 and run.step() == 14, f"not allowed: {done.code}: {done.said[-1500:]}")
    return outcome


@fault("E41", "a commit of another format, or with an array too few or too many")
def _another_format(ground: Ground) -> Outcome:
    outcome, newest = Outcome(), job.finished(ground)
    text = (newest / "manifest.json").read_text()
    less, more = "optimizer/0.bias/exp_avg", "model/new"
    changes: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "another format": lambda old: {**old, "format": old["format"] + 1},
        "an array less": lambda old: {**old, "arrays": {k: v for k, v in old["arrays"].items() if k != less}},
        "an array more": lambda old: {**old, "arrays": {**old["arrays"], more: old["arrays"]["model/0.bias"]}},
    }
    for name, change in changes.items():
        (newest / "manifest.json").write_text(text)
        job.rewrite(newest, change)
        with ground.job("train.steps=14", "run.allow_change=[train.steps]", "run.resume=exact") as run:
            done = run.finish()
        outcome.promise(done.code == REFUSED, f"{name}: {done.code}: {done.said[-1000:]}")
        outcome.said = done.sentence
    return outcome


@fault("F43", "the kernel ends a rank that takes too much memory")
def _memory(ground: Ground) -> Outcome:
    before = ground.unharmed()
    with _limited(100) as admit, ground.job(misbehave="eat@forward:1:7") as run:
        admit(run.held()[1])
        run.release()
        done = run.finish()
        outcome = ground.judge(run, done, job.happened(ground.own), DIED, ("rank 1", "memory"), 10.0)
        outcome.lost = run.step() - max(job.newest(run.run), 0)
    ground.go_on(outcome, before)
    return outcome


@contextmanager
def _limited(megabytes: int) -> Iterator[Callable[[int], None]]:
    """A control group that may take so much memory, and how a process is put into it."""
    root = Path("/sys/fs/cgroup")
    first = root / "memory" if (root / "memory").is_dir() else root
    limit = "memory.limit_in_bytes" if (root / "memory").is_dir() else "memory.max"
    group = first / f"unisono-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(megabytes << 20))
    except OSError as error:
        raise Abstain(f"no control group can be made here ({error.strerror})") from error
    try:
        yield lambda pid: _write(group / "cgroup.procs", pid)
    finally:
        with suppress(OSError):
            group.rmdir()


@fault("F43b", "an accelerator runs out of memory on one rank")
def _device_memory(ground: Ground) -> Outcome:
    raise Abstain("needs an accelerator; tests/engines/torch/test_oom.py raises in a step as one would")


@fault("F44", "SIGTERM with a deadline", quick=True)
def _sigterm(ground: Ground) -> Outcome:
    return _preempted(ground, signal.SIGTERM, 1)


@fault("F44b", "SIGTERM twice")
def _sigterm_twice(ground: Ground) -> Outcome:
    return _preempted(ground, signal.SIGTERM, 2)


@fault("F44c", "SIGUSR1, as Slurm sends it before it takes the machine")
def _sigusr1(ground: Ground) -> Outcome:
    return _preempted(ground, signal.SIGUSR1, 1)


@fault("F44d", "SIGTERM to one rank only")
def _sigterm_rank(ground: Ground) -> Outcome:
    return _preempted(ground, signal.SIGTERM, 1, rank=1)


@fault("F44e", "SIGTERM before the first step")
def _sigterm_early(ground: Ground) -> Outcome:
    before = ground.unharmed()
    with ground.job() as run:
        run.workers(2)
        began = kill(run.process.pid, signal.SIGTERM)
        outcome = ground.judge(run, run.finish(), began, PREEMPTED, (), 15.0)
    ground.go_on(outcome, before)
    return outcome


@fault("F44f", "SIGTERM during a save")
def _sigterm_saving(ground: Ground) -> Outcome:
    """Rank 0 takes two seconds for a flush in a save, and the signal comes in it."""
    words = ("task.sleep=0.05", "train.steps=100", "checkpoint.every=6")
    before, mark = ground.unharmed(*words), ground.own / task.MARK
    with ground.job(*words, misbehave="pause@fsync:0:5") as run:
        job.wait_for(mark.exists, 120.0, "a save")
        outcome = Outcome()
        outcome.promise(job.saving(run.run), "no save was on its way")
        began = kill(run.process.pid, signal.SIGTERM)
        ended = ground.judge(run, run.finish(), began, PREEMPTED, ("which is saved",), 15.0)
        ended.wrong += outcome.wrong
        ended.lost = run.step() - max(job.newest(run.run), 0)
        ended.promise(ended.lost == 0, f"{ended.lost} steps are lost")
        ended.promise(not job.saving(run.run), "half a checkpoint is left")
    ground.go_on(ended, before, *words)
    return ended


@fault("F44h", "SIGTERM with a deadline in which no save fits: the newest checkpoint counts, and that is said")
def _sigterm_short(ground: Ground) -> Outcome:
    """The only save so far took two seconds more, so the next is expected to."""
    words = ("task.sleep=0.05", "train.steps=100", "checkpoint.every=40", "launch.preempt_deadline=2")
    before = ground.unharmed(*words)
    with ground.job(*words, misbehave="pause@fsync:0:5") as run:
        job.wait_for(lambda: job.newest(run.run) > 0 and not job.saving(run.run), 120.0, "a checkpoint")
        run.reaches(run.step() + 1)
        began = kill(run.process.pid, signal.SIGTERM)
        outcome = ground.judge(
            run, run.finish(), began, PREEMPTED, ("not saved", "checkpoint is that of step 40"), 15.0
        )
        outcome.lost = run.step() - job.newest(run.run)
        outcome.promise(outcome.lost > 0, "it was saved")
    ground.go_on(outcome, before, *words)
    return outcome


@fault("F44g", "SIGTERM while the model is compiled")
def _sigterm_compiling(ground: Ground) -> Outcome:
    if not shutil.which(os.environ.get("CXX", "g++")):
        raise Abstain("compiling for a CPU takes a C++ compiler")
    cache = ground.own / "cache"  # one of its own, or all of it may have been compiled before
    (ground.own / "texts").mkdir()
    (ground.own / "texts" / "part.jsonl").write_text('{"text": "a line of a text"}\n' * 40)
    words = ("data=corpus", "data.path=texts", "run.name=a", "layout.world_size=2", "layout.compile=true")
    command = job.verb("train", "language", "train.steps=9", "train.global_batch=4", "observe.progress=false", *words)
    with Job(ground.own, command=command, variables={"TORCHINDUCTOR_CACHE_DIR": str(cache)}) as run:
        job.wait_for(lambda: any(cache.rglob("*.cpp")) or run.process.poll() is not None, 240.0, "something to compile")
        assert run.process.poll() is None, run.finish().said[-2000:]
        began = kill(run.process.pid, signal.SIGTERM)
        outcome = ground.judge(run, run.finish(), began, PREEMPTED, (), 15.0)
        outcome.promise(run.step() == 0, "steps had been made")
    return outcome


def _write(path: Path, number: int) -> None:
    path.write_text(str(number))


def _preempted(ground: Ground, number: int, times: int, rank: int | None = None) -> Outcome:
    before = ground.unharmed()
    with ground.job(misbehave=HELD) as run:
        found = run.held()
        target = run.process.pid if rank is None else found[rank]
        began = kill(target, number)
        for _ in range(times - 1):
            time.sleep(0.05)
            kill(target, number)
        run.release()
        outcome = ground.judge(run, run.finish(), began, PREEMPTED, ("step",), 15.0)
        outcome.lost = run.step() - max(job.newest(run.run), 0)
        outcome.promise(outcome.lost == 0, f"{outcome.lost} steps are lost")
        outcome.promise(run.step() < job.STEPS, "it had ended before")
    ground.go_on(outcome, before)
    return outcome


@fault("F45", "a device falls off the bus")
def _device(ground: Ground) -> Outcome:
    raise Abstain("needs several accelerators, one of which can be taken away")
