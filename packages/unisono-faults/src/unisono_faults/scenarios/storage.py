"""Disks that are full, read-only or failing, and damaged checkpoints."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from unisono_faults import job
from unisono_faults.matrix import REFUSED, UNSAVED, AbstainError, Outcome, Sandbox, scenario
from unisono_faults.scenarios.death import HELD, send_signal


@contextmanager
def mount_small_disk(folder: Path, megabytes: int) -> Iterator[None]:
    """Mount a file system of this size in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    result = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if result.returncode:
        raise AbstainError(f"no file system can be mounted here: {result.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def fill_disk(folder: Path, leaving: int) -> Iterator[Path]:
    """Fill a disk with a file, leaving this many bytes free."""
    path = folder / "filler"
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    with suppress(OSError), path.open("wb", buffering=0) as file:  # other processes write meanwhile
        for _ in range(0, free - leaving, 4096):
            file.write(b"\0" * 4096)
    yield path
    path.unlink(missing_ok=True)


@scenario("C20", "disk full while a shard is written", quick=True)
def _full(sandbox: Sandbox) -> Outcome:
    return _run_without_room(sandbox, 200_000)


@scenario("C20c", "disk full to the last byte: step records cannot be written either")
def _full_to_the_last_byte(sandbox: Sandbox) -> Outcome:
    return _run_without_room(sandbox, 0)


def _run_without_room(sandbox: Sandbox, leaving: int) -> Outcome:
    """Run a job whose disk has only this many bytes free after its first checkpoints."""
    words = ("train.steps=20", "task.width=60000", "checkpoint.every=5")
    before = sandbox.reference_digests(*words)
    with mount_small_disk(sandbox.folder / "runs", 120):
        with sandbox.job(*words, fault="hold@forward:1:11") as run:
            run.wait_for_hold()
            job.wait_for(lambda: not job.is_saving(run.run), 60.0, "the checkpoint of step 10")
            began = time.monotonic()
            with fill_disk(sandbox.folder / "runs", leaving):
                run.release()
                outcome = sandbox.check_end(run.finish(), began, UNSAVED, ("space",), 60.0)
                saved_step = job.newest_step(run.run)
                outcome.lost_steps = run.step() - saved_step
                outcome.check(saved_step > 0, "no checkpoint can be loaded")
                outcome.check(not (leaving and any((run.run / "checkpoints").glob(".*"))), "a fragment is left")
        sandbox.check_resume(outcome, before, *words)
    return outcome


@scenario("C20b", "too little disk space for the next checkpoints: reported before the first step")
def _too_small(sandbox: Sandbox) -> Outcome:
    outcome = Outcome()
    with mount_small_disk(sandbox.folder / "runs", 12):
        done = sandbox.run("task.width=400000")
        outcome.expect(done, REFUSED, "needs", "free")
        outcome.check(job.last_step(done.run) == 0, "steps were run")
    return outcome


@scenario("C21", "a run directory that is read-only or missing")
def _read_only(sandbox: Sandbox) -> Outcome:
    with mount_small_disk(sandbox.folder / "runs", 20):
        subprocess.run(["mount", "-o", "remount,ro", str(sandbox.folder / "runs")], check=True)
        outcome = Outcome()
        outcome.expect(sandbox.run(), REFUSED, "runs")
    return outcome


@scenario("C22", "disk full for a while; training continues if checkpoint.on_failure=continue")
def _for_a_while(sandbox: Sandbox) -> Outcome:
    words = (
        "train.steps=60", "task.width=60000", "checkpoint.every=5", "task.sleep=0.1",
        "checkpoint.on_failure=continue", "observe.log_every=1", "observe.progress=true",
    )  # fmt: skip
    before = sandbox.reference_digests(*words)
    with mount_small_disk(sandbox.folder / "runs", 120), sandbox.job(*words, fault="hold@forward:1:11") as run:
        run.wait_for_hold()
        with fill_disk(sandbox.folder / "runs", 200_000):
            run.release()
            job.wait_for(lambda: "unsaved since" in run.output.read_text("utf-8"), 60.0, "a line that says so")
        done = run.finish()
        outcome = Outcome(message=done.line_with("unsaved since"))
        outcome.compare(done, before)
    return outcome


@scenario("C22b", "a disk error while a shard is flushed: retried, with a warning")
def _transient_disk_error(sandbox: Sandbox) -> Outcome:
    before = sandbox.reference_digests()
    done = sandbox.run(fault="eio@fsync:0:5")
    outcome = Outcome(message=done.line_with("Retrying in"), lost_steps=0)
    outcome.check("Input/output error" in outcome.message, f"the error is not reported: {done.output[-1500:]}")
    outcome.compare(done, before)
    return outcome


@scenario("C22c", "a persistent disk error")
def _persistent_disk_error(sandbox: Sandbox) -> Outcome:
    """Errors from the second checkpoint on; saving is retried for three seconds."""
    says = ("rank 0", "Input/output error", "3 attempts")
    return sandbox.run_with_fault("away@fsync:0:9", "checkpoint.retry_for=4", code=UNSAVED, says=says, within=15.0)


Damage = Callable[[Path, Path], Iterator[tuple[str, str]]]  # of the newest checkpoint, and the one before


def _run_damaged(sandbox: Sandbox, damage: Damage) -> Outcome:
    """Damage the newest checkpoint of a finished run in several ways, one after the other; each must be refused."""
    outcome = Outcome()
    words = ("train.steps=6",)
    before = sandbox.reference_digests(*words)
    newest = sandbox.train_to_end(*words)
    run, backup = newest.parents[1], sandbox.folder / "backup"
    older = sorted(newest.parent.glob("step-*"))[-2]
    shutil.copytree(run, backup)
    for name, expected in damage(newest, older):
        outcome.expect(sandbox.run(*words, "run.resume=exact"), REFUSED, expected, name=name)
        shutil.rmtree(run)
        shutil.copytree(backup, run)
    outcome.check(bool(list(damage(newest, older))), "nothing was damaged")
    sandbox.check_resume(outcome, before, *words)  # falls back to the one before, with a warning
    return outcome


@scenario("C23", "one bit flipped in any file of a checkpoint")
def _flipped_bit(sandbox: Sandbox) -> Outcome:
    def damage(newest: Path, _: Path) -> Iterator[tuple[str, str]]:
        for file in sorted(path.name for path in newest.iterdir()):
            path = newest / file
            size = path.stat().st_size
            for at in (3, size // 2, size - 2):
                content = bytearray(path.read_bytes())
                content[at] ^= 4
                path.write_bytes(content)
                yield f"byte {at} of {file}", file

    return _run_damaged(sandbox, damage)


@scenario("C24", "a truncated shard")
def _truncated_shard(sandbox: Sandbox) -> Outcome:
    def damage(newest: Path, _: Path) -> Iterator[tuple[str, str]]:
        shard = sorted(newest.glob("*.safetensors"))[0]
        os.truncate(shard, shard.stat().st_size // 2)
        yield "half", shard.name
        os.truncate(shard, 0)
        yield "nothing", shard.name

    return _run_damaged(sandbox, damage)


@scenario("C25", "a manifest that is truncated, empty, or from another checkpoint")
def _torn_manifest(sandbox: Sandbox) -> Outcome:
    def damage(newest: Path, older: Path) -> Iterator[tuple[str, str]]:
        manifest = newest / "manifest.json"
        os.truncate(manifest, manifest.stat().st_size // 2)
        yield "torn", manifest.name
        os.truncate(manifest, 0)
        yield "empty", manifest.name
        shutil.copy(older / "manifest.json", manifest)
        yield "of the commit before", "step-00000006"
        for shard in older.glob("*.safetensors"):
            shutil.copy(shard, newest / shard.name)
        yield "shards of the commit before", ".safetensors"

    return _run_damaged(sandbox, damage)


@scenario("C26", "one rank's shard missing")
def _missing_shard(sandbox: Sandbox) -> Outcome:
    def damage(newest: Path, _: Path) -> Iterator[tuple[str, str]]:
        shard = sorted(newest.glob("*.safetensors"))[-1]
        shard.unlink()
        yield "gone", shard.name

    return _run_damaged(sandbox, damage)


@scenario("C27", "the newest checkpoint is damaged: the run falls back to the previous one, with a warning")
def _falls_back(sandbox: Sandbox) -> Outcome:
    before = sandbox.reference_digests()
    shard = sorted(sandbox.train_to_end().glob("*.safetensors"))[0]
    content = bytearray(shard.read_bytes())
    content[-2] ^= 1
    shard.write_bytes(content)
    done = sandbox.run()
    outcome = Outcome(message=done.line_with(shard.name), lost_steps=job.EVERY)
    outcome.check(bool(outcome.message), f"there was no warning: {done.output[-1500:]}")
    outcome.check("fallback" in (done.run / "events.jsonl").read_text(), "it is not recorded in the events")
    outcome.compare(done, before)
    return outcome


@scenario("C28", "a second run in the same directory", quick=True)
def _second(sandbox: Sandbox) -> Outcome:
    before = sandbox.reference_digests()
    with sandbox.job(fault=HELD) as run:
        run.wait_for_hold()
        other = subprocess.run(
            job.train_command("layout.world_size=2"), cwd=sandbox.folder, capture_output=True, text=True, timeout=120
        )
        outcome = Outcome(message=next((line for line in other.stderr.splitlines() if "error: " in line), ""))
        outcome.check(other.returncode == REFUSED, f"exit code {other.returncode}: {other.stderr[-800:]}")
        outcome.check(str(run.process.pid) in other.stderr, f"the owner is not named: {other.stderr[-800:]}")
        run.release()
        outcome.compare(run.finish(), before, "the first")
    return outcome


@scenario("C28b", "a frozen owner whose run another process took over: writes nothing after it wakes")
def _fenced_owner(sandbox: Sandbox) -> Outcome:
    """The other process is in its own PID namespace: neither sees whether the other lives, as on two hosts."""
    apart = ["unshare", "--pid", "--fork", "--mount-proc"]
    if not shutil.which("unshare") or subprocess.run([*apart, "true"], capture_output=True).returncode:
        raise AbstainError("simulating a second host by a PID namespace needs root and util-linux")
    before = sandbox.reference_digests()
    with sandbox.job(fault=HELD) as run:
        run.wait_for_hold()
        first = run.pids()
        for pid in first:
            os.kill(pid, signal.SIGSTOP)
        other = subprocess.run(
            [*apart, *job.train_command("layout.world_size=2")], cwd=sandbox.folder, capture_output=True, text=True,
            timeout=180,
        )  # fmt: skip
        outcome = Outcome()
        outcome.check(other.returncode == 0, f"the other: {other.returncode}: {other.stderr[-1500:]}")
        outcome.exact = other.returncode == 0 and job.read_digests(run.run) == before
        before_resume = sorted(path.name for path in (run.run / "checkpoints").iterdir())
        events = (run.run / "events.jsonl").read_bytes()
        began = time.monotonic()
        for pid in first:
            os.kill(pid, signal.SIGCONT)
        run.release()
        done = run.finish(60)
        outcome.seconds = round(done.ended_at - began, 1)
        outcome.expect(done, REFUSED, "taken over", name="the first")
        after_resume = sorted(path.name for path in (run.run / "checkpoints").iterdir())
        outcome.check(after_resume == before_resume, f"it wrote {set(after_resume) ^ set(before_resume)}")
        outcome.check((run.run / "events.jsonl").read_bytes() == events, "it wrote into the events")
        after = job.read_digests(run.run)
        outcome.exact = outcome.exact and after == before
        differing = [name for name in after | before if after.get(name) != before.get(name)]
        outcome.check(bool(outcome.exact), f"it ended differently: {differing}")
    return outcome


@scenario("C29", "run names with spaces, any script, a leading dash, 255 bytes; a symlink loop")
def _names(sandbox: Sandbox) -> Outcome:
    outcome = Outcome()
    for name in ("two words", "ünïçødé-日本", "-dash", "x" * 255, "a\nb", "../outside"):
        place = sandbox.for_scenario("name")
        done = place.run(f"run.name={name!r}", "train.steps=1", world=1)
        inside = place.folder / "runs"
        stray = [p for p in place.folder.iterdir() if p.name not in ("runs", "output.txt", "__pycache__", job.TASK)]
        outcome.check(done.code in (0, REFUSED), f"{name!r}: exit code {done.code}: {done.output[-500:]}")
        outcome.check("Traceback" not in done.output, f"{name!r}: {done.output[-800:]}")
        outcome.check(not stray, f"{name!r} wrote {stray}")
        outcome.check(done.code == 0 or not inside.exists() or not any(inside.iterdir()), f"{name!r} left something")
    loop = sandbox.for_scenario("loop")
    (loop.folder / "runs").symlink_to(loop.folder / "runs")
    done = loop.run(world=1)
    outcome.expect(done, REFUSED, name="a loop")
    outcome.check("Traceback" not in done.output, f"a loop: {done.output[-800:]}")
    return outcome


@scenario("C29b", "a case-insensitive file system: `Run` and `run`")
def _case_insensitive_names(sandbox: Sandbox) -> Outcome:
    """FAT, exFAT and NTFS are such file systems; they lack links and Unix permissions."""
    before, outcome = sandbox.reference_digests(), Outcome()
    disk = sandbox.for_scenario("disk").folder / "runs"  # not in the folder of the jobs, as a process may serve it
    with mount_case_insensitive(disk) as kind:
        first, run_dir = disk / "Run", f"run.dir={disk}"
        outcome.compare(replace(sandbox.run("run.name=Run", run_dir), run=first), before)
        contents = _read_contents(first)
        for words in (("run.resume=never",), ("optim.lr=2e-2",), ()):
            outcome.expect(sandbox.run("run.name=run", run_dir, *words), REFUSED, name=f"run {words}")
            outcome.check(_read_contents(first) == contents, f"run {words} changed the folder of Run")
        outcome.check("'Run'" in outcome.message, f"the other run is not named: {outcome.message}")
        done = sandbox.run("run.name=Run", run_dir, "train.steps=15", "run.allow_change=[train.steps]")
        outcome.check(done.code == 0 and job.newest_step(first) == 15, f"Run: {done.code}: {done.output[-1500:]}")
    outcome.message = f"{kind}: {outcome.message}"
    return outcome


@contextmanager
def mount_case_insensitive(folder: Path) -> Iterator[str]:
    """Mount a case-insensitive file system in a folder; yield its kind."""
    ways = (
        (("mkfs.vfat",), ("mount",)),
        (("mkfs.exfat",), ("mount",)),
        (("mkfs.exfat",), ("mount.exfat-fuse",)),
        (("mkfs.ntfs", "-q", "-F", "-f"), ("lowntfs-3g", "-o", "ignore_case")),
    )
    folder.mkdir()
    image = folder.with_name("disk.img")
    with image.open("wb") as file:
        file.truncate(64 << 20)
    for make, mount in ways:
        if not all(shutil.which(program) for program in ("losetup", make[0], mount[0])):
            continue
        if subprocess.run([*make, str(image)], capture_output=True).returncode:
            continue
        loop = subprocess.run(["losetup", "--find", "--show", str(image)], capture_output=True, text=True)
        if loop.returncode:
            raise AbstainError(f"no loop device is available here: {loop.stderr.strip()}")
        device = loop.stdout.strip()
        try:
            if subprocess.run([*mount, device, str(folder)], capture_output=True).returncode:
                continue
            try:
                (folder / "Probe").mkdir()
                assert (folder / "pROBE").exists(), f"{make[0]} is case-sensitive"
                (folder / "Probe").rmdir()
                yield make[0].removeprefix("mkfs.")
            finally:
                subprocess.run(["umount", "-l", str(folder)], check=True)
            return
        finally:
            subprocess.run(["losetup", "--detach", device], check=True)
    raise AbstainError("no such file system can be mounted here: needs root, and dosfstools, exfatprogs or ntfs-3g")


def _read_contents(folder: Path) -> dict[str, bytes]:
    """All files of a run except its lease, which every start changes."""
    files = (path for path in folder.rglob("*") if path.is_file() and "lease" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@scenario("C31", "a clock that is an hour off, jumps back, or is past 2038 (the limit of 32-bit time)")
def _clock(sandbox: Sandbox) -> Outcome:
    """The wall clock of every process jumps at random; commits are ordered by their steps, leases by counters."""
    before = sandbox.reference_digests()
    folder = Path(tempfile.mkdtemp(dir=sandbox.folder))
    (folder / "sitecustomize.py").write_text(
        "import os, random, time\n"
        "_real, _random = time.time, random.Random(os.getpid())\n"
        "time.time = lambda: _real() + _random.choice((-3600.0, 0.0, 3600.0, 4.0e8))\n"  # 2038-01-19 is 2**31
        "time.time_ns = lambda: int(time.time() * 1e9)\n"
    )
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    outcome = Outcome(message="no decision depends on the wall clock")
    with sandbox.job(fault=HELD, variables={"PYTHONPATH": path}) as run:
        run.wait_for_hold()
        send_signal(run.process.pid, signal.SIGKILL)
        run.finish()
    outcome.compare(sandbox.run(variables={"PYTHONPATH": path}), before)
    return outcome
