"""The lock on a run's prefix in a store: it belongs to one run, and to one process of that run at a time.

`owner.json` contains the id of the run that writes there (created with the run and kept in its folder), and the start
that wrote last. A process reads it before writing the last object of a checkpoint: if it names another start, the run
has continued elsewhere, and this process stops writing. `alive.json` has a number that the writing process increments
every few seconds, so that a start elsewhere can tell whether it is alive without comparing clocks.
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

from typing_extensions import TypedDict

from unisono.checkpoint.remote.object_store import ObjectStore
from unisono.runtime.errors import RunError
from unisono.runtime.files import write_whole
from unisono.runtime.text import one_line
from unisono.runtime.untrusted import safe_paths
from unisono.runtime.untrusted.shapes import Integer

LOCAL_FILE = "upload.json"  # in the run's folder: the run's id, and the start that writes
OWNER, ALIVE = "owner.json", "alive.json"
HEARTBEAT_SECONDS = 5.0  # seconds between heartbeats
HEARTBEAT_TIMEOUT = 20.0  # seconds without a heartbeat after which a process elsewhere counts as dead


class _Owner(TypedDict):
    run: str
    start: str
    host: str
    process: str
    folder: str


class _Heartbeat(TypedDict):
    number: Integer | None


def read_owner(store: ObjectStore) -> dict[str, Any] | None:
    """Read a store's owner record; None if it has none.

    Raises:
        RunError: if the object exists but is not an owner record.
    """
    content = store.get(OWNER)
    if content is None:
        return None
    try:
        found: dict[str, Any] = safe_paths.parse_json(content, _Owner)
        return {name: one_line(found[name], 1000) for name in _Owner.__annotations__}
    except ValueError as error:
        raise RunError(
            f"{store.url_of(OWNER)} is not a valid owner record ({error}); find out who wrote it, or choose another "
            "run.name or checkpoint.upload.url"
        ) from error


def read_local(folder: Path) -> dict[str, Any]:
    """Read the folder's record of its store; empty if it never had one."""
    try:
        found: dict[str, Any] = safe_paths.read_json(folder, LOCAL_FILE, dict[str, str])
        return found
    except (OSError, ValueError):
        return {}


def check_owner(store: ObjectStore, folder: Path, fresh: bool) -> dict[str, Any] | None:
    """Raise if the store belongs to another run, or to this run while it still trains elsewhere; writes nothing.

    Args:
        store: of the run.
        folder: of the run; must be locked by this process.
        fresh: whether the folder has no run yet, so that it may become a copy of the one in the store.

    Returns:
        The current owner, or None.

    Raises:
        RunError: with the owner's facts.
    """
    there, here = read_owner(store), read_local(folder)
    if there is None:
        return None
    if here.get("run") != there["run"] and not (fresh and not here):
        raise RunError(
            f"{store.url} belongs to another run: {_format_owner(there)}. Choose another run.name or "
            "checkpoint.upload.url"
        )
    # The folder is locked, so the start named in it has ended.
    if here.get("start") != there["start"] and _is_alive(store):
        raise RunError(
            f"{store.url} is in use by a run that still trains elsewhere: {_format_owner(there)}. Stop it there, or "
            "choose another run.name or checkpoint.upload.url"
        )
    return there


def adopt(folder: Path, there: Mapping[str, Any]) -> None:
    """Make a new folder belong to the run that owns the store."""
    write_whole(folder / LOCAL_FILE, json.dumps({"run": there["run"]}, indent=1) + "\n")


def claim(store: ObjectStore, folder: Path) -> None:
    """Write this start's name into the folder and into the store.

    Raises:
        RunError: if another run has claimed it first.
    """
    there, here = read_owner(store), read_local(folder)
    run = here.get("run") or (there["run"] if there else uuid.uuid4().hex)
    mine = {
        "run": run, "start": uuid.uuid4().hex, "host": platform.node(), "process": str(os.getpid()),
        "folder": str(folder.resolve()),
    }  # fmt: skip
    content = json.dumps(mine, indent=1).encode()
    if there is None:
        store.create(OWNER, content)
    elif there["run"] == run:
        store.put(OWNER, content)
    there = read_owner(store)
    if there is None or there["start"] != mine["start"]:
        raise RunError(
            f"{store.url} was just claimed by another run: {_format_owner(there or mine)}. Choose another run.name or "
            "checkpoint.upload.url"
        )
    write_heartbeat(store, mine["start"], 0)
    write_whole(folder / LOCAL_FILE, json.dumps(mine, indent=1) + "\n", lasting=True)


def find_new_owner(store: ObjectStore, start: str) -> str | None:
    """The owner that replaced a start, or None while it is still that start."""
    there = read_owner(store)
    if there is None:
        return "nobody: the owner record is missing"
    return None if there["start"] == start else _format_owner(there)


def write_heartbeat(store: ObjectStore, start: str, number: int | None) -> None:
    """Write a heartbeat; None announces that no more will follow."""
    store.put(ALIVE, json.dumps({"start": start, "number": number}).encode())


def _is_alive(store: ObjectStore) -> bool:
    """Whether heartbeats still arrive; waits for one unless the last one announced the end."""
    first = store.get(ALIVE)
    if first is None or _parse_heartbeat(first) is None:
        return False
    end = time.monotonic() + HEARTBEAT_TIMEOUT
    while time.monotonic() < end:
        time.sleep(min(1.0, HEARTBEAT_TIMEOUT / 4))
        if store.get(ALIVE) != first:
            return True
    return False


def _parse_heartbeat(content: bytes) -> int | None:
    try:
        number: int | None = safe_paths.parse_json(content, _Heartbeat)["number"]
        return number
    except ValueError:
        return 0  # torn, or from a later version: treat it as alive


def _format_owner(owner: Mapping[str, Any]) -> str:
    return f"process {owner['process']} on {owner['host']} wrote it from {owner['folder']}"
