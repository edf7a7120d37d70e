"""Optional features of a task: vectorised samples, packing, losses across samples, totals, recurrent state and more.

A task has a feature if it defines its methods; it need not inherit from the protocol. The rest of Unisono checks for
features only through the functions below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, runtime_checkable

from unisono.runtime.errors import ConfigError
from unisono.task import Batch, Context, SampleContexts, Task

if TYPE_CHECKING:
    from torch import Tensor

CrossSampleMode = Literal["rows", "whole"]
ReadOutputs = Callable[[Sequence[Any], Callable[[Any, Any], Any]], Any]  # see `RunInfo.read_outputs`


@runtime_checkable
class Vectorised(Protocol):
    """A task that builds all samples of a micro-batch in one call, which is much faster where each is small.

    It still defines `sample`: single samples are built by it (to find the one that cannot be built, to fill packed
    rows), and the first samples of a run are built both ways and compared.
    """

    def sample_batch(self, records: Sequence[Any], contexts: SampleContexts) -> Sequence[Any]:
        """The samples of records: number `i` equals `self.sample(records[i], contexts[i])`, bit for bit.

        Args:
            records: what the source's `__getitems__(rows)` returns, as in PyTorch; a list of records if it has none.
            contexts: of each sample.

        Returns:
            A sequence that `collate` gets; best `unisono.SampleColumns`, which the default `collate` returns as it is.
        """


@runtime_checkable
class Packable(Protocol):
    """A task whose samples can be packed into shared rows (`data.packing`).

    It may also have an attribute `capacity`: the number of units in a row if `data.packing.length` is null.
    """

    def length(self, sample: Any) -> int:
        """The number of units (tokens, frames) that a sample occupies in a packed row."""

    def cut(self, sample: Any, first: int, last: int) -> Any:
        """The units `first..last-1` of a sample as a sample; called for samples longer than a packed row."""

    def pack(self, samples: Sequence[Any]) -> Any:
        """Combine the samples of a row into one sample for `collate`; none of them may attend to another."""


@runtime_checkable
class Totals(Protocol):
    """A task whose loss depends on sums over the whole global batch, e.g. through a product of means.

    If it needs them only under some settings, it sets the attribute `needs_totals` accordingly.
    """

    def totals(self, outputs: Any, batch: Batch, context: Context) -> dict[str, Tensor]:
        """Sums over these rows, under names of your choice.

        Before the first backward pass, all micro-batches run one forward pass without gradients, with the same random
        draws as the second. The sums over all of them are then available to every `loss` as constants, in
        `context.totals`.
        """


class CrossSample(Protocol):
    """A task whose loss looks across the rows of the global batch.

    Attributes:
        cross_sample: with "rows", `loss` gets some rows and `context.global_batch`, and sums over pairs of one of its
            rows and any row of the global batch. With "whole", it gets all rows and sums over them; for losses that
            are not a sum over rows. None if the task looks across rows only under other settings. If a process has
            several micro-batches, each step begins with a forward pass without gradients.
    """

    cross_sample: CrossSampleMode | None

    def shared(self, batch: Batch) -> dict[str, Any]:
        """Arrays that a loss needs for all rows besides their outputs, e.g. row numbers; optional.

        The first axis of each is the row; the other axes must have the same size in every micro-batch. The same
        applies to what `outputs` returns: a tensor or a nested dict of tensors.
        """


@runtime_checkable
class Recurrent(Protocol):
    """A task that carries state from step to step, one entry per row *of the global batch*.

    The state is saved in checkpoints and stays with its rows when the layout changes.
    """

    def initial_carry(self, batch: Batch) -> dict[str, Any] | None:
        """The carry of rows before their first step: tensors whose first axis is the row."""


@runtime_checkable
class Prepared(Protocol):
    """A task whose rows can be computed in advance, by `unisono data prepare`."""

    def preparation(self) -> dict[str, tuple[Any, Path]]:
        """A `unisono.prepare.Preparation` and its default output folder, by source; a single source is named ''."""


@runtime_checkable
class Predictive(Protocol):
    """A task that defines what `unisono predict` writes.

    For other tasks it writes their outputs; for a classifier the likeliest class, its probability and the true class.
    """

    def predictions(self, outputs: Any, batch: Batch) -> Mapping[str, Any]:
        """Columns by name, each with a value per row: tensors, arrays or lists. May include inputs and targets.

        Args:
            outputs: what `Task.outputs` returned for a micro-batch.
            batch: the micro-batch, as `Task.collate` made it.
        """


@runtime_checkable
class Exportable(Protocol):
    """A task that defines what an exported model computes (`unisono export to=onnx`); of others, it is `outputs`."""

    def inference_inputs(self, batch: Batch) -> Mapping[str, Any]:
        """The inputs of the exported model by name, of a micro-batch as `Task.collate` made it; arrays."""

    def infer(self, model: Any, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the exported model returns, by name: tensors computed by torch from the inputs, without a gradient.

        Args:
            model: what `Task.build` returned, with its weights.
            inputs: as from `inference_inputs`, as tensors; any axis may have another size.
        """


@runtime_checkable
class Illustrated(Protocol):
    """A task that shows something after each evaluation: texts, pictures, tables.

    It keeps what it wants to show while it computes held-out rows (in `loss`, where `context.training` is false), on
    the CPU. In JAX these functions are compiled and can keep nothing; a callback's `on_save` can load the model.
    """

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> Mapping[str, Any] | None:
        """Called on rank 0 alone, so it may not communicate with other processes.

        Args:
            step: updates made.
            values: loss and metrics on the held-out rows.

        Returns:
            What to show, by name: a text, a picture (an array of bytes or of numbers from 0 to 1, with the shape (rows,
            columns) or (rows, columns, 3 or 4), or a PNG as bytes), a table (a list of dictionaries), or the path of a
            PNG or WAV file.
        """


class Benchmark(Protocol):
    """Something to measure in an evaluation beside the held-out rows, by asking the model.

    Attributes:
        name: of the setting that asks for it, for messages.
        prefix: with which the names of its values begin.
    """

    name: str
    prefix: str

    def measure(self, ask: Callable[[Sequence[Any]], list[Any]]) -> Mapping[str, float]:
        """The values by name; called on rank 0 alone, in a thread of its own.

        Args:
            ask: returns what `answer` makes of rows, one answer per row. Rows and answers are JSON.
        """

    def answer(self, rows: Sequence[Any], read_outputs: ReadOutputs) -> list[Any]:
        """An answer for each of some rows; on every process, each with other rows, so all make as many passes.

        Args:
            rows: some of those that `measure` has asked for.
            read_outputs: as of `RunInfo`.
        """


@runtime_checkable
class Benchmarked(Protocol):
    """A task that can run the benchmarks of its field (`eval.harness`)."""

    def harness(self, names: Sequence[str], limit: int | None) -> Benchmark:
        """The benchmarks of these names.

        Args:
            names: of `eval.harness`.
            limit: examples of each; None for all.

        Raises:
            ConfigError: for a name that there is not, or where a package is missing.
        """


class WeightsBenchmark(Protocol):
    """Something to measure in an evaluation by a program of its own, which loads the model from a folder.

    Attributes:
        name: of the setting that asks for it, for messages.
        prefix: with which the names of its values begin.
    """

    name: str
    prefix: str

    def measure_folder(self, folder: Path) -> Mapping[str, float]:
        """The values by name; called on rank 0 alone, in a thread of its own.

        Args:
            folder: with the weights as `unisono export` writes them; removed afterwards. Others may be put beside them.
        """

    def stop(self) -> None:
        """End whatever `measure_folder` has started, at once; called on rank 0, also where nothing runs or runs yet."""


@runtime_checkable
class Environments(Protocol):
    """A task whose model can be evaluated in environments (`eval.environment`)."""

    def environment(self, name: str, limit: int | None) -> WeightsBenchmark:
        """The environment of this name.

        Args:
            name: of `eval.environment`.
            limit: tasks of it; None for all.

        Raises:
            ConfigError: for a name that there is not, or where a package is missing.
        """


def require_environments(task: Task) -> Environments:
    """The task as an `Environments`.

    Raises:
        ConfigError: if it does not define `environment`.
    """
    if isinstance(task, Environments):
        return task
    raise ConfigError(
        f"eval.environment: {type(task).__name__} has no environments, since it does not define environment(); leave "
        "it null"
    )


def require_benchmarks(task: Task) -> Benchmarked:
    """The task as a `Benchmarked`.

    Raises:
        ConfigError: if it does not define `harness`.
    """
    if isinstance(task, Benchmarked):
        return task
    raise ConfigError(
        f"eval.harness: {type(task).__name__} has no benchmarks, since it does not define harness(); leave it empty"
    )


def require_packable(task: Task) -> Packable:
    """The task as a `Packable`.

    Raises:
        ConfigError: if it does not define `length`, `cut` and `pack`.
    """
    if isinstance(task, Packable):
        return task
    missing = [f"{name}()" for name in ("length", "cut", "pack") if not hasattr(task, name)]
    raise ConfigError(
        f"data.packing: samples of {type(task).__name__} cannot share a row, since it does not define "
        f"{', '.join(missing)}; define them (docs/data-packing.md), or leave data.packing=null"
    )


def packed_capacity(task: Task) -> int | None:
    """The number of units in a packed row if `data.packing.length` is null; None if the task does not define it."""
    found: int | None = getattr(task, "capacity", None)
    return found


@dataclass(frozen=True)
class TaskFeatures:
    """What a task can do beyond the methods that every task has, under its settings.

    Attributes:
        cross_sample: how its loss looks across the rows of the global batch; None if it does not.
        totals: the task, if its loss reads `context.totals`.
        recurrent: the task, if it carries state from step to step.
        sharing: the task, if its loss across samples needs arrays of all rows besides their outputs.
    """

    cross_sample: CrossSampleMode | None
    totals: Totals | None
    recurrent: Recurrent | None
    sharing: CrossSample | None

    @property
    def has_local_loss(self) -> bool:
        """Whether the loss of a micro-batch is known without the others."""
        return self.cross_sample is None and self.totals is None

    def compute_totals(self, outputs: Any, batch: Batch, context: Context) -> dict[str, Tensor]:
        """These rows' contribution to the task's totals; empty if it needs none."""
        return {} if self.totals is None else self.totals.totals(outputs, batch, context)

    def initial_carry(self, batch: Batch) -> dict[str, Any] | None:
        """The carry of rows before their first step; None if the task is not recurrent.

        Raises:
            ConfigError: if it has no names.
        """
        carry: Any = None if self.recurrent is None else self.recurrent.initial_carry(batch)
        if carry is None:
            return None
        if not isinstance(carry, Mapping):
            raise ConfigError(
                f"{type(self.recurrent).__name__}.initial_carry returns a {type(carry).__name__}; it has to be a dict "
                'of tensors by name, whose first axis is the row, e.g. {"hidden": …}, as has Loss(carry=…)'
            )
        return dict(carry)

    def shared_arrays(self, batch: Batch) -> dict[str, Any]:
        """What a loss across samples needs for all rows besides their outputs."""
        return {} if self.sharing is None else dict(self.sharing.shared(batch))


def resolve_features(task: Task) -> TaskFeatures:
    """What a task can do; whoever computes with it resolves this once.

    Raises:
        ConfigError: for a `cross_sample` that there is not, or `needs_totals` without `totals`.
    """
    crosses: CrossSampleMode | None = getattr(task, "cross_sample", None)
    if crosses not in (None, "rows", "whole"):
        raise ConfigError(f"{type(task).__name__}.cross_sample is {crosses!r}; it can be None, 'rows' or 'whole'")
    declared = getattr(task, "needs_totals", None)
    totals = task if isinstance(task, Totals) else None
    if declared and totals is None:
        raise ConfigError(
            f"{type(task).__name__} has needs_totals = True but does not define totals(); define it, or set "
            "needs_totals = False"
        )
    return TaskFeatures(
        crosses,
        None if declared is False else totals,
        task if isinstance(task, Recurrent) else None,
        cast(CrossSample, task) if hasattr(task, "shared") else None,
    )


def find_preparations(task: Task) -> dict[str, tuple[Any, Path]]:
    """The preparations of a task's rows, by source; errors of `Prepared.preparation` propagate.

    Raises:
        ConfigError: if the task defines none.
    """
    if not isinstance(task, Prepared):
        raise ConfigError(
            f"nothing can be prepared for {type(task).__name__}: it does not define preparation() "
            "(docs/data-prepare.md)"
        )
    return task.preparation()
