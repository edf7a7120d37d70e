"""A place elsewhere for checkpoints belongs to one run, and a run whose checkpoints have gone does not begin again."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from packages.unisono.tests.runs import configuration
from unisono.checkpoint.core import commit, leftovers, placement, resume_point
from unisono.checkpoint.core.resume import open_newest
from unisono.checkpoint.core.resume_point import NewestCheckpoint
from unisono.checkpoint.exchange import export
from unisono.checkpoint.remote.upload import Uploads
from unisono.config.code import own_runs
from unisono.config.resolved_run import ResolvedRun
from unisono.config.schema.run import RunConfig
from unisono.launch.resolving import run_directory
from unisono.runtime.communication.communicator import SingleProcess
from unisono.runtime.errors import CheckpointError, RunError
from unisono.supervise.diagnose import diagnose_run


def make_config(folder: Path, elsewhere: Path, name: str = "a") -> RunConfig:
    return configuration(run={"dir": folder, "name": name}, checkpoint={"folder": elsewhere})


def start(folder: Path, elsewhere: Path, name: str = "a") -> Path:
    """Start a run, as far as its folder."""
    config = make_config(folder, elsewhere, name)
    run = run_directory.run_path(config)
    with run_directory.hold_run(config):
        (run / "config.yaml").write_text(f"recipe: a\ncheckpoint: {{folder: {elsewhere}}}\n")
    return run


def save(run: Path, *steps: int) -> None:
    for step in steps:
        commit.save_checkpoint((run / "checkpoints").resolve(), commit.Snapshot(step, [], {}), SingleProcess(), 9)
        placement.note_saved(run, step)


def test_a_copy_of_a_run_does_not_write_where_its_link_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both would have saved into one folder, each with a lock of its own, and `clean` of the copy removed from it."""
    run, scratch = start(tmp_path / "runs", tmp_path / "scratch"), tmp_path / "scratch"
    save(run, 1, 2)
    copy = Path(shutil.copytree(run, tmp_path / "copies" / "a", symlinks=True))
    with pytest.raises(RunError, match=rf"has the checkpoints of the run {run}, and .*copies/a is another one"):
        start(tmp_path / "copies", scratch)
    monkeypatch.setattr(own_runs, "why_not_own", lambda run, values: None)
    values = {"checkpoint": {"folder": str(scratch)}}
    assert placement.is_own(run, values)
    assert not placement.is_own(copy, values)
    with pytest.raises(RunError, match="nothing is removed where it leads"):
        leftovers.find_leftovers(copy, 1)
    monkeypatch.chdir(run)
    assert placement.is_own(Path(), values)


def test_a_second_run_of_a_name_is_refused_also_before_the_first_has_saved(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    first = start(tmp_path / "runs", scratch)
    with pytest.raises(RunError, match=r"Choose another run.name or checkpoint.folder"):
        start(tmp_path / "others", scratch)
    assert not (tmp_path / "others" / "a" / "checkpoints").is_symlink()
    shutil.rmtree(first)  # a start that failed, removed by hand
    start(tmp_path / "runs", scratch)


def test_of_many_starts_at_once_one_has_the_place(tmp_path: Path) -> None:
    begin, got = threading.Barrier(8), []

    def claim(number: int) -> None:
        config = make_config(tmp_path / str(number), tmp_path / "scratch")
        run = run_directory.run_path(config)
        run.mkdir(parents=True)
        begin.wait()
        try:
            placement.place(config, run)
            got.append(run)
        except RunError as error:
            assert "another one" in str(error) or "if no other run is being started" in str(error)

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1
    assert json.loads((tmp_path / "scratch" / "a" / "owner.json").read_text()) == {"run": str(got[0])}


def test_a_run_that_was_moved_takes_its_place_along_and_a_renamed_one_is_told_how(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    save(start(tmp_path / "runs", scratch), 1)
    (tmp_path / "runs").rename(tmp_path / "moved")
    run = start(tmp_path / "moved", scratch)
    assert json.loads((scratch / "a" / "owner.json").read_text()) == {"run": str(run)}
    renamed = run.rename(run.with_name("b"))
    with pytest.raises(RunError, match=rf"names {scratch}/b: if this run was renamed, .*ln -sfn {scratch}/b {renamed}"):
        start(tmp_path / "moved", scratch, "b")
    (scratch / "a").rename(scratch / "b")
    (renamed / "checkpoints").unlink()
    (renamed / "checkpoints").symlink_to(scratch / "b")
    start(tmp_path / "moved", scratch, "b")
    assert len(commit.find_checkpoints(renamed / "checkpoints")) == 1


def test_a_link_that_was_lost_is_told(tmp_path: Path) -> None:
    """A copy made by a tool that leaves links out lacks it."""
    run = start(tmp_path / "runs", tmp_path / "scratch")
    save(run, 1)
    (run / "checkpoints").unlink()
    with pytest.raises(RunError, match=rf"its link was lost: ln -s {tmp_path}/scratch/a {run}/checkpoints"):
        start(tmp_path / "runs", tmp_path / "scratch")


@pytest.mark.parametrize("inner", ["", "a", "a/deep"])
def test_a_place_inside_the_run_or_around_it_is_refused(tmp_path: Path, inner: str) -> None:
    """`checkpoint.folder` equal to `run.dir` made a link in a run's folder to that very folder."""
    with pytest.raises(RunError, match="and the run itself lies in"):
        start(tmp_path, tmp_path / inner)
    with pytest.raises(RunError, match="and the run itself lies in"):
        start(tmp_path / "x" / "a", tmp_path / "x")


def test_what_another_user_or_nobody_has_made_in_its_place_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder like /tmp anybody can make it first, and then change what is saved."""
    place = tmp_path / "scratch" / "a"
    place.parent.mkdir()
    place.symlink_to(tmp_path / "missing")
    with pytest.raises(RunError, match="a is a link, not a folder"):
        start(tmp_path / "runs", tmp_path / "scratch")
    place.unlink()
    place.mkdir()
    os.chown(place, 12345, -1) if os.geteuid() == 0 else monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(RunError, match="belongs to another user"):
        start(tmp_path / "runs", tmp_path / "scratch")
    (place / "owner.json").symlink_to(tmp_path / "secret")
    with pytest.raises(RunError, match=r"whose checkpoints these are, cannot be read: .*owner.json is a link"):
        start(tmp_path / "runs", tmp_path / "scratch")


def begin_again(run: Path) -> Any:
    return resume_point.decide_resume_point(run, configuration(), {}, NewestCheckpoint(), None)


def test_a_run_whose_checkpoints_have_gone_does_not_begin_again(tmp_path: Path) -> None:
    """A disk that is not mounted, a purged one, or `checkpoints` deleted by hand: it began at step 0 without a word."""
    run, place = start(tmp_path / "runs", tmp_path / "scratch"), tmp_path / "scratch" / "a"
    assert begin_again(run) is None  # killed before its first checkpoint
    save(run, 3, 4)
    assert json.loads((run / "saved.json").read_text()) == {"first_step": 3}
    place.rename(tmp_path / "away")
    gone = rf"saved checkpoints since step 3, and \S+/checkpoints, which leads to {place}, does not exist on this host"
    for use in (begin_again, export.find_checkpoint):
        with pytest.raises(RunError, match=gone):
            use(run)
    assert re.search(gone, "\n".join(diagnose_run(run)))
    start(tmp_path / "runs", tmp_path / "scratch")  # the next start makes the place, and is refused all the same
    with pytest.raises(RunError, match=r"checkpoints, which leads to .*, has none any more: they were deleted"):
        begin_again(run)
    (run / "checkpoints").unlink()
    with pytest.raises(RunError, match=r"choose another run.name, or remove .*runs/a"):
        begin_again(run)
    (run / "saved.json").write_text("{}")
    with pytest.raises(RunError, match=r"saved.json cannot be read: .*remove it if .* never had a checkpoint"):
        begin_again(run)


def test_a_node_that_does_not_see_the_place_is_named_before_the_first_step(tmp_path: Path) -> None:
    """Of a disk that each node has for itself the first save told, when it failed."""

    class Two(SingleProcess):
        def gather(self, value: Any, what: str) -> list[Any]:
            return [value, False] if what == "whether all ranks see checkpoint.folder" else [value]

    config = make_config(tmp_path, tmp_path / "scratch")
    run = start(tmp_path, tmp_path / "scratch")
    resolved = ResolvedRun(config, run, None)
    assert open_newest(resolved, {}, SingleProcess()).step == 0
    with pytest.raises(CheckpointError, match=r"rank 1 does not see .*scratch/a: checkpoint.folder is for a disk of"):
        open_newest(resolved, {}, Two())


def test_what_waits_for_an_upload_stays_on_the_disk_of_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was linked into the run's folder, which across disks copied each checkpoint onto the small one."""
    monkeypatch.setattr(Uploads, "_send_order", lambda *_: None)
    run, place = start(tmp_path / "runs", tmp_path / "scratch"), tmp_path / "scratch" / "a"
    config = make_config(tmp_path / "runs", tmp_path / "scratch")
    upload = config.checkpoint.upload.model_copy(update={"url": f"file://{tmp_path}/store"})
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"upload": upload})})
    (tmp_path / "store").mkdir()
    uploads = Uploads(config, run, True, print, lambda *_: None)
    save(run, 1)
    uploads.enqueue(commit.find_checkpoints(run / "checkpoints")[-1])
    assert (place / "uploading" / "step-00000001" / "manifest.json").stat().st_nlink == 2
    assert not (run / "uploading").exists()


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "the folder of a start that failed"])
def test_the_commands_that_move_checkpoints_elsewhere_do_it(tmp_path: Path, there: str) -> None:
    """`mv` put them into a folder that existed, so the link led to one without checkpoints."""
    run, target = tmp_path / "runs" / "a", tmp_path / "scratch disk" / "a"
    run.mkdir(parents=True)
    save(run, 1)
    if there != "nothing":
        target.mkdir(parents=True)
    if there.startswith("the"):
        (target / "owner.json").write_text(json.dumps({"run": str(run)}))
    with pytest.raises(RunError, match="move it there, and put a link in its place: ") as caught:
        start(tmp_path / "runs", target.parent)
    subprocess.run(str(caught.value).partition("in its place: ")[2], shell=True, check=True)
    start(tmp_path / "runs", target.parent)
    assert [path.name for path in commit.find_checkpoints(target)] == ["step-00000001"]
    assert (run / "checkpoints").readlink() == target


def test_checkpoints_in_both_places_are_not_mixed(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    save(run, 1)
    (tmp_path / "scratch" / "a" / "step-00000001").mkdir(parents=True)
    with pytest.raises(RunError, match=r"both are there, and neither is overwritten; choose another run\.name"):
        start(tmp_path / "runs", tmp_path / "scratch")


def test_a_place_that_cannot_be_written_to_is_told_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`unisono check` said that the run could start."""
    (tmp_path / "scratch").mkdir()
    real = tempfile.TemporaryFile

    def make(dir: Path) -> Any:
        if "scratch" in str(dir):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(dir))
        return real(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", make)
    with pytest.raises(RunError) as caught:
        run_directory.refuse_unusable(make_config(tmp_path / "runs", tmp_path / "scratch"))
    assert str(caught.value) == (
        f"{tmp_path}/scratch/a: {tmp_path}/scratch cannot be written to (Read-only file system); choose another "
        "checkpoint.folder"
    )
    assert not list((tmp_path / "scratch").iterdir())
