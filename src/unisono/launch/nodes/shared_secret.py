"""A secret shared by one user's processes through a folder on a file system that all their hosts see.

The first process creates a file that only this user may read, and the others look for it there. A file that belongs to
another user, or that others could read, is ignored.
"""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from unisono.runtime import safe_paths
from unisono.runtime.errors import RunError

_MAX_BYTES = 1 << 12


def secret_path(folder: Path, about: str) -> Path:
    """Return the path of a secret for some purpose, e.g. the rendezvous of a job."""
    return folder / f".unisono-{sha256(about.encode()).hexdigest()[:16]}.secret"


def write_secret(path: Path, values: dict[str, Any]) -> None:
    """Create the file, replacing an earlier one.

    Raises:
        RunError: If it cannot be created such that only this user can read it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            path.unlink()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
            if not _is_private(os.fstat(file.fileno())):
                path.unlink(missing_ok=True)
                raise RunError(f"{path.parent}: other users could read a file that is created there for this user only")
            file.write(json.dumps(values))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RunError(f"cannot create {path}: {error.strerror or error}") from error


def read_secret(path: Path) -> dict[str, Any] | None:
    """Return the file's content; None if it is missing, or not owned by this user and readable only by them."""
    with suppress(OSError, ValueError):
        list(path.parent.iterdir())  # makes a network file system refresh its directory cache
        with safe_paths.open_inside(path.parent, path.name) as file:
            if _is_private(os.fstat(file.fileno())):
                found = safe_paths.parse_json(safe_paths.read_limited(file, str(path), _MAX_BYTES))
                return found if isinstance(found, dict) else None
    return None


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
