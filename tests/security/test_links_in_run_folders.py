"""Nothing is written through a link or into a pipe of a run's folder, which may be a copy of somebody else's."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from unisono.checkpoint.core import commit, leftovers, placement
from unisono.cli import main
from unisono.config.code import own_runs
from unisono.data.ledger import Ledger
from unisono.engines.torch.profiler import TorchProfiler
from unisono.launch.processes import local_processes
from unisono.launch.resolving import run_directory
from unisono.observe import events, logs, samples
from unisono.runtime.communication.communicator import ProcessInfo, SingleProcess
from unisono.runtime.errors import RunError, SaveError
from unisono.runtime.untrusted import safe_writing
from unisono.runtime.untrusted.safe_paths import UnsafePathError
from unisono.supervise import run_lock

ALONE = ProcessInfo(0, 1)


def _log(run: Path) -> None:
    try:
        logs.start_logging(run, ALONE)
        logging.getLogger("unisono").warning("a warning")
    finally:
        logs.stop_logging()


def _record(run: Path) -> None:
    with Ledger(run, 0, 1, 0, "start"):
        pass


def _lock(run: Path) -> None:
    with run_lock.hold_lock(run):
        pass


def _save(run: Path) -> None:
    commit.save_checkpoint(run / "checkpoints", commit.Snapshot(1, [], {}), SingleProcess(), 1)


def _profile(run: Path) -> None:
    profiler = TorchProfiler(torch.device("cpu"))
    profiler._running = type("Stopped", (), {"stop": lambda self: None})()  # type: ignore[assignment]
    profiler.stop(run / "profile" / "rank-00000.trace.json.gz")


WRITERS: dict[str, Callable[[Path], Any]] = {
    "logs/rank-00000.log": _log,
    "logs": _log,
    "ledger/rank-00000.jsonl": _record,
    "ledger": _record,
    "events.jsonl": lambda run: events.append_event(run / "events.jsonl", {"step": 1}),
    "lease": _lock,
    "lease/00000001.beat": _lock,
    "checkpoints": _save,
    "profile": _profile,
    "samples": lambda run: samples.prepare_sample(run, 1, "a", np.zeros((2, 2))),
    "logs/rank-00000.native.log": lambda run: safe_writing.open_anew(run, "logs/rank-00000.native.log"),
    "logs ": local_processes.remove_old_faults,
}


@pytest.mark.parametrize("kind", ["link", "folder link", "pipe"])
@pytest.mark.parametrize("name", WRITERS)
def test_nothing_is_written_through_a_link_or_into_a_pipe_of_a_run(tmp_path: Path, name: str, kind: str) -> None:
    """`unisono resume` of a run from somebody else appended to ~/.bashrc, or hung, by what its log led to."""
    run, private = tmp_path / "run", tmp_path / "private"
    path = run / name.strip()
    path.parent.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        private.mkdir() if kind == "folder link" else private.write_text("mine, without an end of line")
        path.symlink_to(private)
    with pytest.raises((UnsafePathError, SaveError, OSError), match=r"is a (link|pipe)"):
        WRITERS[name](run)
    if kind == "link":
        assert private.read_text() == "mine, without an end of line"
    elif kind == "folder link":
        assert list(private.iterdir()) == []


def test_what_is_no_link_is_appended_to_and_made_with_its_folder(tmp_path: Path) -> None:
    for text in ("one\n", "two\n"):
        with safe_writing.open_to_append(tmp_path, "logs/a.log") as file:
            file.write(text)
    assert (tmp_path / "logs" / "a.log").read_text() == "one\ntwo\n"
    with pytest.raises(FileNotFoundError):  # the folder itself is never made, since somebody may have renamed it
        safe_writing.open_to_append(tmp_path / "renamed", "a.log")


def test_assets_are_written_only_into_a_folder_without_links(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.json").write_text("{}")
    safe_writing.check_contents(tmp_path)
    (tmp_path / "deep" / "b.json").symlink_to("a.json")
    with pytest.raises(UnsafePathError, match=r"b\.json is a link"):
        safe_writing.check_contents(tmp_path)


@pytest.mark.parametrize("kind", ["link", "file"])
def test_checkpoints_that_lead_elsewhere_are_refused_before_the_start(tmp_path: Path, kind: str) -> None:
    """It was noticed at the first save, with `There is no checkpoint yet`, or never."""
    run = tmp_path / "a"
    run.mkdir()
    (run / "config.yaml").touch()
    path = run / "checkpoints"
    path.symlink_to(tmp_path) if kind == "link" else path.touch()
    config = make_config(tmp_path)
    with pytest.raises(
        RunError, match=rf"checkpoints is a {kind}( to \S+)?, and a run writes only into folders of its"
    ):
        run_directory.refuse_unusable(config)
    with pytest.raises(RunError, match=r"checkpoint\.folder=DIR"), run_directory.hold_run(config):
        pass
    assert not (run / "lease").exists(), "nothing was fetched or removed before"


def make_config(folder: Path, elsewhere: Path | None = None, **others: Any) -> Any:
    """A configuration of the run `a`."""
    return SimpleNamespace(
        run=SimpleNamespace(dir=folder, name="a", resume="auto"),
        checkpoint=SimpleNamespace(folder=elsewhere),
        launch=SimpleNamespace(shared_folder=True),
        observe=SimpleNamespace(trackers=others.get("trackers", [])),
    )


def test_checkpoints_lie_where_the_configuration_says_and_nowhere_else(tmp_path: Path) -> None:
    """A link to a scratch disk, usual on clusters, was refused without a setting that allows it."""
    run, scratch = tmp_path / "a", tmp_path / "scratch"
    config = make_config(tmp_path, scratch)
    for _ in range(2):  # made by the first start, found by the second
        with run_directory.hold_run(config):
            assert (run / "checkpoints").readlink() == scratch / "a"
    (scratch / "a" / "step-00000001").mkdir()
    with run_directory.hold_run(config):
        pass
    (scratch / "other").mkdir()
    (run / "checkpoints").unlink()
    with pytest.raises(RunError, match=r"scratch/a exists already, and .*/a is not the run whose"):
        placement.refuse_elsewhere(config, run)
    (run / "checkpoints").symlink_to(scratch / "other")  # another run's
    with pytest.raises(RunError, match=r"other, and a run writes only .* a link to DIR/a is followed"):
        placement.refuse_elsewhere(config, run)
    (run / "checkpoints").unlink()
    (run / "checkpoints").mkdir()
    with pytest.raises(RunError, match=r"is a folder, .*: both are there, and neither is overwritten"):
        placement.refuse_elsewhere(config, run)


def test_a_place_for_checkpoints_that_cannot_be_made_is_named_by_its_setting(tmp_path: Path) -> None:
    """The message said to choose another run.dir."""
    (tmp_path / "file").touch()
    with (
        pytest.raises(
            RunError, match=r"cannot write to \S+/file/on: Not a directory .*; choose another checkpoint\.folder"
        ),
        run_directory.hold_run(make_config(tmp_path, tmp_path / "file" / "on")),
    ):
        pass


@pytest.mark.parametrize("text", ["checkpoint: [1]", "checkpoint: text", 'checkpoint: {folder: "/a\\0"}', "run: {"])
def test_clean_leaves_alone_what_it_cannot_read_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """A stranger's configuration whose groups are none ended `unisono clean` with a traceback, before any other run."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("recipe: a\n")
    (tmp_path / "a" / "config.yaml").write_text(f"recipe: a\n{text}\n")
    (tmp_path / "a" / "checkpoints").symlink_to(tmp_path)
    (tmp_path / "b" / "checkpoints" / "damaged-step-00000001").mkdir(parents=True)
    assert main.main(["clean", str(tmp_path), "--yes"]) == 0
    assert f"{tmp_path}/a is left as it is" in " ".join(capsys.readouterr().err.split())
    assert not list((tmp_path / "b" / "checkpoints").iterdir())


def test_nothing_is_removed_where_a_link_of_a_stranger_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`unisono clean --keep 1` of an unpacked run removed the checkpoints of the user's own run, to which it led."""
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    mine.mkdir()
    for step in (1, 2):
        commit.save_checkpoint(mine / "checkpoints", commit.Snapshot(step, [], {}), SingleProcess(), 9)
    (mine / "checkpoints" / ".writing-step-00000003-a").mkdir()
    theirs.mkdir()
    (theirs / "config.yaml").write_text(f"recipe: a\ncheckpoint: {{folder: {tmp_path}}}\n")
    (theirs / "checkpoints").symlink_to(mine / "checkpoints")
    for keep in (None, 1):
        with pytest.raises(RunError, match="nothing is removed where it leads"):
            leftovers.find_leftovers(theirs, keep)
    (tmp_path / "scratch" / "theirs").mkdir(parents=True)
    (tmp_path / "scratch" / "theirs" / ".writing-step-00000003-a").mkdir()
    (theirs / "config.yaml").write_text(f"recipe: a\ncheckpoint: {{folder: {tmp_path}/scratch}}\n")
    (theirs / "checkpoints").unlink()
    (theirs / "checkpoints").symlink_to(tmp_path / "scratch" / "theirs")
    with pytest.raises(RunError, match="not known to be yours"):
        leftovers.find_leftovers(theirs)
    monkeypatch.setattr(own_runs, "why_not_own", lambda run, values: None)
    assert [one.path.name for one in leftovers.find_leftovers(theirs)] == [".writing-step-00000003-a"]


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_folder_of_a_tracker_is_looked_at_before_the_first_step(tmp_path: Path, name: str) -> None:
    """W&B followed a link of that name, in its own thread after the run had begun; TensorBoard gave a warning then."""
    run = tmp_path / "a"
    run.mkdir()
    (run / "config.yaml").touch()
    (run / name).symlink_to(tmp_path)
    run_directory.refuse_unusable(make_config(tmp_path))
    with pytest.raises(RunError, match=f"{name} is a link, where observe.trackers={name} has its folder"):
        run_directory.refuse_unusable(make_config(tmp_path, trackers=[name]))


def test_a_token_that_no_run_has_written_ends_the_start(tmp_path: Path) -> None:
    """After it no token was seen, so that each start waited for a heartbeat again and again, for ever."""
    (tmp_path / "lease").mkdir()
    (tmp_path / "lease" / f"{'9' * 18}.json").touch()
    with pytest.raises(RunError, match="which no run has written; remove it"), run_lock.hold_lock(tmp_path, patience=0):
        pass


def test_a_folder_among_old_tokens_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "lease" / "00000001.json").mkdir(parents=True)
    (tmp_path / "lease" / "00000009.json").write_text("{}")
    with run_lock.hold_lock(tmp_path, patience=0) as lock:
        assert lock.token == 10


def test_an_earlier_configuration_with_a_strange_number_is_none(tmp_path: Path) -> None:
    from unisono.runtime.files import write_with_backup

    (tmp_path / "config.yaml").write_text("a")
    (tmp_path / "config.\u00b2.yaml").touch()
    write_with_backup(tmp_path / "config.yaml", "b")
    assert (tmp_path / "config.0001.yaml").read_text() == "a"


def test_a_log_of_native_code_that_is_a_pipe_is_left_alone(tmp_path: Path) -> None:
    """A JAX rank waited in `open` for somebody who reads it."""
    pytest.importorskip("jax")
    from unisono.engines.jax.parallel import runtime

    (tmp_path / "logs").mkdir()
    os.mkfifo(tmp_path / "logs" / "a.log")
    before = sys.stdout
    runtime.redirect_native_output(tmp_path, "logs/a.log")
    assert sys.stdout is before


def test_a_log_that_is_written_anew_holds_nothing_of_before(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"of an earlier start")
    with safe_writing.open_anew(tmp_path, "a.log") as file:
        file.write(b"new")
    assert (tmp_path / "a.log").read_bytes() == b"new"
