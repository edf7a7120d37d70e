"""Nodes with folders of their own (`launch.shared_folder=false`): how each gets what it would read from node 0's.

The resolved run travels over the connection of the nodes, and the checkpoint from which it resumes comes from the
store (`unisono.checkpoint.remote.node_parts`). Events, trackers and assets are in the folder of node 0; logs and the
ledger of a process are on its node. Each folder is locked by its node.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from unisono.checkpoint.core import commit, placement
from unisono.checkpoint.remote import node_parts, store_lock
from unisono.config.resolved_run import ResolvedRun
from unisono.config.schema.run import RunConfig
from unisono.launch.nodes import agreement
from unisono.launch.processes import local_processes
from unisono.launch.resolving import run_directory
from unisono.runtime.communication.authenticated_line import TOKEN
from unisono.runtime.console import say
from unisono.runtime.errors import CheckpointError, ConfigError, RunError, UnisonoError
from unisono.runtime.untrusted import safe_paths


def check_token(config: RunConfig) -> None:
    """Refuse nodes without a token of the user's, which could not read one that node 0 leaves in its folder.

    Raises:
        ConfigError: saying what to set.
    """
    if not config.launch.shared_folder and not os.environ.get(TOKEN):
        raise ConfigError(
            f"launch.shared_folder=false needs {TOKEN}, since no folder is shared in which node 0 could leave one: set "
            "it to the same value on all nodes, e.g. the output of `openssl rand -hex 32`"
        )


def describe_resume(run: ResolvedRun) -> dict[str, Any]:
    """What the other nodes need besides the resolved run, on node 0: the store's owner, and the checkpoint's hash.

    Raises:
        CheckpointError: if the newest checkpoint of this folder is damaged.
    """
    sha256 = None
    if run.resume is not None:
        newest = run.resume.candidates[0]
        if newest.damage:
            raise CheckpointError(f"{newest.damage} Move it away on node 0, so that it is fetched from the store")
        sha256 = commit.read_manifest(run.directory / placement.NAME / newest.name).sha256
    return {"owner": store_lock.read_local(run.directory), "manifest": sha256}


def take_over(run: ResolvedRun, config: RunConfig, owner: dict[str, str], token: str, stack: ExitStack) -> ResolvedRun:
    """The run in the folder of this node, which is held until the stack is left.

    Args:
        run: as node 0 has resolved it.
        config: of this node.
        owner: of the store, see `describe_resume`.
        token: what node 0 has left in its folder.
        stack: keeps the lock.

    Raises:
        RunError: if the folder cannot be used, is node 0's, or belongs to another run.
        ConfigError: if this node cannot read and write the store.
    """
    named = run.config.model_copy(update={"run": run.config.run.model_copy(update={"dir": config.run.dir})})
    path = run_directory.run_path(named).resolve()
    with suppress(OSError):
        if safe_paths.read_text(path, agreement.TOKEN) == token:
            raise RunError(
                f"{path} is the folder of node 0, but launch.shared_folder=false: leave that out, or give each node a "
                "run.dir of its own"
            )
    run_directory.refuse_unusable(named)
    run = from_newest_alone(replace(run, config=named, directory=path))
    stack.enter_context(run_directory.hold_run(named))
    node_parts.follow(run, owner)
    local_processes.remove_old_faults(path)
    return run


def fetch_checkpoint(run: ResolvedRun, sha256: str | None) -> None:
    """Have the checkpoint from which the run resumes in the folder of this node, and then the run's configuration.

    Args:
        run: in the folder of this node.
        sha256: of the checkpoint's manifest; None on node 0, which has fetched it before, and without one.

    Raises:
        CheckpointError: if the checkpoint is not in the store.
    """
    if sha256 is not None:
        node_parts.fetch(run, sha256)
    run_directory.write_config(run)


def complete_newest(run: ResolvedRun) -> None:
    """Fetch what other nodes have written of the last checkpoint, so that node 0 can export and evaluate it."""
    try:
        node_parts.complete_newest(run)
    except UnisonoError as error:
        say(f"unisono: WARNING: {error}. Start the run again to fetch it from the store", error=True)


def from_newest_alone(run: ResolvedRun) -> ResolvedRun:
    """A run that resumes from its newest checkpoint alone, since a node has no other whole."""
    if run.resume is None:
        return run
    return replace(run, resume=replace(run.resume, candidates=run.resume.candidates[:1]))
