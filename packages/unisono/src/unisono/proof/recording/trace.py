"""What a run did, on disk: a JSON file of facts, and a safetensors file of tensors for every moment that is compared.

A trace is written by `record_case` and read by `comparison`; nothing in it says which framework made it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

Array = NDArray[Any]

_FACTS = "facts.json"
INITIAL_BUFFERS = "initial buffers"  # the moment that has the arrays that are not parameters

# In causal order: what is wrong first explains what is wrong after it.
QUANTITIES = (
    "initial parameters",
    "sample ids",
    "samples",
    "outputs",
    "loss",
    "raw gradients",
    "gradient norm",
    "clipped gradients",
    "learning rate",
    "update",
    "optimizer state",
    "parameters",
    "replicas",
    "buffers",
    "EMA",
    "metrics",
    "evaluation",
)

AVERAGE = "'ema/"  # how it begins what replicas of a moving average differ in


@dataclass
class Part:
    """What one micro-batch adds to a step."""

    number: int  # of the micro-batch in the global batch
    rank: int  # that computed it
    rows: int  # of the global batch in it
    sums: dict[str, float]  # that the task's loss returned, by term; of metrics as `metric/NAME`
    counts: dict[str, float]  # what they are divided by, by the same names
    weights: dict[str, float] = field(default_factory=dict)  # of the terms


@dataclass
class StepFacts:
    """What one step came to, beside its tensors."""

    # Source rows of the global batch, in the order of the micro-batches; sorted where a script of another library is
    # free to deal them out in another order.
    rows: list[int]
    by_rank: list[list[int]]  # source rows that each rank computed
    loss: float | None  # over the global batch; None where a script does not tell it
    terms: dict[str, float]  # of the loss
    grad_norm: float | None  # before clipping
    lr: list[list[float]]  # of every parameter group, as the optimizer used it, rank by rank
    metrics: list[dict[str, float]]  # over the global batch, as every rank reports them
    clean: bool | None = True  # whether the step began without gradients; None where that is not known
    groups: list[dict[str, int]] = field(default_factory=list)  # of a script, rank by rank: the group of each parameter

    # Of every micro-batch, in the order of the global batch.
    samples: list[str] = field(default_factory=list)  # a digest of its arrays
    outputs: list[dict[str, list[float]]] = field(default_factory=list)  # sketches of what `outputs` returned
    parts: list[Part] = field(default_factory=list)  # what it adds to the step; none where an engine does not tell
    draws: list[list[int]] = field(default_factory=list)  # the random state before and after its forward pass, digested

    # What should have the same bits on all ranks that hold it and has not, each with these ranks.
    replicas: list[str] = field(default_factory=list)  # parameters, `optimizer/…` and `ema/…`
    buffers: list[str] = field(default_factory=list)

    @property
    def computed(self) -> bool:
        """Whether the run made this step itself, and did not take it over with a checkpoint."""
        return bool(self.lr)

    @property
    def average_apart(self) -> str:
        """A moving average that ranks do not hold alike, where they do hold all else alike; else empty."""
        return self.replicas[0] if self.replicas and all(said.startswith(AVERAGE) for said in self.replicas) else ""

    @property
    def has_equal_ranks(self) -> bool:
        """Whether several ranks had just the same rows; some in common may be right, where a batch straddles epochs."""
        several = len(self.by_rank) > 1 and len(self.rows) > 1
        return several and all(rank == self.by_rank[0] for rank in self.by_rank)


@dataclass
class RunFacts:
    """What is known of a whole run. A text that says why, how or which is empty where there is nothing to say."""

    trainable: list[str] = field(default_factory=list)  # names of the parameters that are to be trained
    frozen: list[str] = field(default_factory=list)  # of the others
    steps: list[StepFacts] = field(default_factory=list)  # in order
    seconds: float = 0.0  # that the run took
    devices: int = 1  # that each process computes on

    # The error that ended the run, if one did: its text, the name of the likely fault behind it, where the error says
    # it, and its text with the lines of the user's code, where it came from there.
    fault: str = ""
    called: str = ""
    user_error: str = ""

    # The data: by rank, how many rows, where that is known; and of the first samples, which every rank makes, a digest
    # of the sample and of the generator that it was given.
    source_rows: list[int] = field(default_factory=list)
    first_samples: list[list[list[int]]] = field(default_factory=list)

    # The model and its passes.
    per_process: list[str] = field(default_factory=list)  # names of what is a statistic of one process
    overlapping: list[list[str]] = field(default_factory=list)  # parameters that are several, in the same memory
    initial_buffers: list[str] = field(default_factory=list)  # that do not begin the same on all ranks, with these
    crosses: str = ""  # `rows` or `whole`, where the loss crosses samples
    random: bool = False  # whether a pass draws random numbers
    lower: list[str] = field(default_factory=list)  # what computes in fewer bits than the run has: `module: dtype`
    attention: bool = False  # whether it used one of torch's fused kernels for scaled dot product attention
    kernels: dict[str, str] = field(default_factory=dict)  # which the task has chosen, by setting
    changed_by_passes: str = ""  # the parameters that passes change without an update
    kept_by_task: str = ""  # what task or model keep beside parameters and buffers, and passes of later steps change
    unrepeatable: str = ""  # why the run cannot be repeated: its data or its forward pass come out otherwise each time

    # A forward pass that was tried by itself.
    reseeded: bool = False  # whether something in it seeds the generator that was seeded for it, so keys say nothing
    late_buffers: list[str] = field(default_factory=list)  # that passes change once an update was made
    rowless_buffers: list[str] = field(default_factory=list)  # that it changes otherwise than by its rows
    carried: list[str] = field(default_factory=list)  # buffers that it reads and changes: the next begins with these
    neighbours: bool = False  # whether what is computed for a row depends on the rows beside it in its micro-batch
    beside: str = ""  # on which of them, where it is not all of them
    normalised: str = ""  # the batch normalisation that alone makes a row depend on them, and not on all processes'
    dependent: str = ""  # which module lets a row see them, and by how much it moves, where that is anything else
    packed: str = ""  # how a document of a packed row changes with the document beside it
    accepted: list[str] = field(default_factory=list)  # of these, what the user has declared to be meant
    mixed: str = ""  # what it returns with the numbers of other rows in a row's place
    unstable_forward: str = ""  # why it gives something else for the same rows, by more than rounding

    # The task's functions.
    places: dict[str, str] = field(default_factory=dict)  # where those begin that the user has written
    probed: bool = False  # whether they were tried by themselves
    unstable_build: str = ""  # why a model that is built again begins otherwise
    unstable_samples: str = ""  # why `sample` or `collate` gives something else for the same rows
    unstable_loss: str = ""  # why the loss of the same outputs is another each time
    unstable_gradient: str = ""  # why the gradient of the same loss is
    on_the_way: list[str] = field(default_factory=list)  # what the user has put between loss and update, with its line
    padding: str = ""  # how padding to the longest row of a micro-batch changes its loss
    collated: str = ""  # how `collate` gives a row other numbers beside others
    overwritten: str = ""  # the array of a batch that `outputs` or `loss` changes in place
    # Of the terms that are no sums over rows: `mean` for one that divides by a count of its own, `averaged` for one
    # that is a mean before it is divided by its count, `constant` for one that adds the same to any rows, `places` for
    # one that is another for the same rows in another order, `largest` for one that is a sum beside one of the rows,
    # such as the longest, `number` for one that is a sum times a number that depends on how many rows there are,
    # `statistic` for anything else.
    additivity: dict[str, str] = field(default_factory=dict)
    later_terms: dict[str, str] = field(default_factory=dict)  # of those that are sums in all that is recorded
    later_step: int = 0  # and not where passes are told that they are of this step
    # Metrics (`metric/NAME sum`, `metric/NAME count`), totals (`total/NAME`) and terms of the loss (`loss/NAME sum`)
    # that are no sums over rows: `constant`, `places` or `statistic`, as above, and how; and those of an evaluation.
    unsummed: dict[str, list[str]] = field(default_factory=dict)
    unsummed_evaluated: dict[str, list[str]] = field(default_factory=dict)
    by_number: str = ""  # an output that is another for the same rows where more are in the batch, if the loss is, too
    carry_by_neighbours: str = ""  # how the state that a row leaves for the next step depends on the rows beside it

    # The update by itself: from which generators the optimizer draws, and where; what it keeps beside its state, and
    # changes; the parameters of whose elements some move otherwise where the gradients of others are others. And
    # whether each process of this run has a part of every parameter.
    update_draws: str = ""
    kept_by_optimizer: str = ""
    coupled: str = ""
    sharded: bool = False
    settings: list[dict[str, list[float]]] = field(default_factory=list)  # of the optimizer, before the first update

    # The evaluation after the last step, rank by rank, once and again; and a digest of every held-out micro-batch.
    evaluation: list[dict[str, float]] = field(default_factory=list)
    evaluation_again: list[dict[str, float]] = field(default_factory=list)
    held_out: dict[str, str] = field(default_factory=dict)  # by its rows
    unstable_evaluation: str = ""  # why a second one of the same weights and rows gives something else
    evaluation_draws: str = ""  # where it draws random numbers, unless the task says that it means to
    evaluation_switched: str = ""  # which modules compute in it as in training
    evaluation_remembered: str = ""  # how it changes the training pass that follows
    evaluation_left: list[str] | None = field(default_factory=list)  # what it changed; None where nobody looked
    callbacks: list[str] = field(default_factory=list)  # of task and configuration, which a proof does not call

    # Of a script of another library.
    optimizer: str = ""  # the name of its optimizer's class
    uninitialised: list[str] = field(default_factory=list)  # parameters and buffers that `to_empty` has left
    untrained: list[str] = field(default_factory=list)  # trainable, and held by no optimizer, or at no rate
    by_script: list[str] = field(default_factory=list)  # parameters that it has changed itself, between updates
    replaced: str = ""  # that other parameters than those of the optimizer got gradients, as if in their place
    autocast: str = ""  # the dtype of the autocast in which it calls its model
    promoted: list[str] = field(default_factory=list)  # dtypes below float64 that it asked for and did not get
    rate_by_loss: bool = False  # whether it has a rate that depends on its losses (`ReduceLROnPlateau`)


class Trace:
    """A run's facts and tensors.

    Args:
        folder: where they lie.

    Attributes:
        pieces: parameters that are left out of all tensors, since every process has its own part of them.
    """

    pieces: frozenset[str] = frozenset()

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        values = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
        for step in values["steps"]:
            step["parts"] = [Part(**part) for part in step["parts"]]
        values["steps"] = [StepFacts(**step) for step in values["steps"]]
        self.facts = RunFacts(**values)

    def tensors(self, moment: str, step: int | None = None) -> dict[str, Array]:
        """Tensors of one moment by name, whole, whatever the layout; empty where there are none."""
        found = read_tensors(self.folder, moment, step)
        if not self.pieces:
            return found
        return {name: value for name, value in found.items() if not self.pieces & {name, *name.split("/")}}

    def shares(self, other: Trace, moment: str, step: int | None = None) -> bool:
        """Whether both have one file for a moment, so that every bit is equal; see `write_tensors`."""
        mine, theirs = (_tensor_file(trace.folder, moment, step) for trace in (self, other))
        return mine.is_file() and theirs.is_file() and mine.samefile(theirs)


def trace_folder(root: Path, case: str) -> Path:
    """Where the trace of a case lies."""
    return root / case.replace(" ", "_").replace(":", "-")


def is_recorded(root: Path, case: str) -> bool:
    """Whether a case was run to its end."""
    return (trace_folder(root, case) / _FACTS).is_file()


def count_recorded(root: Path) -> int:
    """How many cases were run to their end."""
    return len(list(root.glob(f"*/{_FACTS}")))


def remove_recorded(root: Path) -> None:
    """Forget all cases that were."""
    for facts in root.glob(f"*/{_FACTS}"):
        shutil.rmtree(facts.parent)


def read_trace(root: Path, case: str) -> Trace | None:
    """The trace of a case, if that was run to its end."""
    return Trace(trace_folder(root, case)) if is_recorded(root, case) else None


def write_tensors(
    folder: Path, moment: str, step: int | None, tensors: Mapping[str, Array], reference: Path | None = None
) -> None:
    """Write the tensors of one moment.

    Most cases of a proof are equal in every bit, and a trace is many copies of the model. So a moment that the trace
    `reference` has with the same bits is a link to its file, which is neither written nor read again.

    Args:
        folder: of the trace.
        moment: that they are of.
        step: that they are of.
        tensors: by name.
        reference: the folder of the trace that this one has to equal.
    """
    arrays = {name: _as_real(np.ascontiguousarray(value)) for name, value in tensors.items()}
    file, digest = _tensor_file(folder, moment, step), _digest(arrays)
    file.unlink(missing_ok=True)  # rather than writing into a file that other traces may share
    if reference is not None and digest and digest == _read_digest(known := _tensor_file(reference, moment, step)):
        with suppress(OSError):  # a file system without links
            os.link(known, file)
            return
    save_file(arrays, file, {"digest": digest})


def _digest(arrays: Mapping[str, Array]) -> str:
    """Of names, dtypes, shapes and bits; empty where there is a NaN, which does not equal itself."""
    digest = xxhash.xxh3_128()
    for name, array in sorted(arrays.items()):
        if array.dtype.kind == "f" and array.size and np.isnan(array.min()):
            return ""
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.data if array.size else b"")
    return digest.hexdigest()


def _read_digest(file: Path) -> str:
    if not file.is_file():
        return ""
    with safe_open(file, "numpy") as opened:
        return str((opened.metadata() or {}).get("digest", ""))


def read_tensors(folder: Path, moment: str, step: int | None) -> dict[str, Array]:
    """The tensors of one moment; none where nothing was written."""
    file = _tensor_file(folder, moment, step)
    return _map_file(file) if file.is_file() else {}


def _as_real(value: Array) -> Array:
    """Real and imaginary parts side by side, since safetensors has no complex128."""
    return np.stack([value.real, value.imag], axis=-1) if np.iscomplexobj(value) else value


_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "<u1", "BOOL": "?"}


def _map_file(file: Path) -> dict[str, Array]:
    """The arrays of a file, mapped into memory instead of copied; what is changed in them stays in this process."""
    whole = np.memmap(file, np.uint8, "c").view(np.ndarray)
    begin = 8 + int.from_bytes(whole[:8].tobytes(), "little")
    header = json.loads(whole[8:begin].tobytes())
    header.pop("__metadata__", None)
    if not all(entry["dtype"] in _DTYPES for entry in header.values()):
        return dict(load_file(file))
    found = {}
    for name, entry in header.items():
        first, last = (begin + offset for offset in entry["data_offsets"])
        found[name] = whole[first:last].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return found


def write_facts(folder: Path, facts: RunFacts) -> None:
    """Write what is known beside the tensors; it is written last, so a trace with facts is a whole one."""
    (folder / _FACTS).write_text(json.dumps(asdict(facts)), encoding="utf-8")


def _tensor_file(folder: Path, moment: str, step: int | None) -> Path:
    where = "start" if step is None else f"step-{step}"
    return folder / f"{where} {moment}.safetensors".replace(" ", "-")
