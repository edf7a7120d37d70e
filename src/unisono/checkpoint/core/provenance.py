"""What a run is made of, told by every checkpoint: configuration, code, data, versions, environment and machine.

It is compared twice: between all processes before the first step, where nothing may differ, and with the checkpoint
that a run goes on from. There a layout, an interval or a version may differ, and is told; what changes the mathematics
is refused unless `run.allow_change` names it; and `run.resume=exact` refuses whatever could change a bit.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unisono.config import code_digest, environment, fingerprint
from unisono.config.schema.run import RunConfig
from unisono.engines import choice
from unisono.runtime.communicator import Json, Party, Place
from unisono.runtime.errors import ConfigError, RunError, nearest
from unisono.task_config import engine_of

About = Mapping[str, Any]

DATA = ("rows", "sources", "fingerprint")  # the facts of the data that decide the order
AROUND = ("code", "versions", "environment", "machine")  # what may differ where a run need not be the same bit for bit
HOST = ("environment", "machine")  # of these, what only a process that computes knows
_BITS = ("layout.", "optim.implementation")  # keys that change no mathematics, but the order of sums
_OF_A_START = (
    "run.name", "run.dir", "run.resume", "run.allow_change", "run.stop_after",
    "launch.node_rank", "launch.rendezvous", "launch.interface",
)  # fmt: skip
_TOLD = 8  # entries that a sentence names


def of(config: RunConfig, data: Mapping[str, Any] | None = None, place: Place | None = None) -> dict[str, Json]:
    """What a checkpoint says of the run that writes it, as JSON.

    Args:
        config: concrete.
        data: facts of the run's data; None where they are not known yet.
        place: of this process; None where it is not one that computes, so that environment and machine say nothing.
    """
    plain = fingerprint.plain(config)
    told = {
        "mathematics": fingerprint.digest(config),
        "config": plain,
        "layout": plain["layout"],
        "code": code_digest.digests(config.recipe),
        "versions": versions(engine_of(config)),
        "data": {name: data[name] for name in DATA if name in data} if data is not None else None,
        "environment": environment.variables() if place is not None else None,
        "machine": machine(config, place) if place is not None else None,
    }
    kept: dict[str, Json] = json.loads(json.dumps(told))  # as it comes back from a file
    return kept


def versions(engine: str) -> dict[str, str]:
    """Versions of libraries, and of what lies below torch where there is an accelerator."""
    found = dict(environment.versions(engine))
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda:
        cudnn, nccl = torch.backends.cudnn.version(), getattr(torch.cuda, "nccl", None)
        below = {"cuda": torch.version.cuda, "cudnn": cudnn, "driver": environment.driver()}
        if nccl is not None and torch.cuda.is_available():
            below["nccl"] = ".".join(map(str, nccl.version()))
        found |= {name: str(version) for name, version in below.items() if version}
    return found


def machine(config: RunConfig, place: Place) -> dict[str, Json]:
    """What computes: the device's name, the processor's instructions, and how many threads share an operation."""
    found: dict[str, Json] = choice.devices(config.layout.engine).machine(config.layout, place)
    return found


# with the checkpoint -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """What is not as it was when a checkpoint was written; each entry with its value there and here.

    Attributes:
        config: keys of the configuration, but for those that belong to a start.
        mathematics: those of them that decide what is computed.
        around: of code, versions, environment and machine, where both are known.
        data: facts of the data that decide the order.
    """

    config: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    mathematics: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    around: dict[str, dict[str, tuple[Any, Any]]] = field(default_factory=dict)
    data: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def bits(self) -> dict[str, tuple[Any, Any]]:
        """Keys that change the mathematics or the order of sums."""
        return {key: pair for key, pair in self.config.items() if key in self.mathematics or key.startswith(_BITS)}

    def lines(self) -> list[str]:
        """A line for every entry: `key: there -> here`."""
        return [
            *(f"{key}: {_short(there)} -> {_short(here)}" for key, (there, here) in self.config.items()),
            *(f"{part}: {entry}" for part, pairs in self.around.items() for entry in _entries(part, pairs)),
        ]

    def plain(self) -> dict[str, Json]:
        """The same as JSON, for the record of a run."""
        parts = {"config": self.config, **self.around}
        return {
            part: {name: list(pair) for name, pair in pairs.items()} if part != "code" else sorted(pairs)
            for part, pairs in parts.items()
            if pairs
        }


def compare(there: About, here: About, config: RunConfig, random: bool) -> Difference:
    """Hold what a checkpoint says against what this start is.

    Args:
        there: of the checkpoint.
        here: of this start; parts that are None are not compared.
        config: of this start, concrete.
        random: whether forward passes draw random numbers, so that the micro-batch is part of the mathematics.
    """
    before = filled(there["config"], config)
    mathematics = fingerprint.changes(before, config, random)
    old, new = fingerprint.flat(before), fingerprint.flat(fingerprint.plain(config))
    changed = {k: p for k, p in _pairs(old, new).items() if k not in _OF_A_START and k != "recipe"}
    around = {
        part: pairs
        for part in AROUND
        if there.get(part) is not None and here.get(part) is not None and (pairs := _pairs(there[part], here[part]))
    }
    known = {name for name in DATA if name in (there.get("data") or {}) and name in (here.get("data") or {})}
    data = _pairs(*({name: side["data"][name] for name in known} for side in (there, here))) if known else {}
    return Difference({**changed, **mathematics}, mathematics, around, data)


def compare_host(there: About, here: About) -> Difference:
    """What is not as it was of what only a process that computes knows: environment and machine."""
    both = [name for name in HOST if there.get(name) is not None and here.get(name) is not None]
    parts = {name: _pairs(there[name], here[name]) for name in both}
    return Difference(around={name: pairs for name, pairs in parts.items() if pairs})


def refuse(where: str, differs: Difference, config: RunConfig) -> None:
    """Refuse to go on with what is another run.

    Args:
        where: the run's folder.
        differs: from its checkpoint.
        config: of this start.

    Raises:
        RunError: naming every key and the way out.
    """
    if differs.data:
        entries = "; ".join(_entries("data", differs.data))
        raise RunError(
            f"{where} was trained on other data: {entries}. Bring the data back as they were, or choose another "
            "run.name"
        )
    exact = config.run.resume == "exact"
    allowed = config.run.allow_change
    changed = differs.bits if exact else {k: p for k, p in differs.mathematics.items() if k not in allowed}
    listed = [f"  {key}: {before!r} there, {after!r} here" for key, (before, after) in changed.items()]
    if exact:
        listed += [f"  {part}: {entry}" for part, pairs in differs.around.items() for entry in _entries(part, pairs)]
        if listed:
            raise RunError(
                f"{where} cannot be continued exactly (run.resume=exact); what differs between its checkpoint (there) "
                "and this start (here):\n" + "\n".join(listed) + "\nBring it back as it was, or use run.resume=must, "
                "which goes on with what changes no mathematics"
            )
    if listed:
        raise RunError(
            f"{where} already holds another run:\n" + "\n".join(listed) + "\nChoose another run.name, or go on with "
            f"these changes by run.allow_change=[{','.join(changed)}]"
        )


def check_names(config: RunConfig, there: Mapping[str, Any] | None = None) -> None:
    """Refuse names in `run.allow_change` that are no keys, here or of the run that is continued.

    Raises:
        ConfigError: with the nearest key.
    """
    keys = {*fingerprint.flat(fingerprint.plain(config)), *(fingerprint.flat(dict(there)) if there else ())}
    for name in config.run.allow_change:
        if name not in keys:
            raise ConfigError(f"run.allow_change names '{name}', which is no key; {_nearest(name, keys)}")


def filled(there: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """The configuration of a checkpoint with the keys that did not exist then, where they have their defaults here."""
    return _filled(there, fingerprint.plain(config), config.model_dump(mode="json", exclude_defaults=True))


def _filled(there: Mapping[str, Any], here: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(there)
    for name, value in here.items():
        if name not in there and name not in chosen:
            result[name] = value
        elif isinstance(value, dict) and isinstance(there.get(name), dict):
            inner = chosen.get(name)
            result[name] = _filled(there[name], value, inner if isinstance(inner, dict) else {})
    return result


# between processes --------------------------------------------------------------------------------------------------


def given(config: RunConfig, own: Sequence[str] = ("run.name",)) -> dict[str, dict[str, Any]]:
    """What every process of a job must have been given alike, by what it is called in a sentence.

    Args:
        config: of this process.
        own: keys that each may have for itself.
    """
    values = fingerprint.flat(fingerprint.plain(config))
    return {
        "the configuration": {key: value for key, value in values.items() if key not in own},
        "the versions": versions(engine_of(config)),
        "the code": code_digest.digests(config.recipe),
        "the environment": environment.variables(),
    }


def agree(group: Party, mine: Mapping[str, Mapping[str, Any]], who: str = "rank") -> None:
    """See that all processes were given the same; collective.

    Args:
        group: all processes, or all nodes.
        mine: what this one was given, as `given` has it.
        who: what a member of the group is called.

    Raises:
        RunError: on all of them, naming two, the entries in which they differ, and both values.
    """
    digests = {what: _digest(values) for what, values in mine.items()}
    told = group.gather([platform.node(), digests], f"what all {who}s were given")
    unequal = [what for what in mine if any(there[1][what] != told[0][1][what] for there in told)]
    if not unequal:
        return
    everyone = group.gather({what: mine[what] for what in unequal}, f"the differences of all {who}s")
    sentences = []
    for what in unequal:
        pairs = {rank: _pairs(everyone[0][what], theirs[what]) for rank, theirs in enumerate(everyone)}
        others = [rank for rank, found in pairs.items() if found]
        first = others[0]
        entries = _entries(what, pairs[first], f"on {who} 0", f"on {who} {first}")
        more = f" ({who} {', '.join(map(str, others[1:]))} too)" if others[1:] else ""
        hosts = f" on {told[0][0]}", f" on {told[first][0]}"
        names = ("", "") if hosts[0] == hosts[1] else hosts
        sentences.append(f"{who} 0{names[0]} and {who} {first}{names[1]} differ in {what}{more}: {'; '.join(entries)}")
    raise RunError(
        ". ".join(sentences) + f". Start all {who}s with one command, one environment, one copy of the code and the "
        "same data"
    )


# in words -----------------------------------------------------------------------------------------------------------


def _pairs(there: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {
        name: (there.get(name), here.get(name))
        for name in sorted({*there, *here})
        if there.get(name) != here.get(name) or (name in there) != (name in here)
    }


def _entries(part: str, pairs: Mapping[str, tuple[Any, Any]], there: str = "there", here: str = "here") -> list[str]:
    """The entries of a part that differ, each with both values; of code, whose values are digests, what happened."""
    if part.endswith("code"):
        told = code_digest.changes(*({n: p[i] for n, p in pairs.items() if p[i] is not None} for i in (0, 1)))
    else:
        told = list(_told(pairs, there, here))
    return told[:_TOLD] + ([f"and {len(told) - _TOLD} more"] if len(told) > _TOLD else [])


def _told(pairs: Mapping[str, tuple[Any, Any]], there: str, here: str) -> Iterator[str]:
    for name, (before, after) in pairs.items():
        yield f"{name} is {_short(before)} {there} and {_short(after)} {here}"


def _short(value: Any) -> str:
    text = "not set" if value is None else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def _nearest(name: str, keys: set[str]) -> str:
    """A suggestion: the same last word elsewhere, or the nearest key."""
    same = sorted(key for key in keys if key.rpartition(".")[2] == name.rpartition(".")[2])
    return f"did you mean '{same[0]}'?" if len(same) == 1 else nearest(name, keys)
