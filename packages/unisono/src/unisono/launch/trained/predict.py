"""The verb `predict`, which every task has: rows in, and a table with predictions and known values out.

A task defines the columns by `predictions` (the protocol `Predictive`). Without it, a classifier gets `prediction`,
`probability` and `truth` (`launch.trained.class_columns`); for other tasks the columns are the tensors that `outputs`
returns, row by row, and the numbers in the batch, including targets. Only .jsonl and .parquet have arrays of any size:
in a text table, a cell of thousands of numbers helps nobody.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from unisono import protocols
from unisono.checkpoint.core import commit
from unisono.checkpoint.exchange.export import find_checkpoint
from unisono.config.batch_split import BatchSplit
from unisono.data.loading.loader import Loader
from unisono.data.loading.micro_batch import MicroBatch
from unisono.data.order.grouped import plan_evaluation
from unisono.data.order.mixture import Joined
from unisono.data.table_files import check_table_suffix, write_table
from unisono.engines import rules
from unisono.launch.trained.class_columns import describe_classes
from unisono.launch.trained.run import Run
from unisono.optim import schedules
from unisono.runtime.communication.communicator import ProcessInfo
from unisono.runtime.errors import ConfigError, DataError
from unisono.task import Batch, Context, Loss, Source, Task, expand_counts, run_setup

RowSelection = Literal["held_out", "training", "all"]
TableFormat = Literal["csv", "tsv", "jsonl", "parquet"]
Forward = Callable[[MicroBatch, Context], tuple[dict[str, Any], Loss | None]]
_ARRAY_SUFFIXES = (".jsonl", ".parquet")
_MAX_CELL = 64  # numbers of an output in a cell of the other formats


def predict(
    run: Run,
    rows: RowSelection = "held_out",
    out: Path | None = None,
    ema: bool = False,
    step: int | None = None,
    micro_batch: int = 32,
    device: str = "auto",
    format: TableFormat | None = None,
    escape: bool = True,
) -> Iterator[str]:
    """Predict rows with a run's newest checkpoint: a table with one line per row, including what is known of it.

    Args:
        run: The run's folder; settings of `data` may be overridden, e.g. data.path=FILE.
        rows: Which rows of the data: held_out, training or all.
        out: Table to write: .csv, .tsv, .jsonl or .parquet; by default predictions.csv in the run's folder.
        ema: Use the exponential moving average of the weights.
        step: Use the checkpoint of this step instead of the newest.
        micro_batch: Rows to compute at a time.
        device: cpu, cuda, …; auto uses an accelerator if there is one.
        format: Of the table, without out: csv, tsv, jsonl or parquet. The last two have outputs of any size as arrays,
            a classifier's logits, and targets as wide as the outputs.
        escape: In csv and tsv, put `'` before texts that a spreadsheet would compute (=, +, -, @), and escape control
            characters.
    """
    if out is not None and format is not None and out.suffix != f".{format}":
        raise ConfigError(f"out={out} ends in '{out.suffix}', but format={format}; give only one of them")
    out = out or run.folder / f"predictions.{format or 'csv'}"
    check_table_suffix(out)
    parts = select_sources(run.task, rows)
    selection = ColumnSelection(run.task, arrays=out.suffix in _ARRAY_SUFFIXES)
    columns, values = build_table(run, parts, selection, ema=ema, step=step, micro_batch=micro_batch, device=device)
    if not isinstance(run.task, protocols.Predictive):
        columns = selection.without_wide(describe_classes(columns, with_outputs=selection.arrays))
    yield str(write_table(out, columns, escape=escape))
    if selection.left_out:
        wide = ", ".join(f"{name} ({size} numbers a row)" for name, size in selection.left_out.items())
        yield f"not in {out.name}: {wide}; format=parquet has arrays"
    for name, value in values.items():
        yield f"{name}: {value:.6f}"


def select_sources(task: Task, rows: RowSelection) -> dict[str, Source]:
    """Return the requested rows by origin: `held_out`, or the names of the training sources.

    Raises:
        DataError: If there are none.
    """
    run_setup(task)
    found: dict[str, Source] = {}
    if rows in ("training", "all"):
        data = task.data()
        found |= dict(data) if isinstance(data, Mapping) else {"training": data}
    if rows in ("held_out", "all") and (source := task.held_out()) is not None:
        found["held_out"] = source
    found = {name: source for name, source in found.items() if len(source)}
    if not found:
        raise DataError(f"rows={rows}: {type(task).__name__} has no such rows; use rows=training or rows=all")
    return found


def build_table(
    run: Run,
    parts: Mapping[str, Source],
    selection: ColumnSelection,
    *,
    ema: bool,
    step: int | None,
    micro_batch: int,
    device: str,
) -> tuple[dict[str, list[Any]], dict[str, float]]:
    """Return the predictions as columns, and loss and metrics over these rows; other arguments as for `predict`."""
    made, total = 0, 1
    if run.is_trained:
        checkpoint = commit.open_checkpoint(find_checkpoint(run.folder, step))
        made, total = checkpoint.step, int(checkpoint.state["total"])
    scalars = schedules.ScheduledScalars(run.config, total)(made)
    context = Context(made, training=False, scalars=scalars)
    joined, scores = Joined(parts), _Scores(run.task)
    columns: dict[str, list[Any]] = defaultdict(list)
    with _open_forward(run, selection, device, ema, step) as forward:
        for micro in read_batches(run, joined, micro_batch):
            shown, loss = forward(micro, context)
            scores.add(micro, loss)
            names = [joined.name(int(row)) for row in micro.rows]
            entries: dict[str, Any] = {"row": [row for _, row in names], **shown}
            if len(parts) > 1:
                entries = {"source": [name for name, _ in names], **entries}
            for name, values in entries.items():
                columns[name] += _to_list(values)
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        described = ", ".join(f"{name} has {count} rows" for name, count in lengths.items())
        raise ConfigError(f"{type(run.task).__name__}.predictions returned columns of different lengths: {described}")
    return dict(columns), scores.summary()


@contextmanager
def _open_forward(run: Run, selection: ColumnSelection, device: str, ema: bool, step: int | None) -> Iterator[Forward]:
    """Columns and loss of a micro-batch by the run's model, computed as the run evaluates, in its precision."""
    task, seed, kind = run.task, run.config.run.seed, run.config.train.precision
    load_model = partial(run.load_model, ema=ema, step=step, precision=kind)
    if task.engine == "jax":
        from unisono.engines.jax.numerics import precision
        from unisono.engines.jax.rows import RowForward as JaxForward

        switches = precision.pin(kind)
        try:
            jax_forward = JaxForward(task, load_model(), seed, kind, device)
            task.kernels(jax_forward.device.platform, kind)

            def compute(micro: MicroBatch, context: Context) -> tuple[dict[str, Any], Loss | None]:
                outputs, loss = jax_forward(micro, context)
                return selection(outputs, micro.arrays), loss

            yield compute
        finally:
            precision.unpin(switches)
        return
    from unisono.engines.torch.rows import RowForward

    forward = RowForward(task, seed, kind, device, load_model)
    yield lambda micro, context: forward(micro, context, lambda outputs: selection(outputs, micro.arrays))


def read_batches(run: Run, source: Source, micro_batch: int) -> Iterator[MicroBatch]:
    """Return all rows in order, built as for an evaluation."""
    size = min(micro_batch, len(source))
    plan = plan_evaluation(source, run.config, size, len(source))
    loader = Loader.from_config(
        run.task, source, plan, BatchSplit.create(size, 1, size), ProcessInfo(), run.config, purpose="eval"
    )
    try:
        for batches in loader.steps():
            yield from batches
    finally:
        loader.close()


class ColumnSelection:
    """Which outputs, and which of the batch's numbers, become columns.

    Args:
        task: Whose outputs they are.
        arrays: Whether the format has arrays of any size.

    Attributes:
        left_out: Outputs with too many numbers for a cell, and how many.
    """

    def __init__(self, task: Task, arrays: bool) -> None:
        self._task = task
        self.arrays = arrays
        self.left_out: dict[str, int] = {}
        self._outputs = set[str]()  # those that are columns

    def __call__(self, outputs: Any, batch: Batch) -> dict[str, Any]:
        """Return the task's predictions for a micro-batch; by default its outputs and the numbers in the batch."""
        if isinstance(self._task, protocols.Predictive):
            return dict(self._task.predictions(outputs, batch))
        from unisono.engines.nested import leaves

        rows = len(next(iter(batch.values())))
        sizes = {name: _row_size(value, rows) for name, value in batch.items()}
        # A classifier's logits, however many, become three columns once all rows are there (`describe_classes`).
        may_be_classes = any(size == 1 and "int" in str(batch[name].dtype) for name, size in sizes.items())
        shown, widest = dict[str, Any](), 1
        for name, value in leaves(outputs):
            size = _row_size(value, rows)
            if size is None:
                continue
            if self.arrays or size <= _MAX_CELL or (may_be_classes and value.ndim == 2):
                shown[name or "output"], widest = value, max(widest, size)
            else:
                self.left_out[name or "output"] = size
        self._outputs |= shown.keys()
        self._refuse_without(shown)
        known_size = widest if self.arrays else 1
        known = {name: batch[name] for name, size in sizes.items() if size is not None and size <= known_size}
        return {**shown, **{f"true_{name}" if name in shown else name: value for name, value in known.items()}}

    def without_wide(self, columns: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """The columns that fit into cells; all of them where the format has arrays."""
        sizes = {name: np.size(values[0]) if values else 0 for name, values in columns.items()}
        wide = {} if self.arrays else {name: size for name, size in sizes.items() if size > _MAX_CELL}
        self.left_out |= wide
        if wide:
            self._refuse_without(self._outputs - wide.keys())
        return {name: values for name, values in columns.items() if name not in wide}

    def _refuse_without(self, shown: Collection[str]) -> None:
        if shown:
            return
        name = type(self._task).__name__
        if self.left_out:
            raise ConfigError(
                f"{name}.outputs returns {max(self.left_out.values())} numbers a row, too many for a cell of a text "
                f"table (at most {_MAX_CELL}); format=parquet writes them as arrays, or define predictions(outputs, "
                "batch), which returns the columns"
            )
        raise ConfigError(
            f"{name}.outputs returns no tensor with a value for each row, so there is nothing to write; define "
            "predictions(outputs, batch), which returns the columns"
        )


def _row_size(value: Any, rows: int) -> int | None:
    """How many numbers an array has for each row; None if it is not an array of this many rows."""
    shape = tuple(getattr(value, "shape", ()))
    return int(np.prod(shape[1:], dtype=np.int64)) if shape and shape[0] == rows else None


def _to_list(values: Any) -> list[Any]:
    """Convert a column to a list of numbers, texts, lists of numbers, or (where these are long) arrays."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = (values.float() if str(values.dtype) == "torch.bfloat16" else values).numpy()
    values = np.asarray(values) if hasattr(values, "dtype") else values
    if hasattr(values, "ndim") and values.ndim > 1 and values.shape[1:] == (1,):
        values = values[:, 0]
    if hasattr(values, "ndim") and values.ndim > 1 and values[:1].size > _MAX_CELL:
        return list(values)  # a list of numbers would take eight times the memory
    return list(values.tolist()) if hasattr(values, "tolist") else list(values)


class _Scores:
    """Loss and metrics over all rows, as in an evaluation; none if a loss compares rows with each other."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._terms: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))  # (sum, count)
        self._metrics: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        self._weights: dict[str, float] = {}

    def add(self, micro: MicroBatch, loss: Loss | None) -> None:
        """Add the task's loss and metrics of a micro-batch."""
        if loss is None:
            return
        self._weights |= dict(loss.weights)
        counts = expand_counts(micro.counts, loss.sums)
        terms = {name: (total, counts[name]) for name, total in loss.sums.items()}
        for sums, added in ((self._terms, terms), (self._metrics, loss.metrics)):
            for name, (total, count) in added.items():
                sums[name] = sums[name][0] + float(total), sums[name][1] + float(count)

    def summary(self) -> dict[str, float]:
        """Return the values by name, as reported by `Task.summary`; of rows without targets, nothing."""
        if not any(count for _, count in self._terms.values()):
            return {}
        values = rules.build_step_result(self._terms, self._weights, self._metrics, work={}).values
        empty = {name for name, (_, count) in self._metrics.items() if not count}
        return {name: value for name, value in self._task.summary(values).items() if name not in empty}
