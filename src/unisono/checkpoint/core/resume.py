"""Where a run goes on: which checkpoint, whether it may, and what a checkpoint keeps so that nothing is lost between.

Before the model is made all ranks agree on the newest checkpoint that is whole, and hold what it says of its run
against this start. A damaged one is passed over for the one before it, loudly: it is told, recorded, and kept aside
under another name. With `run.resume=exact` it is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.checkpoint.core import commit, provenance
from unisono.checkpoint.core.commit import Checkpoint
from unisono.checkpoint.core.provenance import About, Difference
from unisono.config.schema.run import RunConfig
from unisono.data import ledger
from unisono.data.order.plan import Plan
from unisono.engines.protocol import Engine
from unisono.engines.state import Shard
from unisono.runtime.communicator import Group, Json, while_first
from unisono.runtime.errors import CheckpointError, FormatError, RunError
from unisono.runtime.files import sync

log = logging.getLogger(__name__)

NO_OTHER = "No other may be taken with run.resume=exact; run.resume=must goes on from the one before"
KEYS = frozenset(
    {"step", "total", "random", "micro_batch", "plan", "ledger", "best", "trackers"}
)  # of a checkpoint's state
_WEIGHTS = ("model/", "ema/", "adapter/")  # arrays of a checkpoint that holds the model only
_ARRAYS = (*_WEIGHTS, "optimizer/", "carry/", "spikes/", "rank-")
_MODEL_ONLY = (
    "holds the model only (checkpoint.final=model): it can be loaded (unisono.load_weights, unisono.load_model), "
    "exported, evaluated and fine-tuned from, but not resumed"
)


@dataclass(frozen=True)
class Fallen:
    """A checkpoint that was passed over.

    Attributes:
        name: of its folder, as it was.
        why: it cannot be used, with file and tensor.
        aside: how it is called now.
    """

    name: str
    why: str
    aside: str = ""


@dataclass(frozen=True)
class Found:
    """Where a run goes on.

    Attributes:
        checkpoint: None for a new run.
        fallen: newer ones that are damaged, the newest first.
        mended: the damaged copy of this one, where the store had it whole.
        differs: what is not as it was when the checkpoint was written.
        gone: files of the ledger that the checkpoint knows and that are not there.
    """

    checkpoint: Checkpoint | None = None
    fallen: list[Fallen] = field(default_factory=list)
    differs: Difference = field(default_factory=Difference)
    gone: list[str] = field(default_factory=list)
    mended: Fallen | None = None

    @property
    def step(self) -> int:
        """Updates made; 0 for a new run."""
        return self.checkpoint.step if self.checkpoint else 0

    def kept(self, name: str) -> Any:
        """What the checkpoint's state says under a name; None for a new run."""
        return self.checkpoint.state.get(name) if self.checkpoint else None

    def load(self, engine: Engine, plan: Plan) -> int:
        """Give engine and plan their state; returns the updates made."""
        if self.checkpoint is not None:
            engine.load(self.checkpoint.reader(), weights_only=self.checkpoint.holds == "model")
            if (plans := self.checkpoint.state["plan"]) is not None:
                plan.resume(plans)
            log.info("continuing after step %d from %s", self.step, self.checkpoint.path)
        return self.step

    def lines(self) -> list[str]:
        """What is told on the console."""
        told = [
            f"WARNING: {fallen.why} Falling back to {self.checkpoint.path.name}; the damaged checkpoint is kept as "
            f"{fallen.aside}"
            for fallen in self.fallen
            if self.checkpoint is not None
        ]
        if self.mended is not None:
            told.append(
                f"WARNING: {self.mended.why} It was brought again from its store; the damaged one is kept as "
                f"{self.mended.aside}"
            )
        if self.gone:
            told.append(
                f"WARNING: {', '.join(self.gone)} of the ledger is gone; a new one begins, and `unisono data audit` "
                "cannot say what was consumed before"
            )
        if self.step:
            told.append(f"continuing after step {self.step}")
            told += [f"  {line}" for line in self.differs.lines()]
        return told

    def notes(self, steps: int) -> list[dict[str, Json]]:
        """What stands in `events.jsonl` of how a run of so many steps went on; changes only where a step follows."""
        told: list[dict[str, Json]] = [
            {"fallback": {"from": f.name, "to": self.checkpoint.path.name, "why": f.why, "kept_as": f.aside}}
            for f in self.fallen
            if self.checkpoint is not None
        ]
        if self.mended is not None:
            one = self.mended
            told.append({"brought_again": {"name": one.name, "why": one.why, "kept_as": one.aside}})
        changed = self.differs.plain()
        return told + ([{"changed": changed}] if changed and self.step < steps else [])


def newest_readable(folder: Path) -> tuple[Checkpoint | None, list[Fallen]]:
    """The newest checkpoint whose manifest can be read, its files not looked at, and newer ones that cannot be.

    Raises:
        FormatError: if it is of another version.
    """
    fallen = []
    for path in reversed(commit.find(folder)):
        try:
            checkpoint = commit.read(path)
        except FormatError:
            raise
        except CheckpointError as error:
            fallen.append(Fallen(path.name, _plainly(str(error))))
        else:
            _known(checkpoint)
            return checkpoint, fallen
    return None, fallen


def choose(
    folder: Path,
    config: RunConfig,
    here: About,
    steps: int,
    group: Group,
    writing: bool = True,
    again: Callable[[Path], tuple[Path | None, str]] | None = None,
) -> Found:
    """The checkpoint from which a run goes on; collective, with the same result or the same error on every rank.

    Args:
        folder: of the run.
        config: of this start, concrete.
        here: what this start is.
        steps: of the whole run.
        group: all ranks.
        writing: False where nothing is to follow but an evaluation: then nothing is renamed, passed over or refused.
        again: brings a damaged checkpoint from elsewhere, and says where the damaged one is now, or why it could not;
            asked on rank 0, and the same everywhere in being None.

    Raises:
        RunError: where this start is another run, or there is nothing that could be resumed and must be.
        CheckpointError: where no checkpoint is whole, or the newest one is not and nothing else may be taken.
    """
    checkpoints = folder / "checkpoints"
    names = group.gather([path.name for path in commit.find(checkpoints)], "the checkpoints that all ranks see")
    if any(seen != names[0] for seen in names):
        newest = [seen[-1] if seen else None for seen in names]
        raise CheckpointError(f"{checkpoints}: the ranks see different checkpoints, {newest}; is it a shared folder?")
    strict = config.run.resume == "exact" or not writing
    fallen: list[Fallen] = []
    mended: Fallen | None = None
    for name in reversed(names[0]):
        mended = None
        checkpoint, why = _opened(checkpoints / name, group)
        if checkpoint is None and writing and again is not None:
            aside, more = _brought(checkpoints / name, again, group)
            if aside is not None:
                mended = Fallen(name, why, aside)
                checkpoint, why = _opened(checkpoints / name, group)
            else:
                why = f"{why} It could not be brought again: {more}."
        if checkpoint is not None:
            break
        if strict:
            raise CheckpointError(f"{why} {NO_OTHER}" if writing else why)
        fallen.append(Fallen(name, why))
    else:
        if fallen:
            raise none_whole(checkpoints, fallen)
        if writing and config.run.resume in ("must", "exact"):
            raise nothing_there(folder, config)
        return Found()
    _known(checkpoint)
    if writing:
        if group.rank:  # what a checkpoint says is of the first process, and hosts need not be alike
            here = {**here, "machine": None}
        differs = provenance.compare(checkpoint.about, here, config, checkpoint.state["random"])
        told = group.gather(
            _refusal(lambda: provenance.refuse(str(folder), differs, config)), "whether the run may go on"
        )
        _refuse_together(told)
        _resumable(checkpoint, steps, [checkpoints / name for name in names[0]], differs)
        gone = _ledger_fits(folder, checkpoint, config, group)
        return Found(checkpoint, _set_aside(checkpoints, fallen, group), differs, gone, mended)
    return Found(checkpoint)


def none_whole(folder: Path, fallen: Sequence[Fallen]) -> CheckpointError:
    """The refusal of a run whose checkpoints are all damaged: to start anew would take its events back."""
    return CheckpointError(
        f"{folder}: no checkpoint is whole. {' '.join(one.why for one in fallen)} Bring one back from a copy, or "
        "choose another run.name to start anew"
    )


def nothing_there(folder: Path, config: RunConfig) -> RunError:
    """The refusal of a run that must be resumed and cannot be."""
    return RunError(
        f"{folder} has no checkpoint to resume from, and run.resume={config.run.resume}; start it with run.resume=auto"
    )


# what a checkpoint keeps --------------------------------------------------------------------------------------------


def weights(shards: Sequence[Shard]) -> list[Shard]:
    """The pieces of a state that belong into a checkpoint of the model only."""
    return [shard for shard in shards if shard.name.startswith(_WEIGHTS)]


def state(
    found: Found,
    made: int,
    plan: Plan,
    own: range,
    group: Group,
    *,
    random: bool,
    micro_batch: int,
    mark: Mapping[str, Any] | None,
    best: Json,
    trackers: Mapping[str, str],
) -> dict[str, Json]:
    """What a checkpoint keeps besides arrays, as JSON, the same on every rank; collective.

    Args:
        found: where this start went on.
        made: updates.
        plan: of the run.
        own: rows of the global batch that belong to this process.
        group: all ranks.
        random: whether a forward pass of this process drew random numbers.
        micro_batch: rows of one.
        mark: where this process's ledger stands.
        best: of the evaluations so far.
        trackers: ids of the tracked runs, as rank 0 knows them.
    """
    mine = [random, plan.state(made, own), mark, dict(trackers) if group.rank == 0 else None]
    before = found.kept("ledger")
    if before:
        before = {**before, "files": {name: at for name, at in before["files"].items() if name not in found.gone}}
    randoms, plans, marks, ids = zip(*group.gather(mine, "what all ranks keep"), strict=True)
    return {
        "step": made,
        "total": plan.steps,
        "random": any(randoms),
        "micro_batch": micro_batch,
        "plan": None if all(part is None for part in plans) else list(plans),
        "ledger": None if None in marks else ledger.joined(before, marks),
        "best": best,
        "trackers": ids[0],
    }


# the steps of choosing ----------------------------------------------------------------------------------------------


def _opened(path: Path, group: Group) -> tuple[Checkpoint | None, str]:
    """A checkpoint that is whole for every rank, or why it is not; another format is refused at once."""
    try:
        return commit.open_(path, group), ""
    except FormatError:
        raise
    except CheckpointError as error:
        return None, _plainly(str(error))


def _brought(path: Path, again: Callable[[Path], tuple[Path | None, str]], group: Group) -> tuple[str | None, str]:
    """Let rank 0 bring a checkpoint, however long that takes."""
    what = "a damaged checkpoint to be brought again"

    def bring() -> list[Json]:
        try:
            aside, why = again(path)
        except Exception as error:
            return [None, f"{type(error).__name__}: {error}"]
        return [aside.name if aside else None, why]

    aside_name, why = group.gather(while_first(group, bring, what), what)[0]
    if aside_name is not None:
        log.warning("%s was damaged and was brought again; the damaged one is kept as %s", path, aside_name)
    return aside_name, why


def _plainly(fault: str) -> str:
    """What is wrong with a checkpoint, without the advice to delete it: here it is passed over and kept."""
    return fault.partition(" Delete ")[0]


def _known(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint with parts that this version does not know, or without some that it needs.

    Raises:
        FormatError: naming them.
    """
    unknown = sorted(checkpoint.state.keys() - KEYS)
    unknown += sorted({name.partition("/")[0] for name in checkpoint.arrays if not name.startswith(_ARRAYS)})
    missing = sorted(KEYS - checkpoint.state.keys())
    if unknown or missing:
        version = checkpoint.about.get("versions", {}).get("unisono", "another version")
        raise FormatError(
            f"{checkpoint.path} is of another version of Unisono ({version}): it "
            + " and ".join(
                filter(
                    None,
                    [
                        f"has {', '.join(unknown)}, which this version does not know" if unknown else "",
                        f"lacks {', '.join(missing)}" if missing else "",
                    ],
                )
            )
            + ". Resume the run with the version that wrote it, or take its weights (unisono.load_weights)"
        )


def _resumable(checkpoint: Checkpoint, steps: int, paths: Sequence[Path], differs: Difference) -> None:
    """Refuse to go on from a checkpoint of the model only, unless all steps are made; and from one of other length.

    Raises:
        RunError: with the newest checkpoint that can be resumed.
    """
    if checkpoint.holds == "model" and checkpoint.step < steps:
        older = [path for path in paths if path < checkpoint.path and _holds_everything(path)]
        way = (
            f"{older[-1].name} holds everything: move {checkpoint.path.name} out of {checkpoint.path.parent} to go on "
            "from there"
            if older
            else f"no checkpoint in {checkpoint.path.parent} can be"
        )
        raise RunError(f"{checkpoint.path} {_MODEL_ONLY}; {way}")
    was = checkpoint.state["total"]
    if was != steps and not differs.mathematics:  # those that are there were allowed
        raise RunError(
            f"{checkpoint.path} is of a run of {was} steps, and this one has {steps}, so schedules would be others; "
            "bring data and settings back as they were"
        )


def _holds_everything(path: Path) -> bool:
    try:
        return commit.read(path).holds == "everything"
    except (CheckpointError, KeyError):
        return False


def _ledger_fits(folder: Path, checkpoint: Checkpoint, config: RunConfig, group: Group) -> list[str]:
    """See that the ledger is the one that the checkpoint knows; its files are dealt out to the ranks.

    Returns:
        Files that are gone.

    Raises:
        CheckpointError: naming file, line and step where it is another.
    """
    kept = checkpoint.state["ledger"]
    if kept is None:
        return []
    gone = ledger.missing(folder, kept) if group.rank == 0 else []
    faults: list[str] = []
    for number, (name, until) in enumerate(sorted(kept["files"].items())):
        if number % group.size == group.rank and (folder / ledger.FOLDER / name).is_file():
            faults += filter(None, [ledger.fault(folder, name, until)])
    told = group.gather([gone, faults], "whether the ledger is that of the checkpoint")
    gone, faults = told[0][0], [fault for _, mine in told for fault in mine]
    if gone and config.run.resume == "exact":
        faults = [f"{name} is gone" for name in gone] + faults
    if faults:
        raise CheckpointError(
            f"{folder / ledger.FOLDER} is not the ledger of {checkpoint.path.name}: {'; '.join(faults)}. Bring it back "
            f"from a copy, or move it away to go on with a new one"
        )
    return list(gone)


def _set_aside(folder: Path, fallen: Sequence[Fallen], group: Group) -> list[Fallen]:
    """Give damaged checkpoints names that are nobody's, so that the run can come to their steps again; none is lost."""
    told: list[Any] = [None, []]
    if group.rank == 0:
        try:
            told[1] = [_renamed(folder, one.name) for one in fallen]
            if fallen:
                sync(folder)
        except OSError as error:
            told[0] = f"{folder}: a damaged checkpoint cannot be renamed ({error.strerror or error})"
    fault, names = group.gather(told, "damaged checkpoints to be kept aside")[0]
    if fault:
        raise CheckpointError(fault)
    named = [Fallen(one.name, one.why, name) for one, name in zip(fallen, names, strict=True)]
    for one in named:
        log.warning("%s Falling back; the damaged checkpoint is kept as %s", one.why, one.aside)
    return named


def _renamed(folder: Path, name: str) -> str:
    aside = commit.aside(folder / name)
    (folder / name).rename(aside)
    return aside.name


def _refusal(act: Callable[[], None]) -> str | None:
    try:
        act()
    except RunError as error:
        return str(error)
    return None


def _refuse_together(told: Sequence[str | None]) -> None:
    """Raise on every rank what one of them refuses."""
    refused = {rank: text for rank, text in enumerate(told) if text}
    if refused:
        rank, text = next(iter(refused.items()))
        raise RunError(text if rank == 0 else f"rank {rank}: {text}")
