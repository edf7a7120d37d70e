"""Provenance of a run, saved in every checkpoint: configuration, code, data, versions, environment and machine.

It is compared twice: between all processes before the first step, when nothing may differ, and with the checkpoint
that a run resumes from. On resume, changes of layout, intervals or versions are reported; a change of the mathematics
is an error unless `run.allow_change` names it; with `run.resume=exact`, anything that could change a bit is an error.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from unisono.config import environment, fingerprint
from unisono.config.code import code_digest
from unisono.config.schema.run import RunConfig
from unisono.engines import device_module
from unisono.optim import schedules
from unisono.runtime.communication.communicator import Channel, Json, ProcessInfo
from unisono.runtime.errors import ConfigError, RunError, nearest
from unisono.task_config import resolve_engine

Provenance = Mapping[str, Any]

DATA_KEYS = ("rows", "sources", "fingerprint")  # facts of the data that determine the order
ENVIRONMENT_KEYS = ("code", "versions", "environment", "machine")  # may differ unless a run must be exact
HOST_KEYS = ("environment", "machine")  # known only to training processes
_BIT_CHANGING_KEYS = ("layout.", "optim.implementation")  # keys that change the order of sums, but not the mathematics
_START_KEYS = (
    "run.name", "run.dir", "run.resume", "run.allow_change", "run.stop_after",
    "launch.node_rank", "launch.rendezvous", "launch.interface",
)  # fmt: skip
_MAX_ENTRIES = 8  # entries listed in a message


def describe_run(
    config: RunConfig, data: Mapping[str, Any] | None = None, place: ProcessInfo | None = None
) -> dict[str, Json]:
    """The provenance that a checkpoint records of its run, as JSON.

    Args:
        config: concrete.
        data: facts of the run's data; None if not known yet.
        place: of this process; None if it does not train, so that environment and machine are left out.
    """
    plain = fingerprint.to_json(config)
    described = {
        "mathematics": fingerprint.config_digest(config),
        "config": plain,
        "layout": plain["layout"],
        "code": code_digest.digest_sources(config.recipe, config.layout.engine),
        "versions": versions(resolve_engine(config)),
        "data": {name: data[name] for name in DATA_KEYS if name in data} if data is not None else None,
        "environment": environment.relevant_variables(device=config.layout.device) if place is not None else None,
        "machine": place and device_module(config.layout.engine).machine(config.layout, place),
    }
    kept: dict[str, Json] = json.loads(json.dumps(described))  # in the form in which it is read back from a file
    return kept


def versions(engine: str) -> dict[str, str]:
    """Versions of libraries and, with an accelerator, of the driver stack."""
    found = dict(environment.library_versions(engine))
    torch = sys.modules.get("torch")
    version = getattr(torch, "version", None)  # None too while a thread is importing torch
    if torch is None or version is None or not (version.cuda or version.hip):
        return found
    below: dict[str, Callable[[], Any]] = {
        "cuda": lambda: torch.version.cuda,
        "hip": lambda: torch.version.hip,
        "cudnn": torch.backends.cudnn.version,
        "nccl": lambda: torch.cuda.is_available() and ".".join(map(str, torch.cuda.nccl.version())),
        "driver": environment.driver_version,
    }
    for name, ask in below.items():
        with suppress(Exception):  # some builds have none, and cuDNN raises where the installed one does not fit
            if version := ask():
                found[name] = str(version)
    return found


# with the checkpoint -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProvenanceDifference:
    """Differences from when a checkpoint was written; each entry with its value there and here.

    Attributes:
        config: keys of the configuration, except those that belong to a single start.
        mathematics: those of `config` that determine what is computed.
        around: entries of code, versions, environment and machine, if both sides are known.
        data: facts of the data that determine the order.
    """

    config: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    mathematics: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    around: dict[str, dict[str, tuple[Any, Any]]] = field(default_factory=dict)
    data: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def bits(self) -> dict[str, tuple[Any, Any]]:
        """Keys that change the mathematics or the order of sums."""
        return {
            key: pair
            for key, pair in self.config.items()
            if key in self.mathematics or key.startswith(_BIT_CHANGING_KEYS)
        }

    def lines(self) -> list[str]:
        """A line for every entry: `key: there -> here`."""
        return [
            *(f"{key}: {_format_value(there)} -> {_format_value(here)}" for key, (there, here) in self.config.items()),
            *(f"{part}: {entry}" for part, pairs in self.around.items() for entry in _list_entries(part, pairs)),
        ]

    def to_json(self) -> dict[str, Json]:
        """The differences as JSON, for the run's record."""
        parts = {"config": self.config, **self.around}
        return {
            part: {name: list(pair) for name, pair in pairs.items()} if part != "code" else sorted(pairs)
            for part, pairs in parts.items()
            if pairs
        }


def compare(there: Provenance, here: Provenance, config: RunConfig, random: bool) -> ProvenanceDifference:
    """Compare a checkpoint's provenance with that of this start; parts that are None are not compared.

    `random` says whether forward passes draw random numbers, so that the micro-batch is part of the mathematics.
    """
    before = fill_defaults(there["config"], config)
    mathematics = fingerprint.changed_keys(before, config, random)
    old, new = fingerprint.flatten(before), fingerprint.flatten(fingerprint.to_json(config))
    changed = {k: p for k, p in _pairs(old, new).items() if k not in _START_KEYS and k != "recipe"}
    around = {
        part: pairs
        for part in ENVIRONMENT_KEYS
        if there.get(part) is not None and here.get(part) is not None and (pairs := _pairs(there[part], here[part]))
    }
    known = {name for name in DATA_KEYS if name in (there.get("data") or {}) and name in (here.get("data") or {})}
    data = _pairs(*({name: side["data"][name] for name in known} for side in (there, here))) if known else {}
    return ProvenanceDifference({**changed, **mathematics}, mathematics, around, data)


def compare_host(there: Provenance, here: Provenance) -> ProvenanceDifference:
    """Differences in what only a training process knows: environment and machine."""
    both = [name for name in HOST_KEYS if there.get(name) is not None and here.get(name) is not None]
    parts = {name: _pairs(there[name], here[name]) for name in both}
    return ProvenanceDifference(around={name: pairs for name, pairs in parts.items() if pairs})


def check_compatible(where: str, differs: ProvenanceDifference, config: RunConfig, done: int | None = None) -> None:
    """Raise if this start is a different run than that of the checkpoint in `where`.

    Another number of steps is the same run as long as no step that was made would have been another one.

    Args:
        where: the folder of the run.
        differs: from that of this start.
        config: of this start.
        done: steps that the checkpoint holds; None if there is none.

    Raises:
        RunError: naming every key and the way out.
    """
    if differs.data:
        entries = "; ".join(_list_entries("data", differs.data))
        raise RunError(
            f"{where} was trained on other data: {entries}. Restore the original data, or choose another run.name"
        )
    exact = config.run.resume == "exact"
    allowed = config.run.allow_change
    changed = differs.bits if exact else {k: p for k, p in differs.mathematics.items() if k not in allowed}
    reason = _find_change_by_length(changed, config, done)
    if reason == "" and not exact:
        changed.pop("train.steps", None)
    listed = [f"  {key}: {before!r} there, {after!r} here" for key, (before, after) in changed.items()]
    listed += [f"  {reason}"] if reason else []
    if exact:
        listed += [
            f"  {part}: {entry}" for part, pairs in differs.around.items() for entry in _list_entries(part, pairs)
        ]
        if listed:
            raise RunError(
                f"{where} cannot be resumed exactly (run.resume=exact); differences between its checkpoint (there) "
                "and this start (here):\n" + "\n".join(listed) + "\nRestore the original, or use run.resume=must, "
                "which accepts changes that do not affect the mathematics"
            )
    if listed:
        raise RunError(
            f"{where} already holds another run:\n" + "\n".join(listed) + "\nChoose another run.name, or resume with "
            f"these changes: run.allow_change=[{','.join(changed)}]"
        )


def _find_change_by_length(changed: Mapping[str, Any], config: RunConfig, done: int | None) -> str | None:
    """What another number of steps would have changed in the steps that were made.

    Returns:
        A sentence; empty if it would have changed nothing; None if the number is the same, or nothing can be said.
    """
    before, after = changed.get("train.steps", (None, None))
    if done is None or not (isinstance(before, int) and isinstance(after, int)) or after < done:
        return None
    for name, schedule in config.schedules.items():
        first = schedules.first_change(schedule, before, after)
        if first is not None and first < done:
            return (
                f"schedules.{name} ({schedule.kind}) depends on the number of steps: with {after}, it would have had "
                f"other values from step {first + 1} on, and {done} steps are made"
            )
    return ""


def check_names(config: RunConfig, there: Mapping[str, Any] | None = None) -> None:
    """Reject names in `run.allow_change` that are keys neither here nor in the resumed run.

    Raises:
        ConfigError: with the nearest key.
    """
    keys = {*fingerprint.flatten(fingerprint.to_json(config)), *(fingerprint.flatten(dict(there)) if there else ())}
    for name in config.run.allow_change:
        if name not in keys:
            raise ConfigError(f"run.allow_change: there is no key '{name}'; {_suggest_key(name, keys)}")


def fill_defaults(there: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """A checkpoint's configuration, plus newer keys if they have their defaults here."""
    return _fill_group(there, fingerprint.to_json(config), config.model_dump(mode="json", exclude_defaults=True))


def _fill_group(there: Mapping[str, Any], here: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(there)
    for name, value in here.items():
        if name not in there and name not in chosen:
            result[name] = value
        elif isinstance(value, dict) and isinstance(there.get(name), dict):
            inner = chosen.get(name)
            result[name] = _fill_group(there[name], value, inner if isinstance(inner, dict) else {})
    return result


# between processes --------------------------------------------------------------------------------------------------


def shared_inputs(config: RunConfig, own: Sequence[str] = ("run.name",)) -> dict[str, dict[str, Any]]:
    """Inputs that must be the same for every process of a job, by the name used in messages.

    Args:
        config: of this process.
        own: keys that may differ between processes.
    """
    values = fingerprint.flatten(fingerprint.to_json(config))
    if not config.launch.shared_folder:
        own = (*own, "run.dir")
    return {
        "the configuration": {key: value for key, value in values.items() if key not in own},
        "the versions": versions(resolve_engine(config)),
        "the code": code_digest.digest_sources(config.recipe, config.layout.engine),
        "the environment": environment.relevant_variables(device=config.layout.device),
    }


def check_agreement(group: Channel, mine: Mapping[str, Mapping[str, Any]], who: str = "rank") -> None:
    """Check that all processes were given the same inputs; collective.

    Args:
        group: all processes, or all nodes.
        mine: this one's inputs, as returned by `shared_inputs`.
        who: what to call a member of the group.

    Raises:
        RunError: on all of them, naming two, the entries in which they differ, and both values.
    """
    digests = {what: _digest(values) for what, values in mine.items()}
    gathered = group.gather([platform.node(), digests], f"the settings of all {who}s")
    unequal = [what for what in mine if any(there[1][what] != gathered[0][1][what] for there in gathered)]
    if not unequal:
        return
    everyone = group.gather({what: mine[what] for what in unequal}, f"the differences of all {who}s")
    sentences = []
    for what in unequal:
        pairs = {rank: _pairs(everyone[0][what], theirs[what]) for rank, theirs in enumerate(everyone)}
        others = [rank for rank, found in pairs.items() if found]
        first = others[0]
        entries = _list_entries(what, pairs[first], f"on {who} 0", f"on {who} {first}")
        more = f" ({who} {', '.join(map(str, others[1:]))} too)" if others[1:] else ""
        hosts = f" on {gathered[0][0]}", f" on {gathered[first][0]}"
        names = ("", "") if hosts[0] == hosts[1] else hosts
        sentences.append(f"{who} 0{names[0]} and {who} {first}{names[1]} differ in {what}{more}: {'; '.join(entries)}")
    raise RunError(". ".join(sentences) + f". Start all {who}s with the same command, environment, code and data")


# in words -----------------------------------------------------------------------------------------------------------


def _pairs(there: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {
        name: (there.get(name), here.get(name))
        for name in sorted({*there, *here})
        if there.get(name) != here.get(name) or (name in there) != (name in here)
    }


def _list_entries(
    part: str, pairs: Mapping[str, tuple[Any, Any]], there: str = "there", here: str = "here"
) -> list[str]:
    """The differing entries of a part, each with both values; for code, whose values are digests, what happened."""
    if part.endswith("code"):
        entries = code_digest.describe_changes(
            *({n: p[i] for n, p in pairs.items() if p[i] is not None} for i in (0, 1))
        )
    else:
        entries = [
            f"{name} is {_format_value(before)} {there} and {_format_value(after)} {here}"
            for name, (before, after) in pairs.items()
        ]
    return entries[:_MAX_ENTRIES] + ([f"and {len(entries) - _MAX_ENTRIES} more"] if len(entries) > _MAX_ENTRIES else [])


def _format_value(value: Any) -> str:
    text = "not set" if value is None else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def _suggest_key(name: str, keys: set[str]) -> str:
    """A suggestion: the same last word elsewhere, or the nearest key."""
    same = sorted(key for key in keys if key.rpartition(".")[2] == name.rpartition(".")[2])
    return f"did you mean '{same[0]}'?" if len(same) == 1 else nearest(name, keys)
