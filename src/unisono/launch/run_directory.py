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

import yaml

from unisono.checkpoint.core import commit
from unisono.checkpoint.remote import store_lock
from unisono.config import environment, fingerprint, foreign_run
from unisono.config.resolved_run import RESOLVED_FILE, ResolvedRun
from unisono.config.schema.run import RunConfig
from unisono.launch.preflight import DataFacts
from unisono.runtime import safe_paths
from unisono.runtime.errors import RunError
from unisono.runtime.files import TEMPORARY_SUFFIX, write_whole, write_with_backup
from unisono.supervise import run_lock
from unisono.task import Task
from unisono.task_config import resolve_engine

FINGERPRINT = "fingerprint.json"
CERTIFICATE = "certificate.json"  # of a proof, which may come before the run and leave half a file if it is killed
FILES = "files.json"  # of the sources; beside the facts, which trackers are given, for there can be many


def with_name(config: RunConfig, job: str | None = None) -> RunConfig:
    """The configuration with a name for its run: its own, or one from the recipe and the job or the time."""
    if config.run.name is not None:
        return config
    stem = Path(config.recipe.split(":")[0]).stem
    name = f"{stem}-{f'job{job}' if job else time.strftime('%Y%m%d-%H%M%S')}"
    free = next(n for n in (name, *(f"{name}-{i}" for i in range(2, 1000))) if job or not (config.run.dir / n).exists())
    return config.model_copy(update={"run": config.run.model_copy(update={"name": free})})


def refuse_unusable(config: RunConfig) -> None:
    """Refuse a directory that cannot be used, without touching it.

    Raises:
        RunError: if it is not writable, holds something else, or a run that must not be resumed.
    """
    folder = run_path(config)
    try:
        existing = next(parent for parent in (folder, *folder.resolve().parents) if parent.exists())
    except (OSError, RuntimeError) as error:  # a name that is too long, or links in a circle
        reason = error.strerror if isinstance(error, OSError) else "its symbolic links form a loop"
        raise RunError(f"{folder} cannot be a directory: {reason}; choose another run.dir or run.name") from error
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise RunError(
            f"{folder}: {existing} cannot be written to ({error.strerror}); choose another run.dir"
        ) from error
    harmless = {run_lock.FOLDER, CERTIFICATE, store_lock.LOCAL_FILE}
    inside = [path.name for path in folder.iterdir() if path.suffix != TEMPORARY_SUFFIX] if folder.exists() else []
    if set(inside) - harmless and not (folder / "config.yaml").is_file():
        raise RunError(f"{folder} is not empty and is not a run directory (no config.yaml); choose another run.name")
    if config.run.resume == "never" and (folder / "config.yaml").is_file():
        raise RunError(
            f"{folder} already holds a run, and run.resume=never; choose another run.name, or set run.resume=auto"
        )
    _refuse_case_collision(config)


def _refuse_case_collision(config: RunConfig) -> None:
    """Refuse the folder of `Run` for `run`, where the file system takes both names for one.

    Raises:
        RunError: naming the run that lies there.
    """
    folder = run_path(config)
    if not (folder / "config.yaml").is_file() or not ignores_case(folder):
        return
    there = str(foreign_run.read_values(folder / "config.yaml")["run"]["name"])
    if there != config.run.name and there.casefold() == str(config.run.name).casefold():
        raise RunError(
            f"{folder} already holds the run {there!r}: this file system ignores upper and lower case. "
            f"Choose another run.name, or resume that run with run.name={there}"
        )


def ignores_case(path: Path) -> bool:
    """Whether the file system knows a path by another name too, which differs in large and small letters alone.

    Where it does, what is there is listed once. The number of a file says nothing: FUSE gives one to each of its names.
    """
    other = path.with_name(path.name.swapcase())
    return other.exists() and other.name not in {name.name for name in path.parent.iterdir()}


def claim_directory(config: RunConfig) -> RunConfig:
    """The same configuration with a name that no other start can have taken: the folder is made here."""
    while True:
        try:
            run_path(config).mkdir(parents=True)
        except FileExistsError:  # a start in the same second
            config = with_name(config.model_copy(update={"run": config.run.model_copy(update={"name": None})}))
        except OSError as error:
            raise _unwritable_error(run_path(config), error) from error
        else:
            return config


@contextmanager
def hold_directory(folder: Path) -> Iterator[None]:
    """Make a folder and hold it against other starts, on this host and on others.

    Raises:
        RunError: naming the process that holds it.
    """
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            taken = stack.enter_context(run_lock.hold_lock(folder))
            if taken.seized:  # what its last owner was writing can be finished by nobody, not even if it wakes up
                commit.remove_leftovers(folder / "checkpoints")
        except OSError as error:
            raise _unwritable_error(folder, error) from error
        yield


def write_run(run: ResolvedRun, data: DataFacts, task: Task) -> None:
    """Write what the run is: its configuration, facts and files of its data, the task's assets, what was resolved.

    Raises:
        RunError: if it cannot be written.
    """
    folder, config = run.directory, run.config
    write_config(run)  # first, as it makes the directory a run
    try:
        (folder / "assets").mkdir(exist_ok=True)
        task.save_assets(folder / "assets")
        described = {
            "mathematics": fingerprint.config_digest(config),
            "data": data.facts,
            "versions": environment.library_versions(resolve_engine(config)),
            "host": platform.node(),
        }
        # The files first, as the other one is looked for.
        write_whole(folder / FILES, json.dumps(data.files, indent=1) + "\n")
        write_whole(folder / FINGERPRINT, json.dumps(described, indent=1) + "\n")
    except OSError as error:
        raise _unwritable_error(folder, error) from error


def write_config(run: ResolvedRun) -> None:
    """Write the configuration of a run, for people and the next start, and what was resolved, for its processes.

    Raises:
        RunError: if it cannot be written.
    """
    values = run.plain()
    try:
        write_with_backup(run.directory / "config.yaml", yaml.safe_dump(values["config"], sort_keys=False))
        write_whole(run.directory / RESOLVED_FILE, json.dumps(values, indent=1) + "\n")
    except OSError as error:
        raise _unwritable_error(run.directory, error) from error


def refuse_other_data(folder: Path, data: DataFacts) -> None:
    """Refuse data that are not those of the run that lies there.

    Raises:
        RunError: naming the files that have changed, and the facts that differ.
    """
    from unisono.data.sources.change_detection import find_change

    facts, files = data.facts, data.files
    if not (folder / FINGERPRINT).is_file():
        return
    before = safe_paths.read_json(folder, FINGERPRINT)["data"]
    known = [name for name in ("rows", "sources", "fingerprint") if name in before and name in facts]
    if all(before[name] == facts[name] for name in known):  # another number of rows is another order
        return
    differing = "; ".join(
        f"{name} was {before.get(name)} and is {value}" for name, value in facts.items() if before.get(name) != value
    )
    were = safe_paths.read_json(folder, FILES) if (folder / FILES).is_file() else {}
    changed = [
        (f"of source '{name}', " if name else "") + what
        for name in sorted(were.keys() & files.keys())
        if (what := find_change(were[name], files[name]))
    ]
    raise RunError(
        f"{folder} was trained on different data: {'; '.join([*changed, differing])}. Restore the data, or choose "
        "another run.name"
    )


def run_path(config: RunConfig) -> Path:
    """Where a named run lies."""
    assert config.run.name is not None
    return config.run.dir / config.run.name


def _unwritable_error(folder: Path, error: OSError) -> RunError:
    return RunError(f"cannot write to {folder}: {error.strerror} ({error.filename}); choose another run.dir")
