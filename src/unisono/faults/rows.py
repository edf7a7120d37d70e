"""Data that cannot be read, or that change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from unisono.faults import job
from unisono.faults.matrix import Abstain, Ground, Outcome, fault

REFUSED = 2


def _texts(folder: Path, files: int = 3) -> Path:
    folder.mkdir(parents=True)
    for number in range(files):
        lines = [json.dumps({"text": f"file {number}, line {line}: " + "abc " * (line % 7 + 3)}) for line in range(40)]
        (folder / f"part-{number}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def _language(ground: Ground, folder: Path, *words: str, steps: int = 4) -> job.Job:
    own = (
        "data=corpus", f"data.path={folder}", "run.name=a", f"train.steps={steps}", "train.global_batch=4",
        "layout.world_size=2", "observe.progress=false", "layout.threads=1", "checkpoint.every=2", *words,
    )  # fmt: skip
    return job.Job(ground.own, command=job.verb("train", "language", *own))


@fault("G46", "a record that cannot be made into a sample")
def _record(ground: Ground) -> Outcome:
    outcome = ground.harmed("raise@data:-1:20", code=REFUSED, says=("row 20", "the sky fell"), goes_on=False)
    with ground.for_("masked").job("data.on_error=mask", "observe.progress=true", misbehave="raise@data:-1:20") as run:
        done = run.finish()
        outcome.promise(done.code == 0 and "20" in done.said, f"masked: {done.code}: {done.said[-1000:]}")
    return outcome


@fault("G46b", "a decoder that takes its process down")
def _segfault(ground: Ground) -> Outcome:
    words = ("data.workers=1", "data.worker_kind=processes")
    return ground.harmed("kill@data:-1:20", *words, code=REFUSED, says=("worker",), goes_on=False)


@fault("G47", "texts with every oddity: empty, a megabyte, right to left, emoji, NUL, half a surrogate")
def _odd_texts(ground: Ground) -> Outcome:
    folder = _texts(ground.own / "texts", 1)
    odd = ["", "x" * (1 << 20), "\u202eשלום\u202c", "👩‍🚀" * 9, "a\0b", "\ud800"]
    with (folder / "part-0.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in odd)
    with _language(ground, folder) as run:
        done = run.finish()
    outcome = Outcome(said=done.sentence)
    outcome.promise(done.code in (0, REFUSED), f"{done.code}: {done.said[-1500:]}")
    outcome.promise("Traceback" not in done.said, done.said[-1500:])
    outcome.promise(done.code == 0 or "part-0.jsonl" in done.said, f"the file is not named: {done.said[-1500:]}")
    return outcome


@fault("G48", "a file of the data that changes between two starts of a run")
def _changed(ground: Ground) -> Outcome:
    folder = _texts(ground.own / "texts")
    outcome = Outcome()
    with _language(ground, folder) as run:
        done = run.finish()
        outcome.promise(done.code == 0, f"{done.code}: {done.said[-1500:]}")
    with (folder / "part-1.jsonl").open("a") as file:
        file.write(json.dumps({"text": "one line more"}) + "\n")
    with _language(ground, folder, "run.allow_change=[train.steps]", steps=6) as run:
        done = run.finish()
    outcome.said = done.sentence
    outcome.promise(done.code == REFUSED and "part-1.jsonl" in done.said, f"{done.code}: {done.said[-1500:]}")
    return outcome


@fault("G48b", "a file system that lists files in another order")
def _order(ground: Ground) -> Outcome:
    folders = [ground.own / name / "texts" for name in ("a", "b")]
    _texts(folders[0])
    folders[1].mkdir(parents=True)
    for path in sorted(folders[0].iterdir(), reverse=True):
        shutil.copy(path, folders[1] / path.name)
    states = []
    for folder in folders:
        with _language(ground.for_("order"), folder) as run:
            done = run.finish()
            assert done.code == 0, done.said
            states.append(job.state(run.run))
    outcome = Outcome(exact=states[0] == states[1], said="files are sorted by name")
    outcome.promise(bool(outcome.exact), "the runs differ")
    return outcome


@fault("C30", "a store that has a part of the newest commit only, and the folder of the run is lost")
def _store(ground: Ground) -> Outcome:
    """A folder is the store; what a server does besides, as listing late, is shown by tests/checkpoint with one."""
    before = ground.unharmed()
    # Slow enough that more than the last commit is sent: what comes faster than it can be sent is left out.
    words = (f"checkpoint.upload.url=file://{ground.own}/store", "checkpoint.upload.required=true", "task.sleep=1")
    with ground.job(*words) as run:
        done = run.finish()
        assert done.code == 0, done.said
        sent = sorted((ground.own / "store").rglob("step-*"))
        if len(sent) < 2:
            raise Abstain("this host was too slow to send two commits")
        (sent[-1] / "manifest.json").unlink()
        shutil.rmtree(run.run)
    with ground.job(*words) as run:
        done = run.finish()
        outcome = Outcome(said=next((line for line in done.said.splitlines() if line.startswith("restored")), ""))
        outcome.promise(done.code == 0, f"{done.code}: {done.said[-1500:]}")
        outcome.promise(f"restored {sent[-2].name}" in done.said, f"not {sent[-2].name}: {done.said[-1500:]}")
        outcome.lost = job.EVERY
        after = job.state(run.run) if done.code == 0 else {}
        # The lines of the ledger were in the folder; their digest is in the checkpoint.
        other = [name for name in before if not name.startswith("step ") and after.get(name) != before[name]]
        outcome.exact = not other
        outcome.promise(not other, f"it ended otherwise: {other}")
    return outcome
