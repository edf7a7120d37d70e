"""Folders that others can reach: a run's that vanishes, a cache that is shared, and links and pipes in either."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from unisono_faults import job
from unisono_faults.matrix import REFUSED, Outcome, Sandbox, scenario

_WORDS = ("task.sleep=0.2", "train.steps=60")
_SECONDS = 15.0  # from the loss of a folder to the end of its run, of which 3 are between two looks
_LONG = 30.0  # seconds after which a verb waits for a pipe
_READ_CACHE = """
import numpy as np
from unisono import compute_array_once
print(compute_array_once("shared", ["rows"], lambda: np.arange(3.0)).tolist())
"""
_READ_FOLDER = """
from unisono import open_source
print(list(open_source("rows", duplicates="allow")))
"""
_READ_GLOB = _READ_FOLDER.replace("rows", "rows/*.jsonl")


@scenario("S15", "a run folder that is deleted, renamed or replaced by a copy while the run trains")
def _vanished(sandbox: Sandbox) -> Outcome:
    outcome = Outcome()
    kept = sandbox.folder / "runs" / "kept"

    def rename(run: Path) -> None:
        run.rename(kept)

    def replace(run: Path) -> None:
        run.rename(kept)
        shutil.copytree(kept, run)

    acts: dict[str, tuple[Callable[[Path], None], str]] = {
        "deleted": (_remove, "was deleted, with its checkpoints"),
        "replaced": (replace, "was renamed to"),
        "renamed": (rename, "was renamed to"),
    }
    for name, (act, says) in acts.items():
        for path in (sandbox.folder / "runs" / job.RUN, kept):
            shutil.rmtree(path, ignore_errors=True)
        with sandbox.job(*_WORDS) as run:
            run.wait_for_step(2 * job.EVERY + 1)
            steps_done, began = run.step(), time.monotonic()
            act(run.run)
            done = run.finish()
            outcome.expect(done, REFUSED, says, name=name)
            took = done.ended_at - began
            outcome.seconds = max(outcome.seconds or 0.0, round(took, 1))
            outcome.check(took < _SECONDS, f"{name}: the run ended after {took:.1f} s")
            outcome.check(name == "replaced" or not run.run.exists(), f"{name}: a new folder was created")
            outcome.check("Traceback" not in done.output, f"{name}: {done.output[-800:]}")
            outcome.check(not done.orphans, f"{name}: processes were left: {done.orphans}")
    kept.rename(sandbox.folder / "runs" / job.RUN)  # as the message advises
    outcome.lost_steps = max(0, steps_done - job.newest_step(sandbox.folder / "runs" / job.RUN))
    sandbox.check_resume(outcome, sandbox.reference_digests(*_WORDS), *_WORDS)
    return outcome


def _remove(run: Path) -> None:
    """Delete a folder into which a process may write a last line meanwhile."""
    for _ in range(50):
        shutil.rmtree(run, ignore_errors=True)
        if not run.exists():
            return
        time.sleep(0.02)
    raise TimeoutError(run)


@scenario("S16", "a shared cache: entries that others can write, and, as root, another user's")
def _shared_cache(sandbox: Sandbox) -> Outcome:
    outcome, cache = Outcome(), sandbox.folder / "cache"
    _read(outcome, sandbox, _READ_CACHE, "[0.0, 1.0, 2.0]", cache=cache)
    (entry,) = (path for path in (cache / "shared").iterdir() if path.is_dir())
    for path in (cache, entry, entry / "array.npy"):
        mode = path.stat().st_mode
        path.chmod(0o777)
        _read(outcome, sandbox, _READ_CACHE, "can be written by other users", cache=cache, refused=path.name)
        path.chmod(mode)
        if os.geteuid() == 0:
            os.chown(path, 65534, -1)
            _read(outcome, sandbox, _READ_CACHE, "belongs to another user", cache=cache, refused=path.name)
            os.chown(path, 0, -1)
    _read(outcome, sandbox, _READ_CACHE, "[0.0, 1.0, 2.0]", cache=cache)
    outcome.message = (
        f"{cache.name} can be written by other users; refused, with the command that makes one of your own"
    )
    return outcome


@scenario("S17", "links and pipes where a run is asked to stop, diagnosed, replayed, and in a folder of data")
def _links(sandbox: Sandbox) -> Outcome:
    outcome, run = Outcome(), f"runs/{job.RUN}"
    private, created = sandbox.folder / "private", sandbox.folder / "created"
    private.write_text('{"key": "f1e2d3c4b5"}\n')
    with sandbox.job(*_WORDS, fault="hold@forward:1:7") as training:
        training.wait_for_hold()  # else it takes the links as requests, and removes them
        for verb in ("stop", "save"):
            (training.run / verb).symlink_to(created)
            outcome.expect(_verb(sandbox, verb, run), REFUSED, "is a link", name=verb)
            (training.run / verb).unlink()
        outcome.check(not created.exists(), "a file was created through a link")
        outcome.expect(_verb(sandbox, "stop", run), 0, name="stop without a link")
        training.release()
        training.finish()
    record = sandbox.folder / run / "fingerprint.json"
    content = record.read_bytes()
    record.unlink()
    os.mkfifo(record)
    outcome.expect(_verb(sandbox, "diagnose", run), 0, "steps done", name="diagnose")
    record.unlink()
    record.symlink_to(private)
    outcome.expect(_verb(sandbox, "replay", run, "--task", f"{job.TASK}:Small"), REFUSED, "is a link", name="replay")
    copies = [p for p in (sandbox.folder / "runs").rglob("*") if p.is_file() and not p.is_symlink()]
    outcome.check(not any(b"f1e2d3c4b5" in path.read_bytes() for path in copies), "replay copied a private file")
    record.unlink()
    record.write_bytes(content)
    rows = sandbox.folder / "rows"
    rows.mkdir()
    (rows / "a.jsonl").write_text('{"key": "a"}\n')
    (rows / "b.jsonl").symlink_to("a.jsonl")
    _read(outcome, sandbox, _READ_FOLDER, "[{'key': 'a'}, {'key': 'a'}]")
    (rows / "c.jsonl").symlink_to(private)
    _read(outcome, sandbox, _READ_FOLDER, "outside of the folder", refused="a link out of a folder of data")
    _read(outcome, sandbox, _READ_GLOB, "outside of the folder", refused="a link out of a folder, found by a glob")
    return outcome


def _verb(sandbox: Sandbox, *words: str) -> job.JobResult:
    """The result of a verb beside a running job, which must not wait for a pipe."""
    try:
        done = subprocess.run(
            job.verb_command(*words), cwd=sandbox.folder, capture_output=True, text=True, timeout=_LONG
        )
    except subprocess.TimeoutExpired:
        return job.JobResult(124, f"{words[0]} waits", time.monotonic(), sandbox.folder)
    return job.JobResult(done.returncode, done.stdout + done.stderr, time.monotonic(), sandbox.folder)


def _read(
    outcome: Outcome, sandbox: Sandbox, script: str, says: str, *, cache: Path | None = None, refused: str = ""
) -> None:
    """Check what a script of the user's prints, or with which words it is refused."""
    variables = {**os.environ, "UNISONO_CACHE": str(cache or sandbox.folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=sandbox.folder, env=variables, capture_output=True, text=True, timeout=60
    )
    output = done.stderr if refused else done.stdout
    outcome.check(
        bool(done.returncode) == bool(refused), f"{refused or 'reading'} ended with {done.returncode}: {output}"
    )
    outcome.check(says in output, f"'{says}' is missing from what is said of {refused or 'it'}: {output[-800:]}")
    if refused:
        outcome.message = output.strip().splitlines()[-1].partition("Error: ")[2]
