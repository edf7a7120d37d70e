"""The run directory: made, checked and described before anything expensive starts.

A directory belongs to one run. It is continued only by a configuration with the same mathematics, and nothing in it is
ever overwritten by another run, nor by the same one started twice: it is locked as long as the run lives.
"""

from __future__ import annotations

import json
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from unisono.checkpoint.core import commit, provenance, resume
from unisono.checkpoint.remote import restore, store_lock
from unisono.config import environment, fingerprint, foreign_run, resolve
from unisono.config.schema.run import RunConfig
from unisono.runtime.errors import CheckpointError, RunError
from unisono.runtime.files import TEMPORARY, write_kept, write_whole
from unisono.supervise import disk_space, run_lock
from unisono.task import Task

CERTIFICATE = "certificate.json"  # of a proof, which may come before the run and leave half a file if it is killed
FILES = "files.json"  # of the sources; beside the facts, which trackers are given, for there can be many


def named(config: RunConfig, job: str | None = None) -> RunConfig:
    """The configuration with a name for its run: its own, or one from the recipe and the job or the time."""
    if config.run.name is not None:
        return config
    stem = Path(config.recipe.split(":")[0]).stem
    name = f"{stem}-{f'job{job}' if job else time.strftime('%Y%m%d-%H%M%S')}"
    free = next(n for n in (name, *(f"{name}-{i}" for i in range(2, 1000))) if job or not (config.run.dir / n).exists())
    return config.model_copy(update={"run": config.run.model_copy(update={"name": free})})


def check(config: RunConfig) -> RunConfig:
    """Refuse a directory that cannot be used, without touching it; returns the configuration to go on with.

    A run that is continued keeps its micro-batch where it fits, and always where a forward pass draws random numbers.

    Raises:
        RunError: if the directory is not writable, holds another run, or holds nothing to resume where that is a must.
    """
    folder = path_of(config)
    try:
        existing = next(parent for parent in (folder, *folder.resolve().parents) if parent.exists())
    except (OSError, RuntimeError) as error:  # a name that is too long, or links in a circle
        reason = error.strerror if isinstance(error, OSError) else "symbolic links that lead in a circle"
        raise RunError(f"{folder} cannot be a folder: {reason}; choose another run.dir or run.name") from error
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise RunError(
            f"{folder}: {existing} cannot be written to ({error.strerror}); choose another run.dir"
        ) from error
    harmless = {run_lock.FOLDER, CERTIFICATE, store_lock.KEPT}
    inside = [path.name for path in folder.iterdir() if path.suffix != TEMPORARY] if folder.exists() else []
    others = set(inside) - harmless
    if others and not (folder / "config.yaml").is_file():
        raise RunError(f"{folder} is not empty and is not a run (it has no config.yaml); choose another run.name")
    if config.run.resume == "never" and (folder / "config.yaml").is_file():
        raise RunError(
            f"{folder} already holds a run, and run.resume=never; choose another run.name, or run.resume=auto"
        )
    _refuse_another_s_name(config)
    newest, damaged = resume.newest_readable(folder / "checkpoints")
    if newest is not None:
        disk_space.check(folder, config, disk_space.of_newest(folder), 1)
    if config.checkpoint.upload.url is not None and (begun := restore.begun(folder)):  # newer, and about to be there
        newest, damaged = commit.read(begun[-1]), []
    if config.run.resume == "exact" and damaged:
        raise CheckpointError(f"{damaged[0].why} {resume.NO_OTHER}")
    if newest is None and damaged:
        raise resume.none_whole(folder / "checkpoints", damaged)
    if config.run.resume in ("must", "exact") and newest is None:
        raise resume.nothing_there(folder, config)
    if not (folder / "config.yaml").is_file():
        provenance.check_names(config)
        return config
    there: provenance.About
    if newest is not None:
        there, random = newest.about, bool(newest.state["random"])
    else:  # interrupted before its first checkpoint
        random = False
        there = {"config": foreign_run.read_values(folder / "config.yaml")}
    provenance.check_names(config, there["config"])
    old = provenance.filled(there["config"], config)
    before = old["layout"]["micro_batch"]
    whole = config.layout.sync_batch_norm and fingerprint.normalised_together(old) is None
    open_ = not isinstance(config.layout.micro_batch, int)
    kept = random or config.run.resume == "exact" or (_divides(before, config) and not whole)
    if open_ and kept:
        config = config.model_copy(update={"layout": config.layout.model_copy(update={"micro_batch": before})})
    provenance.refuse(str(folder), provenance.compare(there, provenance.of(config), config, random), config)
    together = fingerprint.normalised_together(old), fingerprint.normalised_together(config)
    if together[0] != together[1] and "layout.micro_batch" not in config.run.allow_change:
        raise RunError(
            f"{folder} already holds a run that normalises other rows together (layout.sync_batch_norm): "
            f"{_told(together[0])} there, {_told(together[1])} here. Keep layout.world_size and layout.micro_batch, or "
            "go on with this change by run.allow_change=[layout.micro_batch]"
        )
    return config


def _refuse_another_s_name(config: RunConfig) -> None:
    """Refuse the folder of `Run` for `run`, where the file system takes both names for one.

    Raises:
        RunError: naming the run that lies there.
    """
    folder = path_of(config)
    if not (folder / "config.yaml").is_file() or not folds(folder):
        return
    there = str(foreign_run.read_values(folder / "config.yaml")["run"]["name"])
    if there != config.run.name and there.casefold() == str(config.run.name).casefold():
        raise RunError(
            f"{folder} already holds the run {there!r}: this file system does not tell large letters from small ones. "
            f"Choose another run.name, or go on with that run by run.name={there}"
        )


def folds(path: Path) -> bool:
    """Whether the file system knows a path by another name too, which differs in large and small letters alone.

    Where it does, what is there is listed once. The number of a file says nothing: FUSE gives one to each of its names.
    """
    other = path.with_name(path.name.swapcase())
    return other.exists() and other.name not in {name.name for name in path.parent.iterdir()}


def claim(config: RunConfig) -> RunConfig:
    """The same configuration with a name that no other start can have taken: the folder is made here."""
    while True:
        try:
            path_of(config).mkdir(parents=True)
        except FileExistsError:  # a start in the same second
            config = named(config.model_copy(update={"run": config.run.model_copy(update={"name": None})}))
        except OSError as error:
            raise _unwritable(path_of(config), error) from error
        else:
            return config


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make a folder and hold it against other starts, on this host and on others.

    Raises:
        RunError: naming the process that holds it.
    """
    with ExitStack() as opened:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            taken = opened.enter_context(run_lock.held(folder))
            if taken.seized:  # what its last owner was writing can be finished by nobody, not even if it wakes up
                commit.sweep(folder / "checkpoints")
        except OSError as error:
            raise _unwritable(folder, error) from error
        yield


def make(config: RunConfig, facts: dict[str, Any], task: Task, files: dict[str, Any] | None = None) -> Path:
    """Make the directory and write what the run is: its configuration, facts, the sources' files and the task's assets.

    Args:
        config: of the run.
        facts: of its data.
        task: that is trained.
        files: of each source, to say later which of them has changed.

    Raises:
        RunError: if it cannot be written, or if the data are not those of the run that lies there.
    """
    folder = path_of(config)
    _same_data(folder, facts, files or {})
    try:
        (folder / "assets").mkdir(parents=True, exist_ok=True)
        task.save_assets(folder / "assets")
        values = {**fingerprint.plain(config), "recipe": resolve.lasting(config.recipe)}
        write_kept(folder / "config.yaml", yaml.safe_dump(values, sort_keys=False))
        described = {
            "mathematics": fingerprint.digest(config),
            "data": facts,
            "versions": environment.versions(),
            "host": platform.node(),
        }
        write_whole(folder / FILES, json.dumps(files or {}, indent=1) + "\n")  # first, as the other one is looked for
        write_whole(folder / "fingerprint.json", json.dumps(described, indent=1) + "\n")
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


def _same_data(folder: Path, facts: dict[str, Any], files: dict[str, Any]) -> None:
    from unisono.data.sources.change_detection import what_changed

    if (folder / "fingerprint.json").is_file():
        before = json.loads((folder / "fingerprint.json").read_text(encoding="utf-8"))["data"]
        known = [name for name in ("rows", "sources", "fingerprint") if name in before and name in facts]
        if any(before[name] != facts[name] for name in known):  # another number of rows is another order
            differing = {k: (before.get(k), v) for k, v in facts.items() if before.get(k) != v}
            were = json.loads((folder / FILES).read_text(encoding="utf-8")) if (folder / FILES).is_file() else {}
            told = [
                (f"of source '{name}', " if name else "") + what
                for name in sorted(were.keys() & files.keys())
                if (what := what_changed(were[name], files[name]))
            ]
            raise RunError(
                f"{folder} was trained on other data{': ' if told else ''}{'; '.join(told)}; what differs (there, "
                f"here): {differing}. Bring the data back as they were, or choose another run.name"
            )


def path_of(config: RunConfig) -> Path:
    """Where a named run lies."""
    assert config.run.name is not None
    return config.run.dir / config.run.name


def _unwritable(folder: Path, error: OSError) -> RunError:
    return RunError(f"{folder} cannot be written: {error.strerror} ({error.filename}); choose another run.dir")


def _told(together: tuple[int, int] | None) -> str:
    return "the whole global batch" if together is None else f"{together[1]} of each of {together[0]} processes"


def _divides(micro_batch: int | str | None, config: RunConfig) -> bool:
    world = config.layout.world_size
    if not (isinstance(micro_batch, int) and isinstance(world, int)):
        return False
    return config.train.global_batch % (world * micro_batch) == 0
