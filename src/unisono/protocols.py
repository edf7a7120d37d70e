"""What only some tasks have: samples that share a row, losses across samples, totals, a carry, rows made ahead.

A task has one of these by defining its methods; it need not inherit from the protocol. The rest of Unisono asks through
the functions below, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from unisono.runtime.errors import ConfigError
from unisono.task import Batch, Context, Task

if TYPE_CHECKING:
    from torch import Tensor

CrossSampleMode = Literal["rows", "whole"]


@runtime_checkable
class Packable(Protocol):
    """A task whose samples can share a row (`data.packing`).

    A task may also have an attribute `capacity`: units that a row holds where `data.packing.length` is null.
    """

    def length(self, sample: Any) -> int:
        """Units (tokens, frames) that a sample takes of a packed row."""

    def cut(self, sample: Any, first: int, last: int) -> Any:
        """The units `first..last-1` of a sample, for itself; for samples longer than a packed row."""

    def pack(self, samples: Sequence[Any]) -> Any:
        """Samples that share a row, as one sample that `collate` takes; none of them may see another."""


@runtime_checkable
class Totals(Protocol):
    """A task whose loss needs sums over the whole global batch first, e.g. a product of means.

    A task that needs them under some settings only says so by an attribute `needs_totals`.
    """

    def totals(self, outputs: Any, batch: Batch, context: Context) -> dict[str, Tensor]:
        """Sums of these rows, under names of the task's own.

        All micro-batches make one forward pass without gradients before the first backward pass, with the same random
        draws as the second. What this returns is added up over all of them, and is a constant in `context.totals` of
        every `loss`.
        """


class CrossSample(Protocol):
    """A task whose loss looks across the rows of the global batch.

    Attributes:
        cross_sample: with "rows", `loss` is given rows and `context.global_batch`, and sums over pairs of one of its
            rows and any row. With "whole" it is given all rows, and sums over them; that is for what no row has a
            share of. None for a task that looks across rows under other settings only. Where a process has several
            micro-batches, a step begins with a pass without gradients.
    """

    cross_sample: CrossSampleMode | None

    def shared(self, batch: Batch) -> dict[str, Any]:
        """Arrays of these rows that a loss needs of all rows, e.g. their numbers; may be left out.

        The first axis of each is the row, and the others are the same in every micro-batch; so it is for what
        `outputs` returns, a tensor or a nested dict of them.
        """


@runtime_checkable
class Recurrent(Protocol):
    """A task that carries state from step to step, one entry per row *of the global batch*.

    It is saved with the checkpoint and follows its rows to any other layout.
    """

    def initial_carry(self, batch: Batch) -> dict[str, Any] | None:
        """The carry of rows before their first step: tensors whose first axis is the row."""


@runtime_checkable
class Prepared(Protocol):
    """A task whose rows can be made ahead, by `unisono data prepare`."""

    def preparation(self) -> dict[str, tuple[Any, Path]]:
        """What is made of each source, and the folder where no other is asked for; the only source is called ''.

        What is made is a `unisono.Preparation`.
        """


@runtime_checkable
class Predictive(Protocol):
    """A task that says what `unisono predict` writes of its rows; others have their outputs written as they are."""

    def predictions(self, outputs: Any, batch: Batch) -> Mapping[str, Any]:
        """Columns by name, each with a value for every row: tensors, arrays or lists; what is known of the rows, too.

        Args:
            outputs: what `Task.outputs` returned for a micro-batch.
            batch: the micro-batch, as `Task.collate` made it.
        """


def require_packable(task: Task) -> Packable:
    """The task, as one whose samples can share a row.

    Raises:
        ConfigError: where it has no `length`, `cut` and `pack`.
    """
    if isinstance(task, Packable):
        return task
    missing = [f"{name}()" for name in ("length", "cut", "pack") if not hasattr(task, name)]
    raise ConfigError(
        f"data.packing: samples of {type(task).__name__} cannot share a row, since it does not define "
        f"{', '.join(missing)}; define them (docs/data-packing.md), or leave data.packing=null"
    )


def packed_capacity(task: Task) -> int | None:
    """Units that a packed row of the task holds where `data.packing.length` is null; None where it does not say."""
    found: int | None = getattr(task, "capacity", None)
    return found


def needs_totals(task: Task) -> bool:
    """Whether the task's loss reads `context.totals`, as its settings are.

    Raises:
        ConfigError: where it says so, and does not define them.
    """
    asked = getattr(task, "needs_totals", None)
    defined = isinstance(task, Totals)
    if asked and not defined:
        raise ConfigError(
            f"{type(task).__name__} has needs_totals = True but does not define totals(); define it, or set "
            "needs_totals = False"
        )
    return defined and asked is not False


def compute_totals(task: Task, outputs: Any, batch: Batch, context: Context) -> dict[str, Tensor]:
    """What these rows contribute to the task's totals; nothing where it needs none."""
    return task.totals(outputs, batch, context) if needs_totals(task) and isinstance(task, Totals) else {}


def cross_sample_mode(task: Task) -> CrossSampleMode | None:
    """How the task's loss looks across the rows of the global batch; None where it does not.

    Raises:
        ConfigError: for a value that is none of them.
    """
    found: CrossSampleMode | None = getattr(task, "cross_sample", None)
    if found not in (None, "rows", "whole"):
        raise ConfigError(f"{type(task).__name__}.cross_sample is {found!r}; it can be None, 'rows' or 'whole'")
    return found


def shared_arrays(task: Task, batch: Batch) -> dict[str, Any]:
    """What a loss across samples needs of all rows, besides their outputs."""
    made: Mapping[str, Any] = task.shared(batch) if hasattr(task, "shared") else {}
    return dict(made)


def initial_carry(task: Task, batch: Batch) -> dict[str, Any] | None:
    """The carry of rows before their first step; None where the task has none."""
    return task.initial_carry(batch) if isinstance(task, Recurrent) else None


def find_preparations(task: Task) -> dict[str, tuple[Any, Path]]:
    """What can be made ahead of a task's rows, by source; errors as `Prepared.preparation` raises them.

    Raises:
        ConfigError: where nothing can.
    """
    if not isinstance(task, Prepared):
        raise ConfigError(
            f"nothing can be prepared for {type(task).__name__}: it does not define preparation() "
            "(docs/data-prepare.md)"
        )
    return task.preparation()
