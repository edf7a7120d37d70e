"""The run directory: created, checked and described before anything expensive starts.

A directory belongs to one run. Only a configuration with the same mathematics may continue it, and another run never
overwrites anything in it, nor does a second start of the same one: it is locked while the run lasts.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NotRequired

import yaml
from typing_extensions import TypedDict

from unisono.checkpoint.core import commit, placement
from unisono.checkpoint.remote import store_lock
from unisono.checkpoint.remote.description import ASSETS
from unisono.config import CONFIG_FILE, environment, fingerprint
from unisono.config.code import foreign_run, own_runs
from unisono.config.resolved_run import RESOLVED_FILE, ResolvedRun
from unisono.config.schema.run import RunConfig
from unisono.launch.resolving.preflight import DataFacts
from unisono.runtime.errors import RunError
from unisono.runtime.files import TEMPORARY_SUFFIX, write_whole, write_with_backup
from unisono.runtime.untrusted import safe_paths, safe_writing
from unisono.runtime.untrusted.shapes import Count, Object
from unisono.supervise import run_lock
from unisono.task import Task
from unisono.task_config import resolve_engine

FINGERPRINT = "fingerprint.json"
CERTIFICATE = "certificate.json"  # of a proof, which may precede the run and leave half a file if it is killed
FILES = "files.json"  # files of the sources; separate from the facts, which go to trackers, since there can be many


def with_name(config: RunConfig, job: str | None = None) -> RunConfig:
    """Return the configuration with a run name: its own, or one made from the recipe and the job id or the time."""
    if config.run.name is not None:
        return config
    stem = Path(config.recipe.split(":")[0]).stem
    name = f"{stem}-{f'job{job}' if job else time.strftime('%Y%m%d-%H%M%S')}"
    free = next(n for n in (name, *(f"{name}-{i}" for i in range(2, 1000))) if job or not (config.run.dir / n).exists())
    return config.model_copy(update={"run": config.run.model_copy(update={"name": free})})


def refuse_unusable(config: RunConfig) -> None:
    """Refuse a directory that cannot be used, without touching it.

    Raises:
        RunError: If it is not writable, holds something else, or holds a run that must not be resumed.
    """
    folder = run_path(config)
    try:
        existing = next(parent for parent in (folder, *folder.resolve().parents) if parent.exists())
    except (OSError, RuntimeError) as error:  # a name that is too long, or a loop of links
        reason = error.strerror if isinstance(error, OSError) else "its symbolic links form a loop"
        raise RunError(f"{folder} cannot be a directory: {reason}; choose another run.dir or run.name") from error
    _try_to_write(folder, existing, "run.dir")
    harmless = {run_lock.FOLDER, CERTIFICATE, store_lock.LOCAL_FILE}
    if (target := placement.find_target(config)) is not None and placement.leads_to(folder / placement.NAME, target):
        harmless.add(placement.NAME)
    inside = [path.name for path in folder.iterdir() if path.suffix != TEMPORARY_SUFFIX] if folder.exists() else []
    if set(inside) - harmless and not (folder / CONFIG_FILE).is_file():
        raise RunError(f"{folder} is not empty and is not a run directory (no config.yaml); choose another run.name")
    if config.run.resume == "never" and (folder / CONFIG_FILE).is_file():
        raise RunError(
            f"{folder} already holds a run, and run.resume=never; choose another run.name, or set run.resume=auto"
        )
    placement.refuse_elsewhere(config, folder)
    if target is not None:
        _try_to_write(target, next(place for place in (target, *target.parents) if place.exists()), "checkpoint.folder")
    for name in config.observe.trackers:  # which write into the folder of their name, from a thread of their own
        if os.path.lexists(path := folder / name) and (path.is_symlink() or not path.is_dir()):
            raise RunError(
                f"{path} is {safe_paths.describe_kind(path.lstat().st_mode)}, where observe.trackers={name} has its "
                "folder, and nothing is written through it; move it away"
            )
    _refuse_case_collision(config)


def _try_to_write(folder: Path, existing: Path, key: str) -> None:
    """Create a file, which has no name and is gone at once, in what exists already of a folder's path."""
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise RunError(f"{folder}: {existing} cannot be written to ({error.strerror}); choose another {key}") from error


def _refuse_case_collision(config: RunConfig) -> None:
    """Refuse the folder `Run` for the run `run` if the file system does not distinguish them."""
    folder = run_path(config)
    if not (folder / CONFIG_FILE).is_file() or not ignores_case(folder):
        return
    there = str(foreign_run.read_values(folder / CONFIG_FILE)["run"]["name"])
    if there != config.run.name and there.casefold() == str(config.run.name).casefold():
        raise RunError(
            f"{folder} already holds the run {there!r}: this file system ignores upper and lower case. "
            f"Choose another run.name, or resume that run with run.name={there}"
        )


def ignores_case(path: Path) -> bool:
    """Whether the file system ignores case: the path also exists with its case swapped, but is listed only once.

    Inode numbers prove nothing: FUSE gives one to each of the names.
    """
    other = path.with_name(path.name.swapcase())
    return other.exists() and other.name not in {name.name for name in path.parent.iterdir()}


def claim_directory(config: RunConfig) -> RunConfig:
    """Return the configuration with a name that no other start can have taken; the folder is created here."""
    while True:
        try:
            run_path(config).mkdir(parents=True)
        except FileExistsError:  # another start in the same second
            config = with_name(config.model_copy(update={"run": config.run.model_copy(update={"name": None})}))
        except OSError as error:
            raise _unwritable_error(run_path(config), error) from error
        else:
            return config


@contextmanager
def hold_run(config: RunConfig) -> Iterator[None]:
    """Hold the folder of a named run, with a place for its checkpoints.

    Raises:
        RunError: As for `hold_directory`; if its checkpoints lie where they must not.
    """
    folder = run_path(config)
    placement.refuse_elsewhere(config, folder)  # before anything in it is removed or fetched
    with hold_directory(folder):
        try:
            placement.place(config, folder)
        except OSError as error:
            raise _unwritable_error(config.checkpoint.folder or folder, error, "checkpoint.folder") from error
        yield


@contextmanager
def hold_directory(folder: Path) -> Iterator[None]:
    """Create a folder and lock it against other starts, on this host and on others.

    Raises:
        RunError: Naming the process that holds it.
    """
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            taken = stack.enter_context(run_lock.hold_lock(folder))
            if taken.seized:  # the last owner can no longer finish what it was writing, even if it wakes up
                commit.remove_leftovers(folder / placement.NAME)
        except OSError as error:
            raise _unwritable_error(folder, error) from error
        yield


def write_run(run: ResolvedRun, data: DataFacts, task: Task) -> None:
    """Write the run's configuration, the facts and files of its data, the task's assets, and the resolved run.

    Raises:
        RunError: If they cannot be written.
    """
    folder, config = run.directory, run.config
    write_config(run)  # first, since it makes the directory a run
    try:
        assets = safe_writing.make_folder(folder, ASSETS)
        safe_writing.check_contents(assets)
        task.save_assets(assets)
        described = {
            "mathematics": fingerprint.config_digest(config),
            "data": data.facts,
            "versions": environment.library_versions(resolve_engine(config)),
            "host": platform.node(),
        }
        # The files come first, because the fingerprint's presence implies them.
        write_whole(folder / FILES, json.dumps(data.files, indent=1) + "\n")
        write_whole(folder / FINGERPRINT, json.dumps(described, indent=1) + "\n")
    except OSError as error:
        raise _unwritable_error(folder, error) from error


def write_config(run: ResolvedRun) -> None:
    """Write the run's configuration, for people and the next start, and the resolved run, for its processes.

    Raises:
        RunError: If they cannot be written.
    """
    values = run.plain()
    try:
        write_with_backup(run.directory / CONFIG_FILE, yaml.safe_dump(values["config"], sort_keys=False))
        own_runs.mark_run(run.directory, values["config"])
        write_whole(run.directory / RESOLVED_FILE, json.dumps(values, indent=1) + "\n")
    except OSError as error:
        raise _unwritable_error(run.directory, error) from error


def refuse_other_data(folder: Path, data: DataFacts) -> None:
    """Refuse data that differ from those of the existing run.

    Raises:
        RunError: Naming the files that have changed, and the facts that differ.
    """
    from unisono.data.sources.change_detection import find_change

    facts, files = data.facts, data.files
    if not (folder / FINGERPRINT).is_file():
        return
    before = _read_record(folder, FINGERPRINT, _Fingerprint)["data"]
    known = [name for name in ("rows", "sources", "fingerprint") if name in before and name in facts]
    if all(before[name] == facts[name] for name in known):  # a different number of rows means a different order
        return
    differing = "; ".join(
        f"{name} was {before.get(name)} and is {value}" for name, value in facts.items() if before.get(name) != value
    )
    were = _read_record(folder, FILES, dict[str, list[_DataFile]]) if (folder / FILES).is_file() else {}
    changed = [
        (f"of source '{name}', " if name else "") + what
        for name in sorted(were.keys() & files.keys())
        if (what := find_change(were[name], files[name]))
    ]
    raise RunError(
        f"{folder} was trained on different data: {'; '.join([*changed, differing])}. Restore the data, or choose "
        "another run.name"
    )


class _Fingerprint(TypedDict):
    data: Object


class _DataFile(TypedDict):
    name: str
    rows: NotRequired[Count]
    size: NotRequired[Count]
    digest: NotRequired[str]
    stamp: NotRequired[str]


def _read_record(folder: Path, name: str, shape: Any) -> Any:
    """What an earlier start wrote of its data.

    Raises:
        RunError: If it is damaged.
    """
    try:
        return safe_paths.read_json(folder, name, shape)
    except (OSError, ValueError) as error:
        raise RunError(
            f"{folder / name} cannot be read: {getattr(error, 'strerror', None) or error}; restore it, or choose "
            "another run.name"
        ) from error


def run_path(config: RunConfig) -> Path:
    """Return the directory of a named run."""
    assert config.run.name is not None
    return config.run.dir / config.run.name


def _unwritable_error(folder: Path, error: OSError, key: str = "run.dir") -> RunError:
    if isinstance(error, safe_paths.UnsafePathError):
        return RunError(str(error))
    file = f" ({error.filename})" if error.filename else ""  # an error of a descriptor names none
    return RunError(f"cannot write to {folder}: {error.strerror}{file}; choose another {key}")
