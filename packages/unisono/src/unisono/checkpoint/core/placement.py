"""Where a run's checkpoints lie: in its folder, or in one of `checkpoint.folder`, to which a link leads from there.

A link in a folder of somebody else could lead anywhere, also into a run of the user's, whose checkpoints would be
removed; and who unpacks such a folder owns the link. So a link is followed only to the place that the configuration
names, which the user has typed, or which is that of a run of their own.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from unisono.config.code import own_runs
from unisono.config.schema.run import RunConfig
from unisono.runtime.errors import RunError
from unisono.runtime.text import one_line
from unisono.runtime.untrusted import safe_paths

NAME = "checkpoints"


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
        if not os.path.lexists(saved):
            if os.path.lexists(target):  # an empty one may be of another run, before its first save
                raise _taken_error(target, run)
            return
        if leads_to(saved, target):
            return
        if saved.is_dir() and not saved.is_symlink():
            raise RunError(
                f"{saved} is a folder, and checkpoint.folder names {target}: move it there, and put a link in its "
                f"place: {shlex.join(['mv', str(saved), str(target)])} && "
                f"{shlex.join(['ln', '-s', str(target), str(saved)])}"
            )
    if os.path.lexists(saved) and (saved.is_symlink() or not saved.is_dir()):
        kind, named = safe_paths.describe_kind(saved.lstat().st_mode), ""
        with suppress(OSError):
            named = f" to {one_line(saved.readlink())}"
        raise RunError(
            f"{saved} is {kind}{named}, and a run writes only into folders of its own. Move it away; to keep "
            f"checkpoints on another disk, set checkpoint.folder=DIR, and a link to DIR/{run.name} is followed, or made"
        )


def place(config: RunConfig, run: Path) -> None:
    """Make the folder elsewhere, and the link that leads to it, once `refuse_elsewhere` has allowed it.

    Raises:
        RunError: If a run of the same name, in another `run.dir`, has made the folder meanwhile.
        OSError: If they cannot be made.
    """
    if (target := find_target(config)) is None:
        return
    is_linked = os.path.lexists(run / NAME)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.mkdir(exist_ok=is_linked)
    except FileExistsError:
        raise _taken_error(target, run) from None
    if not is_linked:
        (run / NAME).symlink_to(target, target_is_directory=True)


def _taken_error(target: Path, run: Path) -> RunError:
    return RunError(
        f"{target} exists already, and {run} has no link to it, so the checkpoints in it are another run's; choose "
        f"another run.name or checkpoint.folder. If it is left over, remove it; if it is this run's: "
        f"{shlex.join(['ln', '-s', str(target), str(run / NAME)])}"
    )


def is_own(run: Path, values: Mapping[str, Any]) -> bool:
    """Whether the link in a run's folder leads where this user has told a run of their own to keep checkpoints.

    Args:
        run: Its folder.
        values: Of its `config.yaml`.
    """
    if own_runs.why_not_own(run, values) is not None:  # first: only the values of an own run have been validated
        return False
    elsewhere = (values.get("checkpoint") or {}).get("folder")
    return elsewhere is not None and leads_to(run / NAME, Path(elsewhere) / run.absolute().name)


def leads_to(link: Path, target: Path) -> bool:
    """Whether a link leads to a folder, which must itself be no link in its last part."""
    try:
        return link.is_symlink() and not target.is_symlink() and link.resolve() == target.resolve()
    except (OSError, RuntimeError):  # a loop of links
        return False
