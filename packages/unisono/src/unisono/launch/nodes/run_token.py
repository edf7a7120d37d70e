"""How the nodes of a run obtain the same token: from the environment, or from a private file written by node 0.

The file lies in the folder of all runs, on a file system that all nodes see; one that belongs to another user, or that
others could read, is ignored. Node 0 announces by a public name which of the two it uses, so a node that cannot have
the same token is refused with advice on what to set, instead of a failed handshake.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from unisono.runtime.communication.authenticated_line import TOKEN
from unisono.runtime.console import say
from unisono.runtime.errors import ConfigError, RunError
from unisono.runtime.untrusted import safe_paths
from unisono.runtime.untrusted.shapes import Object

_MAX_BYTES = 1 << 12
_FROM_ENVIRONMENT, _NO_TOKEN, _FROM_SHARED_FILE = "environment", "none", "shared:"  # public names of tokens


def print_status(text: str) -> None:
    """Print a message before logging is set up."""
    say(f"unisono: {text}", error=True)


@contextmanager
def provide_token(secret: Path, where: str) -> Iterator[tuple[bytes, str]]:
    """Yield the token of this run and its public name; a token file written here exists until all nodes are there."""
    if given := os.environ.get(TOKEN):
        yield os.fsencode(given), _FROM_ENVIRONMENT
        return
    token, name = secrets.token_hex(32), secrets.token_hex(8)
    try:
        write_secret(secret, {"name": name, "token": token})
    except RunError as error:
        print_status(
            f"WARNING: {error}. Without a token, anybody who can reach {where} can join this run: set {TOKEN} to the "
            "same value on all nodes, e.g. the output of `openssl rand -hex 32`"
        )
        yield b"", _NO_TOKEN
        return
    try:
        yield token.encode(), f"{_FROM_SHARED_FILE}{name}"
    finally:
        secret.unlink(missing_ok=True)


def find_token(which: str, secret: Path, at: str) -> bytes | None:
    """Return the token that node 0 asks for; None if this node cannot see it yet.

    Raises:
        ConfigError: If the token is set on only one of the two, or node 0 asks for none although it could have one.
    """
    given = os.environ.get(TOKEN)
    if (which == _FROM_ENVIRONMENT) != bool(given):
        there, here = ("is", "is not") if which == _FROM_ENVIRONMENT else ("is not", "is")
        raise ConfigError(
            f"{TOKEN} {here} set on this node, but {there} set on node 0 (or whatever answers at {at}); set it to the "
            "same value on all nodes"
        )
    if given:
        return os.fsencode(given)
    if which.startswith(_FROM_SHARED_FILE):
        found = read_secret(secret) or {}
        fits = found.get("name") == which.removeprefix(_FROM_SHARED_FILE) and isinstance(found.get("token"), str)
        return str(found["token"]).encode() if fits else None
    try:  # if this folder is private and shared, the real node 0 would have left a token here
        probe = secret.with_name(f"{secret.name}.{secrets.token_hex(4)}")
        write_secret(probe, {})
        probe.unlink(missing_ok=True)
    except RunError:
        print_status(
            f"WARNING: node 0 at {at} asks for no token, so anyone could answer in its place: set {TOKEN} everywhere"
        )
        return b""
    raise ConfigError(
        f"the process that answers at {at} asks for no token, although node 0 could leave one in {secret.parent}: it "
        f"may not be node 0. Use the same folder as run.dir on all nodes, or set {TOKEN} to the same value everywhere"
    )


def secret_path(folder: Path, about: str) -> Path:
    """Return the path of the token of a rendezvous."""
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
                return dict(safe_paths.parse_json(safe_paths.read_limited(file, str(path), _MAX_BYTES), Object))
    return None


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
