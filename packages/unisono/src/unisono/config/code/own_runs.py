"""Whether this user made a run: such a run may import its own task, without `--task` or `--trust`.

Each start writes `mark.json` into the run's folder: digests of `config.yaml` and of the source files of its task and
callbacks, and a message authentication code (HMAC-SHA256) over them and the places of these files. The key lies in the
user's state folder and only this user can read it. So a run that somebody else made, a configuration that names other
code, and code that has changed since all fail the check. A mark that is copied into another folder vouches only for the
same configuration and the same code at the same place.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from unisono.config import CONFIG_FILE
from unisono.config.code import code_digest, recipes, references
from unisono.runtime.console import say
from unisono.runtime.errors import ConfigError
from unisono.runtime.files import write_whole
from unisono.runtime.untrusted import safe_paths

MARK_FILE = "mark.json"
_KEY_BYTES = 32
_PURPOSE = b"unisono mark of a run, version 1\n"
_MAX_MARK = 4 << 20  # bytes

Files = dict[str, str]  # path -> SHA-256; `config.yaml` stands without its folder, so that a run may be moved


class _Mark(TypedDict):
    files: Files
    mac: str


class UnusableKeyError(ConfigError):
    """A key that somebody else could have read or written. It was not used."""


def key_file() -> Path:
    """Where this user's key lies, whether it exists or not."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "unisono" / "run-key"


def mark_run(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the mark of a run that this user starts.

    Without a key (no home folder, or one that cannot be written) there is no mark, and verbs ask for `--task`.

    Raises:
        OSError: If the folder cannot be written.
    """
    try:
        key = _read_key() or _create_key()
    except UnusableKeyError as error:
        say(f"unisono: WARNING: {error}", error=True)
        key = None
    except (OSError, RuntimeError):
        key = None
    if key is None:
        (folder / MARK_FILE).unlink(missing_ok=True)
        return
    files = {CONFIG_FILE: _digest_config(config), **_digest_code(config)}
    write_whole(folder / MARK_FILE, json.dumps({"files": files, "mac": _sign(key, files)}, indent=1) + "\n")


def why_not_own(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return why this user is not known to have made a run, for an error; None if the run is this user's own.

    Nothing that the run names is imported.

    Args:
        folder: Of the run.
        config: The values of its `config.yaml`. The caller uses these very values, since the file may be replaced.
    """
    try:
        mark, key = safe_paths.read_json(folder, MARK_FILE, _Mark, _MAX_MARK), _read_key()
        files, mac = mark["files"], mark["mac"].encode(errors="replace")
        is_signed = key is not None and hmac.compare_digest(mac, _sign(key, files).encode())
    except UnusableKeyError as error:
        return str(error)
    except FileNotFoundError:
        return "Nothing shows that you made this run"
    except (OSError, ValueError, RuntimeError):  # the file may be anybody's
        return f"Its {MARK_FILE} cannot be read"
    if not is_signed:
        return "It was made by somebody else, or by you with another home folder"
    if files.pop(CONFIG_FILE, None) != _digest_config(config):  # before any file is read that it names
        return f"You made this run, but its {CONFIG_FILE} has changed since"
    now = _digest_code(config)
    changed = sorted(name for name in {*files, *now} if files.get(name) != now.get(name))
    return f"You made this run, but its code has changed since: {', '.join(changed)}" if changed else None


def _digest_config(config: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()


def _digest_code(config: Mapping[str, Any]) -> Files:
    """Return the digests of the source files of a run's task and callbacks; packaged recipes are trusted anyway."""
    files: Files = {}
    for entry in [config.get("recipe"), *(config.get("callbacks") or [])]:
        reference = str(entry.get("callback") if isinstance(entry, dict) else entry)
        if references.names_code(reference) and recipes.find_recipe_name(reference) is None:
            files |= code_digest.digest_task_files(reference)
    return files


def _sign(key: bytes, files: Files) -> str:
    return hmac.new(key, _PURPOSE + json.dumps(files, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def _read_key() -> bytes | None:
    """Return this user's key; None if there is none yet.

    Raises:
        UnusableKeyError: If others own it or may read it, or it is no key.
        OSError: If it cannot be read.
    """
    path = key_file()
    try:
        opened = safe_paths.open_inside(path.parent, path.name)
    except FileNotFoundError:
        return None
    with opened as file:
        facts = os.fstat(file.fileno())
        if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            raise UnusableKeyError(
                f"{path} is the key that shows which runs are yours, but it is not a file that only you can read (mode "
                f"{stat.S_IMODE(facts.st_mode):04o}, owner {facts.st_uid}). It was not used; delete it, and the next "
                "run makes another"
            )
        key = file.read(_KEY_BYTES + 1)
    if len(key) != _KEY_BYTES:
        raise UnusableKeyError(f"{path} is damaged; delete it, and the next run makes another key")
    return key


def _create_key() -> bytes | None:
    """Create this user's key. Of several starts at the same time one creates it, and all read that."""
    path = key_file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(6)}")
    temporary.touch(0o600, exist_ok=False)
    try:
        temporary.write_bytes(secrets.token_bytes(_KEY_BYTES))
        with suppress(FileExistsError):
            path.hardlink_to(temporary)  # complete, and never in place of another
    finally:
        temporary.unlink()
    return _read_key()
