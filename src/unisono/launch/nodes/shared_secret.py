"""A secret that the processes of one user share through a folder that all their hosts see, and nobody else reads.

Whoever starts first makes a file that this user alone may read, and the others look for it there. A file of another
user, or one that others could read, is nobody's secret and is passed over.
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
    """Where a secret about something lies, e.g. the rendezvous of a job."""
    return folder / f".unisono-{sha256(about.encode()).hexdigest()[:16]}.secret"


def write_secret(path: Path, values: dict[str, Any]) -> None:
    """Make the file, in place of an earlier one.

    Raises:
        RunError: if it cannot be made, or not so that this user alone can read it.
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
    """What the file says; None where there is none, or none that only this user could have made and read."""
    with suppress(OSError, ValueError):
        list(path.parent.iterdir())  # makes a network file system ask again what is there
        with safe_paths.open_inside(path.parent, path.name) as file:
            if _is_private(os.fstat(file.fileno())):
                found = safe_paths.parse_json(safe_paths.bounded(file, str(path), _MAX_BYTES))
                return found if isinstance(found, dict) else None
    return None


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
