"""Previews the samples of a run from any position, for any layout, even one you do not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unisono.config.batch_split import BatchSplit
from unisono.config.schema.run import RunConfig
from unisono.data.order.mixture import Joined
from unisono.data.order.plan import rows_of_micro_batches
from unisono.data.order.planning import build_plan, build_source
from unisono.runtime.display import text_table
from unisono.runtime.errors import ConfigError
from unisono.task import Task

_WIDTH = 60  # characters of a record


@dataclass(frozen=True)
class PreviewRow:
    """A sample and its place in a run.

    Attributes:
        position: number of rows of the run before it; samples packed into one row share it.
        step: number of updates before it is consumed.
        slot: row of the global batch.
        rank: of the process that consumes it.
        micro_batch: number of the micro-batch in the global batch.
        source: its name; empty if there is only one source.
        row: of its source.
        epoch: number of passes over its source before.
        units: the first unit, and one past the last, if the sample was cut; None for all.
        record: the source's record, abbreviated.
    """

    position: int
    step: int
    slot: int
    rank: int
    micro_batch: int
    source: str
    row: int
    epoch: int
    units: tuple[int, int] | None
    record: str


def preview(task: Task, config: RunConfig, position: int, count: int, world_size: int) -> list[PreviewRow]:
    """The samples of the next rows of a run.

    Args:
        task: what to train.
        config: of the run; its layout may have another world size.
        position: number of rows of the run before the first one shown.
        count: number of rows of the global batch; a packed row contains several samples.
        world_size: number of processes of the layout in question.

    Raises:
        ConfigError: for a position that the run does not have, or an impossible layout.
    """
    train = config.train
    micro_batch, share = config.layout.micro_batch, train.global_batch // world_size
    usable = isinstance(micro_batch, int) and (not share or share % micro_batch == 0)  # with this number of processes
    split = BatchSplit.create(train.global_batch, world_size, micro_batch if usable else None)
    source = build_source(task, config, world_size)
    plan = build_plan(task, source, config, world_size)
    length = (plan.steps - 1) * train.global_batch + plan.rows(plan.steps - 1)
    if not 0 <= position < length:
        raise ConfigError(f"position={position} is outside this run's {length} rows; choose 0 to {length - 1}")
    if count < 1:
        raise ConfigError(f"count={count}: choose at least 1 row")
    shown: list[PreviewRow] = []
    end = min(position + count, length)
    while position < end:
        step, first = divmod(position, train.global_batch)
        of_step = [cut for rank in range(world_size) for cut in rows_of_micro_batches(plan, split, step, rank)]
        numbers = {slot: number for number, own, _ in of_step for slot in own}
        last = min(first + end - position, train.global_batch)
        taken = plan.samples(step, range(first, last))
        for slot, row, epoch, begin, stop in taken:
            name, inside = source.name(row) if isinstance(source, Joined) else ("", row)
            try:
                record = abbreviate(source[row])
            except Exception as error:
                record = abbreviate(f"cannot be read: {type(error).__name__}: {error}", 2 * _WIDTH)
            number = numbers[slot]
            shown.append(
                PreviewRow(
                    position=step * train.global_batch + slot,
                    step=step,
                    slot=slot,
                    rank=number // split.passes,
                    micro_batch=number,
                    source=name,
                    row=inside,
                    epoch=epoch,
                    units=None if stop < 0 else (begin, stop),
                    record=record,
                )
            )
        position += last - first
    return shown


def format_table(shown: Sequence[PreviewRow], width: int | None = None) -> list[str]:
    """Preview rows as the lines of a table, for a terminal of `width`."""
    names = ["position", "step", "slot", "rank", "micro_batch", "source", "row", "epoch", "units", "record"]
    rows = [[_format_cell(getattr(sample, name)) for name in names] for sample in shown]
    columns = [[name, *column] for name, column in zip(names, zip(*rows, strict=True), strict=True)]
    kept = [column for column in columns if any(column[1:])]
    aligned = "".join("<" if column[0] in ("source", "record") else ">" for column in kept)
    head, *lines = zip(*kept, strict=True)
    return text_table.format_table(head, lines, left=aligned, width=width)


def abbreviate(record: Any, width: int = _WIDTH) -> str:
    """The beginning of a record, in one line.

    >>> abbreviate({"text": "Two lines", "tokens": np.arange(5)})
    "text='Two lines' tokens=[0 1 2 3 4]"
    """
    if isinstance(record, Mapping):
        text = " ".join(f"{name}={abbreviate(value, max(8, width // len(record)))}" for name, value in record.items())
    elif isinstance(record, bytes | bytearray | memoryview):
        text = f"{len(record)} bytes"
    elif isinstance(record, str):
        text = repr(record[: width + 1])
    elif hasattr(record, "shape") and len(record.shape):
        flat, size = np.asarray(record).reshape(-1), " × ".join(map(str, record.shape))
        size = f" ({size})" if len(record.shape) > 1 or len(flat) > width // 2 else ""
        text = " ".join(map(str, flat[: width // 2].tolist()))
        if len(text) + len(size) + 2 > width or len(flat) > width // 2:
            text = text[: max(1, width - len(size) - 4)].rsplit(" ", 1)[0] + " …"
        return f"[{text}]{size}"
    else:
        text = repr(record)
    return text if len(text) <= width else text[: width - 1] + "…"


def _format_cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value[0]}:{value[1]}" if isinstance(value, tuple) else str(value)
