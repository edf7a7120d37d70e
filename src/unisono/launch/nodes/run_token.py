"""How the nodes of a run obtain the same token: from the environment, or from a private file written by node 0.

Node 0 announces which of the two it uses by a public name, so a node that cannot have the same token is refused with
advice on what to set, instead of a failed handshake.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unisono.launch.nodes import shared_secret
from unisono.runtime.authenticated_line import TOKEN
from unisono.runtime.console import say
from unisono.runtime.errors import ConfigError, RunError

_FROM_ENVIRONMENT, _NO_TOKEN, _FROM_SHARED_FILE = "environment", "none", "shared:"  # public names of tokens


def print_status(text: str) -> None:
    """Print a message before logging is set up."""
    say(f"unisono: {text}", error=True)


@contextmanager
def provide_token(secret: Path, where: str) -> Iterator[tuple[bytes, str]]:
    """Yield the token of this run and its public name; a token file written here exists until all nodes are there."""
    if given := os.environ.get(TOKEN):
        yield given.encode(), _FROM_ENVIRONMENT
        return
    token, name = secrets.token_hex(32), secrets.token_hex(8)
    try:
        shared_secret.write_secret(secret, {"name": name, "token": token})
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
        return given.encode()
    if which.startswith(_FROM_SHARED_FILE):
        found = shared_secret.read_secret(secret) or {}
        fits = found.get("name") == which.removeprefix(_FROM_SHARED_FILE) and isinstance(found.get("token"), str)
        return str(found["token"]).encode() if fits else None
    try:  # if this folder is private and shared, the real node 0 would have left a token here
        probe = secret.with_name(f"{secret.name}.{secrets.token_hex(4)}")
        shared_secret.write_secret(probe, {})
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
