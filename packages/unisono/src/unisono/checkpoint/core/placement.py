"""Where a run's checkpoints lie: in its folder, or in one of `checkpoint.folder`, to which a link leads from there.

A link in a folder of somebody else could lead anywhere, also into a run of the user's, whose checkpoints would be
removed; and who unpacks such a folder owns the link. So a link is followed only to the place that the configuration
names, which the user has typed, or which is that of a run of their own. A place belongs to one run, which `owner.json`
in it names, since a copy of a run's folder has the same link.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from unisono.config.code import own_runs
from unisono.config.schema.run import RunConfig
from unisono.runtime.errors import RunError
from unisono.runtime.files import wrap_record_errors, write_all, write_whole
from unisono.runtime.text import one_line
from unisono.runtime.untrusted import safe_paths
from unisono.runtime.untrusted.shapes import Count

NAME = "checkpoints"
SAVED_FILE = "saved.json"  # in a run's folder, from its first checkpoint on
_OWNER_FILE = "owner.json"  # in a folder elsewhere
_REMEDY = "choose another run.name or checkpoint.folder"


class _Owner(TypedDict):
    run: str


class _Saved(TypedDict):
    first_step: Count


def find_target(config: RunConfig) -> Path | None:
    """Return the folder elsewhere in which a named run's checkpoints lie; None if they lie in the run's own."""
    elsewhere = config.checkpoint.folder
    return None if elsewhere is None else elsewhere / str(config.run.name)


def refuse_elsewhere(config: RunConfig, run: Path) -> None:
    """Refuse a run whose checkpoints lie elsewhere than its configuration says, without touching anything.

    Raises:
        RunError: With the setting that allows it, or the way out.
    """
    saved, target = run / NAME, find_target(config)
    if target is not None:
        if not config.launch.shared_folder:
            raise RunError(
                "checkpoint.folder names one folder for all nodes, and with launch.shared_folder=false each has its "
                "own; leave it out, and give each node a run.dir on the disk that is meant"
            )
        here, there = _resolve(run), _resolve(target)
        if here.is_relative_to(there) or there.is_relative_to(here):
            raise RunError(
                f"checkpoint.folder={config.checkpoint.folder} would put the checkpoints into {target}, and the run "
                f"itself lies in {run}; leave it out, or choose a folder apart from run.dir"
            )
        if other := _find_other_owner(run, target):
            raise RunError(
                f"{target} has the checkpoints of the run {one_line(other)}, and {run} is another one (perhaps a copy "
                f"of it, with the same link). {_REMEDY[0].upper()}{_REMEDY[1:]}, and remove {saved} if it is a link"
            )
        if not os.path.lexists(saved):
            _refuse_used(run, target)
            return
        if leads_to(saved, target):
            return
        if saved.is_dir() and not saved.is_symlink():
            raise RunError(f"{saved} is a folder, and checkpoint.folder names {target}: {_advise_move(saved, target)}")
    if os.path.lexists(saved) and (saved.is_symlink() or not saved.is_dir()):
        kind, named, way = safe_paths.describe_kind(saved.lstat().st_mode), "", ""
        with suppress(OSError):
            named = f" to {one_line(saved.readlink())}"
        if target is not None and named:
            way = (
                f". The configuration names {target}: if this run was renamed, move there what the link leads to, and "
                f"give the link its new place: {shlex.join(['ln', '-sfn', str(target), str(saved)])}"
            )
        raise RunError(
            f"{saved} is {kind}{named}, and a run writes only into folders of its own. Move it away; to keep "
            f"checkpoints on another disk, set checkpoint.folder=DIR, and a link to DIR/{run.name} is followed, or made"
            f"{way}"
        )


def _advise_move(saved: Path, target: Path) -> str:
    """How to move a run's checkpoints elsewhere; `mv` would put them into a folder that is there already."""
    commands = [["mkdir", "-p", str(target.parent)]]
    if os.path.lexists(target):
        if {path.name for path in target.iterdir()} - {_OWNER_FILE} if target.is_dir() else True:
            return f"both are there, and neither is overwritten; {_REMEDY}, or move one of them away"
        commands = [["rm", "-f", str(target / _OWNER_FILE)], ["rmdir", str(target)]]
    commands += [["mv", str(saved), str(target)], ["ln", "-s", str(target), str(saved)]]
    return f"move it there, and put a link in its place: {' && '.join(map(shlex.join, commands))}"


def _refuse_used(run: Path, target: Path) -> None:
    """Refuse a place for the checkpoints of a new run in which something is, or which somebody else has made."""
    if not os.path.lexists(target):
        return
    status = target.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise RunError(f"{target} is {safe_paths.describe_kind(status.st_mode)}, not a folder; {_REMEDY}")
    inside = {path.name for path in target.iterdir()} - {_OWNER_FILE}
    if inside:
        raise RunError(
            f"{target} exists already, and {run} is not the run whose checkpoints are there; {_REMEDY}. If it is, and "
            f"its link was lost: {shlex.join(['ln', '-s', str(target), str(run / NAME)])}"
        )
    if hasattr(os, "geteuid") and status.st_uid not in (os.geteuid(), 0):
        raise RunError(f"{target} belongs to another user, who could change the checkpoints in it; {_REMEDY}")


def place(config: RunConfig, run: Path) -> None:
    """Make the folder elsewhere, and the link that leads to it, once `refuse_elsewhere` has allowed it.

    Raises:
        OSError: If they cannot be made.
        RunError: If another run was given the same place at the same time.
    """
    if (target := find_target(config)) is None:
        return
    target.mkdir(parents=True, exist_ok=True)
    _claim(run, target)
    with suppress(FileExistsError):
        (run / NAME).symlink_to(target, target_is_directory=True)
    refuse_elsewhere(config, run)  # whoever was faster


def _claim(run: Path, target: Path) -> None:
    content = json.dumps({"run": str(_resolve(run))}) + "\n"
    try:
        descriptor = os.open(target / _OWNER_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        if _find_other_owner(run, target) is None:  # the run was moved, or is that of last time
            write_whole(target / _OWNER_FILE, content)
    else:
        try:
            write_all(descriptor, content.encode())
        finally:
            os.close(descriptor)


def _find_other_owner(run: Path, target: Path) -> str | None:
    """The folder of another run whose checkpoints lie here; None if there is none any more.

    Raises:
        RunError: If it cannot be read whose they are.
    """
    try:
        there = Path(safe_paths.read_json(target, _OWNER_FILE, _Owner)["run"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise RunError(
            f"{target / _OWNER_FILE}, which says whose checkpoints these are, cannot be read: "
            f"{getattr(error, 'strerror', None) or error}; if no other run is being started, remove it"
        ) from error
    if there == _resolve(run):
        return None
    try:
        if not leads_to(there / NAME, target):
            return None
        with suppress(FileNotFoundError):
            return None if there.samefile(run) else str(there)
    except OSError:  # it may not be looked into
        pass
    return str(there)


def is_own(run: Path, values: Mapping[str, Any]) -> bool:
    """Whether the link in a run's folder leads where this user has told this very run to keep checkpoints.

    Args:
        run: Its folder.
        values: Of its `config.yaml`.

    Raises:
        RunError: If it cannot be read whose checkpoints these are.
    """
    if own_runs.why_not_own(run, values) is not None:  # first: only the values of an own run have been validated
        return False
    elsewhere = (values.get("checkpoint") or {}).get("folder")
    if elsewhere is None:
        return False
    target = Path(elsewhere) / (run.name or run.resolve().name)
    return leads_to(run / NAME, target) and _find_other_owner(run, target) is None


def note_saved(run: Path, step: int) -> None:
    """Note in a run's folder that it has a checkpoint, if that was not noted yet.

    Raises:
        RecordError: If it cannot be written.
    """
    path = run / SAVED_FILE
    with wrap_record_errors(path), suppress(FileNotFoundError):  # the folder has gone, which the next look tells
        if not os.path.lexists(path):
            write_whole(path, json.dumps({"first_step": step}) + "\n")


def refuse_lost(run: Path) -> None:
    """Refuse a run whose checkpoints have all gone: beginning again in silence would discard its events, too.

    Raises:
        RunError: With where they were, and the ways to go on.
    """
    try:
        first = safe_paths.read_json(run, SAVED_FILE, _Saved)["first_step"]
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise RunError(
            f"{run / SAVED_FILE} cannot be read: {getattr(error, 'strerror', None) or error}; remove it if {run} never "
            "had a checkpoint"
        ) from error
    saved, where = run / NAME, ""
    if saved.is_symlink():
        with suppress(OSError):
            where = f", which leads to {one_line(saved.readlink())},"
    gone = f"does not exist on this host ({platform.node()})" if not saved.is_dir() else "has none any more"
    raise RunError(
        f"{run} has saved checkpoints since step {first}, and {saved}{where} {gone}: they were deleted, or their disk "
        "is not there. Bring them back; to begin again from step 0, choose another run.name, or remove "
        f"{run}"
    )


def _resolve(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # a loop of links, which others refuse
        return path.absolute()


def leads_to(link: Path, target: Path) -> bool:
    """Whether a link leads to a folder, which must itself be no link in its last part."""
    try:
        return link.is_symlink() and not target.is_symlink() and link.resolve() == target.resolve()
    except (OSError, RuntimeError):  # a loop of links
        return False
