"""What may be removed from a run's folder without losing the run: leftovers, and checkpoints beyond a number.

Finding and removing are separate, so that a user sees what would be freed before anything is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unisono.checkpoint.core import commit, placement
from unisono.checkpoint.core.manifest import parse_step
from unisono.checkpoint.core.retention import Retention
from unisono.config import CONFIG_FILE, safe_yaml
from unisono.config.code import foreign_run
from unisono.config.schema.run import Checkpoint
from unisono.runtime.errors import CheckpointError, RunError
from unisono.runtime.files import TEMPORARY_SUFFIX, remove_folder

EVALUATED = ".evaluated"  # how folders of a run begin that have its weights while a program that is not ours loads them


@dataclass(frozen=True)
class Leftover:
    """Something that may be removed.

    Attributes:
        path: Of a file, or of a folder with all that is in it.
        reason: What it is.
    """

    path: Path
    reason: str


def find_leftovers(run: Path, keep: int | None = None) -> list[Leftover]:
    """Find what may be removed from a run that no process trains.

    Args:
        run: Its folder.
        keep: Number of newest checkpoints to keep; the best one and those of `checkpoint.keep_every` are kept, too.
            None keeps all.

    Raises:
        ConfigError: If its configuration cannot be read, with `keep`.
        RunError: If its checkpoints lie where a stranger's link leads.
    """
    checkpoints = run / placement.NAME
    if checkpoints.is_symlink() and not placement.is_own(run, safe_yaml.read_yaml(run / CONFIG_FILE)):
        raise RunError(
            f"{checkpoints} is a link, and nothing is removed where it leads: this run is not known to be yours, or "
            "its checkpoint.folder names another place; remove the link, or clean the folder that it leads to yourself"
        )
    found = [Leftover(path, "of an interrupted save") for path in commit.find_interrupted(checkpoints)]
    found += [Leftover(path, "a damaged checkpoint") for path in sorted(checkpoints.glob("damaged-step-*"))]
    found += [Leftover(path, "half-written") for path in sorted(run.glob(f"*{TEMPORARY_SUFFIX}"))]
    found += [Leftover(path, "weights of an evaluation that was killed") for path in sorted(run.glob(f"{EVALUATED}*"))]
    found += [Leftover(path, "repeated steps that differed (unisono replay)") for path in sorted(run.glob("replays"))]
    if keep is not None:
        found += [Leftover(path, "an older checkpoint") for path in _older_checkpoints(run, keep)]
    return found


def _older_checkpoints(run: Path, keep: int) -> Iterator[Path]:
    settings = Checkpoint.model_validate(foreign_run.read_values(run / CONFIG_FILE)["checkpoint"])
    retention = Retention.from_settings(settings.model_copy(update={"keep": keep}))
    known = {}
    for path in commit.find_checkpoints(run / placement.NAME):
        with suppress(CheckpointError):  # a damaged one neither counts nor is removed
            known[parse_step(path.name)] = path, commit.read_manifest(path).metric
    if known:
        metrics = {step: metric for step, (_, metric) in known.items()}
        yield from (known[step][0] for step in retention.find_removable(max(known), metrics))


def remove(leftover: Leftover) -> None:
    """Remove a leftover; of a link only the link.

    Raises:
        RunError: If it cannot be removed.
    """
    try:
        remove_folder(leftover.path)
    except OSError as error:
        raise RunError(f"{leftover.path} cannot be removed: {error.strerror}; remove it yourself") from error
