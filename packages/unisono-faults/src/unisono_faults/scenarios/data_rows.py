"""Data that cannot be read, or that changes."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from unisono.data.prepare.manifest import MANIFEST_FILE, build_manifest, write_json
from unisono.data.prepare.shards import Shards, ShardWriter
from unisono_faults import job
from unisono_faults.matrix import DIED, NOT_FINITE, REFUSED, AbstainError, Outcome, Sandbox, scenario


def _write_texts(folder: Path, files: int = 3) -> Path:
    folder.mkdir(parents=True)
    for number in range(files):
        lines = [json.dumps({"text": f"file {number}, line {line}: " + "abc " * (line % 7 + 3)}) for line in range(40)]
        (folder / f"part-{number}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def _language_job(sandbox: Sandbox, folder: Path, *words: str, steps: int = 4) -> job.Job:
    settings = (
        "data=corpus", f"data.path={folder}", "run.name=a", f"train.steps={steps}", "train.global_batch=4",
        "layout.world_size=2", "observe.progress=false", "layout.threads=1", "checkpoint.every=2", *words,
    )  # fmt: skip
    return job.Job(sandbox.folder, command=job.verb_command("train", "language", *settings))


def _run_language(sandbox: Sandbox, folder: Path, *words: str, steps: int = 4) -> job.JobResult:
    with _language_job(sandbox, folder, *words, steps=steps) as run:
        return run.finish()


@scenario("G46", "a record whose sample cannot be built")
def _record(sandbox: Sandbox) -> Outcome:
    outcome = sandbox.run_with_fault("raise@data:-1:20", code=REFUSED, says=("row 20", "the sky fell"), resumes=False)
    masked = sandbox.for_scenario("masked")
    done = masked.run("data.on_error=mask", "observe.progress=true", fault="raise@data:-1:20")
    outcome.expect(done, 0, "1 sample could not be built", name="masked")
    audited = masked.run_verb("data", "audit", str(done.run), "--task", f"{job.TASK}:Small")
    outcome.expect(audited, 0, "row 20 left out", name="the audit")
    return outcome


@scenario("G46b", "a decoder that crashes its process")
def _segfault(sandbox: Sandbox) -> Outcome:
    words = ("data.workers=1", "data.worker_kind=processes")
    return sandbox.run_with_fault("kill@data:-1:20", *words, code=REFUSED, says=("worker",), resumes=False)


@scenario("G46c", "a row with non-finite numbers")
def _not_finite(sandbox: Sandbox) -> Outcome:
    return sandbox.run_with_fault("nan@data:-1:20", code=NOT_FINITE, says=("source rows [20]", "were not updated"))


@scenario("G47", "odd texts: empty, a megabyte, right-to-left, emoji, NUL, a lone surrogate")
def _odd_texts(sandbox: Sandbox) -> Outcome:
    folder = _write_texts(sandbox.folder / "texts", 1)
    odd = ["", "x" * (1 << 20), "\u202eשלום\u202c", "👩‍🚀" * 9, "a\0b", "\ud800"]
    with (folder / "part-0.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in odd)
    done = _run_language(sandbox, folder)
    outcome = Outcome(message=done.message)
    outcome.check(done.code in (0, REFUSED), f"{done.code}: {done.output[-1500:]}")
    outcome.check("Traceback" not in done.output, done.output[-1500:])
    outcome.check(done.code == 0 or "part-0.jsonl" in done.output, f"the file is not named: {done.output[-1500:]}")
    return outcome


@scenario("G47b", "prepared documents with a token outside the vocabulary: too large, or negative")
def _unknown_token(sandbox: Sandbox) -> Outcome:
    """Reported with file and row: when tokens are counted before the start or, if they are counted, when it is read."""
    folder, ready = _write_texts(sandbox.folder / "texts"), sandbox.folder / "ready"
    words = ("data=corpus", f"data.path={folder}", "data.vocab_size=300", f"out={ready}", "worker_kind=threads")
    done = sandbox.run_verb("data", "prepare", "language", *words)
    assert done.code == 0, done.output
    outcome, good = Outcome(), shutil.copytree(ready, sandbox.folder / "good")
    for name, token, dtype in (("too_large", 300, "<u2"), ("negative", -1, "<i4"), ("counted", 60_000, "<u2")):
        if name == "counted":  # this run counts them and stores the counts beside the documents
            done = _run_language(sandbox, folder, "data=prepared", f"data.path={good}")
            assert done.code == 0, done.output
        _write_with_token(good, ready, token, dtype)
        settings = ("data=prepared", f"data.path={ready}", f"run.name={name}")
        done = _run_language(sandbox, folder, *settings, steps=40)  # more than an epoch
        steps_done = job.last_step(sandbox.folder / "runs" / name)
        outcome.expect(done, REFUSED, ".arrow, row 8 ", f"token {token} ", name=name)
        outcome.check(name == "counted" or steps_done == 0, f"{name}: {steps_done} steps were run")
        outcome.check("Traceback" not in done.output, f"{name}: {done.output[-1500:]}")
    return outcome


def _write_with_token(good: Path, ready: Path, token: int, dtype: str) -> None:
    """Write prepared documents again with one token of row 8 changed, and with matching hashes."""
    shards = Shards(good)
    rows = [shards[number].astype(np.int64) for number in range(len(shards))]
    rows[8][3] = token
    (entry,), column = shards.manifest["shards"], shards.manifest["column"]
    shutil.rmtree(ready)
    shutil.copytree(good, ready)
    with ShardWriter(ready / entry["file"], column, dtype) as writer:
        writer.add(np.concatenate(rows), np.array([len(row) for row in rows]))
        manifest = build_manifest(column, dtype, shards.manifest["of"], [{**entry, **writer.close()}])
    write_json(ready / MANIFEST_FILE, manifest)


@scenario("G47c", "a label outside the classes")
def _label(sandbox: Sandbox) -> Outcome:
    taxa, samples = ["ACGTACGT", "ACGTTTGT", "CCGTACGA"], [f"s{number}" for number in range(8)]
    table = {
        "id": None, "format": "Biological Observation Matrix 1.0.0", "format_url": "http://biom-format.org",
        "type": "OTU table", "generated_by": "unisono faults", "date": "2026-01-01T00:00:00",
        "matrix_type": "dense", "matrix_element_type": "int", "shape": [len(taxa), len(samples)],
        "rows": [{"id": taxon, "metadata": None} for taxon in taxa],
        "columns": [{"id": sample, "metadata": None} for sample in samples],
        "data": [[taxon + number + 1 for number in range(len(samples))] for taxon in range(len(taxa))],
    }  # fmt: skip
    (sandbox.folder / "table.biom").write_text(json.dumps(table))
    states = ["ill", "well", "well", "dead", "ill", "well", "ill", "ill"]
    rows = ["sample\tstate", *(f"{sample}\t{state}" for sample, state in zip(samples, states, strict=True))]
    (sandbox.folder / "samples.tsv").write_text("\n".join(rows) + "\n")
    words = (
        "data=study", "data.table=table.biom", "data.metadata=samples.tsv", "data.target=state", "task=target",
        "layout.world_size=2", "train.global_batch=2", "train.steps=2", "run.name=a", "observe.progress=false",
        "data.classes=[ill,well]",
    )  # fmt: skip
    outcome, done = Outcome(), sandbox.run_verb("train", "microbiome", *words)
    outcome.expect(done, REFUSED, "dead of s3")
    outcome.check(job.last_step(done.run) == 0, "a step was run")
    return outcome


@scenario("G48", "a data file that changes between two starts of a run")
def _changed_file(sandbox: Sandbox) -> Outcome:
    folder = _write_texts(sandbox.folder / "texts")
    outcome = Outcome()
    outcome.expect(_run_language(sandbox, folder), 0)
    with (folder / "part-1.jsonl").open("a") as file:
        file.write(json.dumps({"text": "one line more"}) + "\n")
    outcome.expect(_run_language(sandbox, folder, "run.allow_change=[train.steps]", steps=6), REFUSED, "part-1.jsonl")
    return outcome


_MANY_STEPS = 40  # steps of a run whose data change after a few of them


def _on_the_fly_job(sandbox: Sandbox, folder: Path, name: str, *words: str) -> job.Job:
    """Start a run that tokenises documents on the fly."""
    settings = ("data.tokenise=on_the_fly", "data.vocab_size=300", f"run.name={name}")
    return _language_job(sandbox, folder, *settings, *words, steps=_MANY_STEPS)


@scenario("G48d", "a data file that changes during training: longer, replaced, overwritten, or only touched")
def _changed_during_training(sandbox: Sandbox) -> Outcome:
    """Steps since the newest checkpoint are not saved; once the file is restored, the run resumes from there."""
    folder = _write_texts(sandbox.folder / "texts")
    path, runs = folder / "part-1.jsonl", sandbox.folder / "runs"
    good, other = path.read_bytes(), path.read_bytes().replace(b"file 1", b"file 9")
    (sandbox.folder / "new.jsonl").write_bytes(other)
    changes: dict[str, Callable[[], object]] = {
        "touched": lambda: os.utime(path),
        "longer": lambda: path.write_bytes(good + good),
        "replaced": lambda: (sandbox.folder / "new.jsonl").replace(path),
        "overwritten": lambda: path.write_bytes(other),
    }
    outcome = Outcome()
    with _on_the_fly_job(sandbox, folder, "reference") as run:
        done = run.finish()
        assert done.code == 0, done.output
    expected = job.read_digests(runs / "reference")
    for name, change in changes.items():
        path.write_bytes(good)
        with _on_the_fly_job(sandbox, folder, name) as run:
            job.wait_for(lambda: job.newest_step(runs / name) > 4, 120.0, "a checkpoint")  # noqa: B023
            change()
            began = time.time()
            done = run.finish()
        if name != "touched":
            outcome.expect(done, REFUSED, f"{path} has changed", name=name)
            saved = [step for step in (runs / name / "checkpoints").glob("step-*") if step.stat().st_mtime > began]
            outcome.check(len(saved) <= 1, f"{name}: saved after it: {saved}")  # one save may have been in progress
            outcome.check(job.newest_step(runs / name) < _MANY_STEPS, f"{name}: it trained to the end")
        if name == "longer":
            path.write_bytes(good)
            with _on_the_fly_job(sandbox, folder, name) as run:
                done = run.finish()
        if name in ("touched", "longer"):
            outcome.compare(replace(done, run=runs / name), expected, f"{name}, at last,")
    return outcome


@scenario("G48e", "a data file truncated while a run reads it")
def _cut_short(sandbox: Sandbox) -> Outcome:
    """Reading beyond the end of a memory map kills a process by a signal; its launcher reports the file."""
    folder = _write_texts(sandbox.folder / "texts")
    path = folder / "part-1.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(4000)))
    with _on_the_fly_job(sandbox, folder, "a", "checkpoint.every=1000", "train.steps=2000") as run:
        run.wait_for_step(5)
        os.truncate(path, 4096)
        began = time.monotonic()
        return sandbox.check_end(run.finish(), began, DIED, ("SIGBUS", f"{path} has changed", "has 4096"), 10.0)


@scenario("G48b", "a file system that lists files in a different order")
def _order(sandbox: Sandbox) -> Outcome:
    folders = [sandbox.folder / name / "texts" for name in ("a", "b")]
    _write_texts(folders[0])
    folders[1].mkdir(parents=True)
    for path in sorted(folders[0].iterdir(), reverse=True):
        shutil.copy(path, folders[1] / path.name)
    first, second = (_run_language(sandbox.for_scenario("order"), folder) for folder in folders)
    assert first.code == 0, first.output
    outcome = Outcome(message="files are sorted by name")
    outcome.compare(second, job.read_digests(first.run))
    return outcome


@scenario("G48c", "a data file present twice under two names")
def _twice(sandbox: Sandbox) -> Outcome:
    folder = _write_texts(sandbox.folder / "texts")
    shutil.copy(folder / "part-1.jsonl", folder / "part-7.jsonl")
    outcome = Outcome()
    outcome.expect(_run_language(sandbox, folder), REFUSED, "part-1.jsonl", "part-7.jsonl")
    (folder / "part-7.jsonl").unlink()
    outcome.expect(_run_language(sandbox, folder), 0, name="the run without it")
    return outcome


@scenario("C30", "run directory lost, and only part of the newest checkpoint uploaded")
def _store(sandbox: Sandbox) -> Outcome:
    """The store is a folder; the core's tests cover the behaviour of servers, such as late listings."""
    before = sandbox.reference_digests()
    # Slow enough that more than the last checkpoint is sent: those that come faster than they can be sent are skipped.
    words = (f"checkpoint.upload.url=file://{sandbox.folder}/store", "checkpoint.upload.required=true", "task.sleep=1")
    done = sandbox.run(*words)
    assert done.code == 0, done.output
    uploaded = sorted((sandbox.folder / "store").rglob("step-*"))
    if len(uploaded) < 2:
        raise AbstainError("this host was too slow to send two commits")
    (uploaded[-1] / "manifest.json").unlink()
    shutil.rmtree(done.run)
    done = sandbox.run(*words)
    outcome = Outcome(message=done.line_with("restored step-"), lost_steps=job.EVERY)
    outcome.expect(done, 0, f"restored {uploaded[-2].name}")
    after = job.read_digests(done.run) if done.code == 0 else {}
    # The lines of the ledger were in the folder; their digest is in the checkpoint.
    other = [name for name in before if not name.startswith("step ") and after.get(name) != before[name]]
    outcome.exact = not other
    outcome.check(not other, f"it ended differently: {other}")
    return outcome
