"""A file system that does not answer: nothing is taken for missing or damaged, and nothing is renamed or begun anew."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from packages.unisono.tests.checkpoint.saved import Threads, load, save
from packages.unisono.tests.data.test_ledger import kept
from packages.unisono.tests.runs import configuration
from unisono.checkpoint.core import commit, leftovers, resume
from unisono.checkpoint.core.manifest import Checkpoint
from unisono.checkpoint.core.resume_point import newest_readable
from unisono.checkpoint.remote.upload import Uploads
from unisono.config import fingerprint
from unisono.config.resolved_run import Candidate, ResolvedRun, ResumePoint
from unisono.data import ledger
from unisono.launch import exit_advice
from unisono.launch.processes import local_processes
from unisono.observe.events import Events
from unisono.runtime import files
from unisono.runtime.communication.communicator import SingleProcess
from unisono.runtime.errors import CheckpointError, DataError, Preempted, RecordError, SaveError, UnavailableError
from unisono.supervise import diagnose

Call = Callable[..., Any]


@contextmanager
def failing(code: int, name: str, *calls: str) -> Iterator[None]:
    """Calls of `os` fail for what has a name, as on a file server that is away."""
    with mock.patch.multiple(os, **{call: _fail(getattr(os, call), code, name) for call in calls}):
        yield


def _fail(real: Call, code: int, name: str) -> Call:
    def call(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        if not isinstance(path, int) and os.fspath(path).endswith(name):
            raise OSError(code, os.strerror(code), os.fspath(path))
        return real(path, *arguments, **options)

    return call


AWAY = [errno.ESTALE, errno.ETIMEDOUT, errno.EACCES, errno.EMFILE]


@pytest.mark.parametrize("code", AWAY)
@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.safetensors"])
def test_a_checkpoint_that_cannot_be_read_now_is_no_damaged_one(tmp_path: Path, code: int, name: str) -> None:
    """It was called damaged, with the advice to delete it, and a resume renamed it and went back to the one before."""
    save(tmp_path, 4)
    newest = save(tmp_path, 8)
    with failing(code, name, "open"), pytest.raises(UnavailableError) as caught:
        commit.open_checkpoint(newest)
    assert str(caught.value) == (
        f"{newest / name} cannot be read now ({os.strerror(code)}). It may well be whole, and was left as it is: see "
        "to the file system or the permissions, then give the same command again"
    )
    assert load(newest)


def test_it_is_so_on_every_rank_whichever_reads_it(tmp_path: Path) -> None:
    newest = save(tmp_path, 8)

    ranks = Threads(2)

    def read() -> str:
        with pytest.raises(UnavailableError) as caught:
            commit.open_checkpoint(newest, ranks)
        return str(caught.value)

    with failing(errno.ESTALE, "rank-00000.safetensors", "open"):
        assert all("cannot be read now (Stale file handle)" in told for told in ranks.run(read))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOENT])
def test_what_tells_of_damage_is_still_damage(tmp_path: Path, code: int) -> None:
    newest = save(tmp_path, 8)
    with failing(code, "rank-00000.safetensors", "open"), pytest.raises(CheckpointError, match="Delete"):
        commit.open_checkpoint(newest)


@pytest.mark.parametrize("code", [*AWAY, errno.EIO])
@pytest.mark.parametrize(("name", "call"), [("checkpoints", "listdir"), ("manifest.json", "stat")])
def test_checkpoints_that_cannot_be_seen_are_not_taken_for_none(
    tmp_path: Path, code: int, name: str, call: str
) -> None:
    """A traceback, or, from Python 3.14 on, an older checkpoint in silence."""
    folder = tmp_path / "checkpoints"
    save(folder, 4)
    with failing(code, name, call), pytest.raises(UnavailableError, match=os.strerror(code)):
        newest_readable(folder)
    assert [path.name for path in commit.find_checkpoints(folder)] == ["step-00000004"]


def test_a_preempted_run_is_preempted_whatever_is_known_of_its_checkpoints(tmp_path: Path) -> None:
    """The exit code, by which a scheduler starts it again, was that of an error."""
    save(tmp_path / "checkpoints", 4)
    with failing(errno.EACCES, "checkpoints", "listdir"):
        ended = local_processes._preempted_error(tmp_path)
    assert (ended.exit_code, "Permission denied" in str(ended)) == (75, True)
    assert "from step 4" in str(local_processes._preempted_error(tmp_path))


def test_a_resume_renames_nothing_that_cannot_be_read_now(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "checkpoints"
    folder.parent.mkdir()
    save(folder, 4)
    save(folder, 8)
    config = configuration(run={"dir": tmp_path, "name": "a"})
    point = ResumePoint((Candidate("step-00000008", 8), Candidate("step-00000004", 4)), False)
    run = ResolvedRun(config, tmp_path / "a", point)
    with failing(errno.ESTALE, "rank-00000.safetensors", "open"), pytest.raises(UnavailableError):
        resume.open_newest(run, {}, SingleProcess())
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000004", "step-00000008"]


def test_a_save_beside_what_cannot_be_seen_is_tried_again_and_removes_nothing(tmp_path: Path) -> None:
    save(tmp_path, 4)
    with failing(errno.ESTALE, "step-00000004/manifest.json", "stat"), pytest.raises(SaveError) as caught:
        save(tmp_path, 8, keep=1)
    assert caught.value.transient
    assert load(tmp_path / "step-00000004")
    later = [[tmp_path / "step-00000004"], UnavailableError("cannot be read now")]  # the second time, once it is saved
    with mock.patch.object(commit, "find_checkpoints", side_effect=later):
        save(tmp_path, 8, keep=1)
    assert load(tmp_path / "step-00000004") and load(tmp_path / "step-00000008")


def test_a_ledger_that_cannot_be_read_is_not_taken_for_missing(tmp_path: Path) -> None:
    """A resume warned that it was missing, and began another one behind it."""
    known = kept(tmp_path, 0, 4)
    with failing(errno.ESTALE, "rank-00000.jsonl", "open"):
        with pytest.raises(UnavailableError, match=r"rank-00000.jsonl cannot be read \(Stale file handle\)"):
            ledger.missing_files(tmp_path, known)
        with pytest.raises(UnavailableError, match="move it away to begin a new one"):
            ledger.find_fault(tmp_path, "rank-00000.jsonl", known["files"]["rank-00000.jsonl"])
    assert ledger.missing_files(tmp_path, known) == []


@pytest.mark.parametrize("name", ["events.jsonl", "rank-00000.jsonl"])
def test_a_record_that_cannot_be_opened_at_the_start_is_a_sentence(tmp_path: Path, name: str) -> None:
    """A traceback."""
    Events(tmp_path / "events.jsonl").close()
    kept(tmp_path, 0, 2)
    with failing(errno.EROFS, name, "open"), pytest.raises(RecordError, match=rf"{name} cannot be written \(Read-only"):
        if name == "events.jsonl":
            Events(tmp_path / name)
        else:
            ledger.Ledger(tmp_path, 0, 1, 2, "b")


def test_a_file_system_that_cannot_flush_a_folder_will_do(tmp_path: Path) -> None:
    """As some of SMB and FUSE: every save failed."""
    real = os.fsync

    def flush(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_dir():
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(descriptor)

    with mock.patch.object(os, "fsync", flush):
        assert load(save(tmp_path, 4))
    with mock.patch.object(os, "fsync", side_effect=OSError(errno.EINVAL, "no")), pytest.raises(OSError, match="no"):
        files.fsync_path(tmp_path / "step-00000004" / "manifest.json")


def test_what_cannot_be_seen_is_not_cleaned(tmp_path: Path) -> None:
    run = tmp_path / "a"
    run.mkdir()
    save(run / "checkpoints", 4)
    save(run / "checkpoints", 8)
    values = fingerprint.to_json(configuration())
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    with failing(errno.ESTALE, "manifest.json", "open"), pytest.raises(UnavailableError):
        leftovers.find_leftovers(run, 1)


@contextmanager
def unreadable(name: str) -> Iterator[None]:
    """A checkpoint whose manifest cannot be read now, wherever that is read."""
    real = commit.read_manifest

    def read(path: Path) -> Checkpoint:
        if path.name == name:
            raise UnavailableError(f"{path} cannot be read now (Permission denied)")
        return real(path)

    with mock.patch.object(commit, "read_manifest", read):
        yield


def test_a_failed_run_whose_checkpoints_cannot_be_seen_keeps_its_error_and_is_resumed(tmp_path: Path) -> None:
    """The error was replaced by that of the look; one of the file system was taken for "no checkpoint yet"."""
    folder = tmp_path / "a" / "checkpoints"
    folder.parent.mkdir()
    save(folder, 8)
    (tmp_path / "a" / "events.jsonl").write_text('{"step": 9, "loss": 1.0}\n')
    run = ResolvedRun(configuration(run={"dir": tmp_path, "name": "a"}), tmp_path / "a", command=("train", "x"))
    for error in (DataError("row 7"), Preempted("preempted")):
        with unreadable("step-00000008"), pytest.raises(type(error)) as caught, exit_advice.explain_exit(run):
            raise error
        told = str(caught.value)
        assert told.startswith(str(error)) and "Resume with:" in told and "no checkpoint" not in told.lower()
    with unreadable("step-00000008"):
        advice = exit_advice.resume_advice(run)
    assert advice.startswith(f"{folder}/step-00000008 cannot be read now (Permission denied). Resume with:")


def test_the_rest_of_a_diagnosis_is_told_where_checkpoints_cannot_be_read(tmp_path: Path) -> None:
    """`unisono diagnose` ended with that error alone, of a run of somebody else."""
    (tmp_path / "config.yaml").write_text("train: {steps: 8}\n")
    (tmp_path / "events.jsonl").write_text('{"step": 6, "loss": 1.0}\n')
    save(tmp_path / "checkpoints", 4)
    with failing(errno.EACCES, "manifest.json", "open"):
        lines = diagnose.diagnose_run(tmp_path)
    assert lines[0].startswith(f"{tmp_path}: 6 of 8 steps done")
    assert any("manifest.json cannot be read now (Permission denied)" in line for line in lines)
    assert not any("not saved" in line or "no usable checkpoint" in line for line in lines)


def test_an_older_checkpoint_that_cannot_be_read_hinders_no_upload(tmp_path: Path) -> None:
    """The start of a run with a store ended there, though only the newest checkpoint is uploaded."""
    save(tmp_path / "checkpoints", 4)
    newest = save(tmp_path / "checkpoints", 8)
    uploads = mock.Mock(_pending=tmp_path / "uploading", _folder=tmp_path)
    with unreadable("step-00000004"):
        Uploads._resume_pending(uploads)
    uploads.enqueue.assert_called_once_with(newest)
