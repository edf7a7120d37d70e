"""Verifies a run's assets (the files written by its task) against the digests in a checkpoint's manifest.

A tokenizer or a `config.json` determines what the arrays mean, so changing, adding or losing one yields a different
model. They are not checked on resume: the task writes its files again, and the next checkpoint has their digests.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from unisono.checkpoint.core.manifest import Checkpoint
from unisono.checkpoint.remote import description
from unisono.checkpoint.remote.description import ASSETS
from unisono.runtime.errors import CheckpointError
from unisono.runtime.text import one_line
from unisono.runtime.untrusted import safe_paths


def digests(run: Path) -> dict[str, str]:
    """SHA-256 of every asset of a run by name, limited to the data files that are also uploaded to a store."""
    names = [name.removeprefix(f"{ASSETS}/") for name in description.files(run) if name.startswith(f"{ASSETS}/")]
    found = {}
    for name in sorted(names):
        with safe_paths.open_inside(run / ASSETS, name) as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def check(checkpoint: Checkpoint, run: Path) -> None:
    """Raise if the assets differ from those with which a checkpoint was written.

    Args:
        checkpoint: its manifest. Checkpoints without digests, from older versions, are not checked.
        run: the run directory, which contains the assets.

    Raises:
        CheckpointError: naming the first file that differs.
    """
    if checkpoint.assets is None:
        return
    try:
        there = digests(run)
    except OSError as error:
        raise CheckpointError(f"the assets of {run} cannot be read: {one_line(error)}") from error
    written = checkpoint.assets
    for name in sorted(written.keys() | there.keys()):
        if written.get(name) == there.get(name):
            continue
        how = "is missing, but existed when" if name not in there else "has changed since"
        how = "did not exist when" if name not in written else how
        raise CheckpointError(
            f"{run / ASSETS / one_line(name)} {how} {checkpoint.path.name} was written, so its arrays would be "
            "interpreted as another model. Restore the original assets; if the run is yours and was started again "
            "since, resume it: its next checkpoint will match the current assets"
        )
