"""Whose a place in a store is: one run's, and of that run one process's at a time.

`owner.json` says which run writes there (an id that is made with the run and kept in its folder), and which start of it
wrote last. A process that wants to write the last object of a checkpoint reads it before: another start's name there
means that the run went on elsewhere, and this one writes no more. `alive.json` has a number that the writing process
raises every few seconds, so that a start elsewhere can see whether it still lives without comparing clocks.
"""

from __future__ import annotations

import json
import os
import platform
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.checkpoint.remote.object_store import Store
from unisono.runtime.errors import RunError
from unisono.runtime.files import write_whole

KEPT = "upload.json"  # in the run's folder: the run's id, and the start that writes
OWNER, ALIVE = "owner.json", "alive.json"
BEAT = 5.0  # seconds from one sign of life to the next
PATIENCE = 20.0  # seconds without one after which a process elsewhere counts as gone


def read(store: Store) -> dict[str, Any] | None:
    """What a store says of its owner, or None if it has none.

    Raises:
        RunError: if the object is there and says something else.
    """
    content = store.get(OWNER)
    if content is None:
        return None
    try:
        found = json.loads(content)
        return {name: str(found[name]) for name in ("run", "start", "host", "process", "folder")}
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{store.at(OWNER)} is no owner of a run ({error}); look whose it is, and choose another run.name or "
            "checkpoint.upload.url"
        ) from error


def kept(folder: Path) -> dict[str, Any]:
    """What a run's folder says of its place in the store; empty if it never had one."""
    try:
        found: dict[str, Any] = json.loads((folder / KEPT).read_text(encoding="utf-8"))
        return found
    except (OSError, ValueError):
        return {}


def refuse(store: Store, folder: Path, fresh: bool, patience: float | None = None) -> dict[str, Any] | None:
    """Refuse a place of another run, or of this run where it is still trained elsewhere; nothing is written.

    Args:
        store: of the run.
        folder: of the run, which must be held by this process.
        fresh: whether the folder holds nothing of a run, so that it may become a copy of the one in the store.
        patience: seconds to wait for a sign of life of a process elsewhere, if not `PATIENCE`.

    Returns:
        The owner so far, or None.

    Raises:
        RunError: with the owner's facts.
    """
    there, here = read(store), kept(folder)
    if there is None:
        return None
    if here.get("run") != there["run"] and not (fresh and not here):
        raise RunError(
            f"{store.url} belongs to another run: {_told(there)}. Choose another run.name or checkpoint.upload.url"
        )
    # The folder is locked, so a start that was named in it has ended.
    if here.get("start") != there["start"] and _lives(store, PATIENCE if patience is None else patience):
        raise RunError(
            f"{store.url} is being written by a run that is still trained elsewhere: {_told(there)}. End it there, or "
            "choose another run.name or checkpoint.upload.url"
        )
    return there


def adopt(folder: Path, there: Mapping[str, Any]) -> None:
    """Make a folder without a past that of the run that a store belongs to."""
    write_whole(folder / KEPT, json.dumps({"run": there["run"]}, indent=1) + "\n")


def claim(store: Store, folder: Path) -> None:
    """Write this start's name into the folder and into the store.

    Raises:
        RunError: if another run was there first.
    """
    there, here = read(store), kept(folder)
    run = here.get("run") or (there["run"] if there else uuid.uuid4().hex)
    mine = {
        "run": run,
        "start": uuid.uuid4().hex,
        "host": platform.node(),
        "process": str(os.getpid()),
        "folder": str(folder.resolve()),
    }
    content = json.dumps(mine, indent=1).encode()
    if there is None:
        store.create(OWNER, content)
    elif there["run"] == run:
        store.put(OWNER, content)
    there = read(store)
    if there is None or there["start"] != mine["start"]:
        raise RunError(
            f"{store.url} was taken by another run in this moment: {_told(there or mine)}. Choose another run.name or "
            "checkpoint.upload.url"
        )
    beat(store, mine["start"], 0)
    write_whole(folder / KEPT, json.dumps(mine, indent=1) + "\n", lasting=True)


def taken_over(store: Store, start: str) -> str | None:
    """Who writes there now in place of a start, or None while it is that start."""
    there = read(store)
    if there is None:
        return "nobody: the object that says whose it is has gone"
    return None if there["start"] == start else _told(there)


def beat(store: Store, start: str, number: int | None) -> None:
    """Give a sign of life; None says that there will be no more."""
    store.put(ALIVE, json.dumps({"start": start, "number": number}).encode())


def _lives(store: Store, patience: float) -> bool:
    """Whether signs of life still come, watched for a while unless the last one was the last."""
    first = store.get(ALIVE)
    if first is None or _number(first) is None:
        return False
    end = time.monotonic() + patience
    while time.monotonic() < end:
        time.sleep(min(1.0, patience / 4))
        if store.get(ALIVE) != first:
            return True
    return False


def _number(content: bytes) -> int | None:
    try:
        found = json.loads(content)["number"]
        return found if isinstance(found, int) else None
    except (ValueError, KeyError, TypeError):
        return 0  # torn or of a later format: watched, to be sure


def _told(owner: Mapping[str, Any]) -> str:
    return f"process {owner['process']} on {owner['host']} wrote it from {owner['folder']}"
