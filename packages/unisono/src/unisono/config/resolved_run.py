"""A resolved run: one process decides it, all others receive it as data, compare its digest, and never change it.

Everything that the user left open is decided here: the layout, the micro-batch, the directory, and the checkpoint to
resume from. A smaller micro-batch after an out-of-memory error makes another resolved run.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from unisono.config import fingerprint
from unisono.config.batch_split import BatchSplit, resolve_split
from unisono.config.code import references
from unisono.config.schema.layout import Layout
from unisono.config.schema.run import RunConfig

RESOLVED_FILE = "resolved.json"  # in the directory of a run: what its newest start was resolved to


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that this start may resume from.

    Attributes:
        name: of its folder.
        step: updates made.
        changes: what is not as it was when it was written, as `provenance.Difference.plain` has it.
        lines: the same for people.
        refetched: why its copy here was damaged, and where that is now, if it was fetched again from its store.
        damage: why its manifest cannot be read; it is then passed over.
    """

    name: str
    step: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    refetched: tuple[str, str] | None = None
    damage: str = ""


@dataclass(frozen=True)
class ResumePoint:
    """Where a run resumes.

    Attributes:
        candidates: checkpoints, the newest first; the newest that turns out to be whole is taken.
        random: whether forward passes draw random numbers, so that the micro-batch is part of the mathematics.
    """

    candidates: tuple[Candidate, ...]
    random: bool = False

    @classmethod
    def from_json(cls, values: Mapping[str, Any] | None) -> ResumePoint | None:
        """A resume point from its JSON values."""
        if values is None:
            return None
        candidates = tuple(
            Candidate(**{**c, "lines": tuple(c["lines"]), "refetched": c["refetched"] and tuple(c["refetched"])})
            for c in values["candidates"]
        )
        return cls(candidates, values["random"])

    @property
    def step(self) -> int:
        """Updates made in the newest of them that can be read."""
        return next(candidate.step for candidate in self.candidates if not candidate.damage)


@dataclass(frozen=True)
class ResolvedRun:
    """A run in which nothing is left to decide.

    Attributes:
        config: with a concrete layout and a name.
        directory: of the run.
        resume: the checkpoints from which it may resume; None for a new run.
        origins: dotted key of every value that was written somewhere -> where.
        command: the words of the command that resumes it; empty where it was not started by a command.
    """

    config: RunConfig
    directory: Path
    resume: ResumePoint | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()

    @property
    def layout(self) -> Layout:
        """The concrete layout."""
        return self.config.layout

    @cached_property
    def world_size(self) -> int:
        """Processes."""
        assert isinstance(self.layout.world_size, int)
        return self.layout.world_size

    def ranks_of_folder(self, rank: int) -> range:
        """The ranks that have the run's directory in common with one: all of them, or those of its node."""
        count = self.world_size if self.config.launch.shared_folder else self.world_size // self.config.launch.nodes
        first = rank // count * count
        return range(first, first + count)

    @cached_property
    def split(self) -> BatchSplit:
        """How a global batch is cut."""
        return resolve_split(self.config)

    @cached_property
    def digest(self) -> str:
        """A hash of all of it, equal in every process of the run."""
        return digest_values(self.plain())

    def plain(self) -> dict[str, Any]:
        """All of it as JSON values; the task's file by its whole path, so that it holds in any working directory."""
        described = {
            "config": {**fingerprint.to_json(self.config), **absolute_references(self.config)},
            "directory": str(self.directory),
            "resume": None if self.resume is None else asdict(self.resume),
            "origins": dict(self.origins),
            "command": list(self.command),
        }
        plain: dict[str, Any] = json.loads(json.dumps(described))
        return plain

    def resume_command(self, changes: Mapping[str, str | None] = MappingProxyType({})) -> str:
        """What to type to resume it: the words of its command, or a call where it was started from Python.

        Args:
            changes: other values for some keys; None leaves a key out.
        """
        if self.command:
            return shlex.join(override_words(self.command, changes))
        settings = ", ".join(f'"{key}": "{value}"' for key, value in changes.items() if value is not None)
        return f'unisono.resume("{self.directory}"{f", {{{settings}}}" if settings else ""})'


def absolute_references(config: RunConfig) -> dict[str, Any]:
    """What a configuration has imported, its task and its callbacks, such that it holds in any working directory."""
    callbacks = [
        {**one, "callback": references.absolute_reference(one["callback"])}
        if isinstance(one, dict)
        else references.absolute_reference(one)
        for one in fingerprint.to_json(config)["callbacks"]
    ]
    return {"recipe": references.absolute_reference(config.recipe), "callbacks": callbacks}


def digest_values(values: Mapping[str, Any]) -> str:
    """The hash of a resolved run's JSON values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def override_words(words: tuple[str, ...], changes: Mapping[str, str | None]) -> list[str]:
    """The words of a command with other values for some keys; those that it does not have come last.

    >>> override_words(("unisono", "train", "language", "run.stop_after=5"), {"run.stop_after": None, "run.name": "a"})
    ['unisono', 'train', 'language', 'run.name=a']
    """
    kept = [word for word in words if word.lstrip("+").partition("=")[0] not in changes or "=" not in word]
    return [*kept, *(f"{key}={value}" for key, value in changes.items() if value is not None)]
