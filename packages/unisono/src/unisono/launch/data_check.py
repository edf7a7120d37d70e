"""What `unisono check` warns of in the data: nothing that a start refuses, but hardly ever what somebody wants.

It looks at records as they are read; where there are many, at evenly spaced ones, for a few seconds at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic
from typing import Any

import numpy as np

from unisono.task import Batch, Source, Task, expand_counts, run_setup

CLASS_NAMES = ("label", "labels", "target", "targets", "class", "y")  # of columns, where one has to guess
_MOST_ROWS, _MOST_SECONDS = 5000, 3.0  # that are looked at in each source
_MOST_NULLS = 0.01  # share of a text column
_MOST_NAMED = 5  # classes


def find_data_warnings(task: Task) -> Iterator[str]:
    """Sentences about a task's rows: texts that are missing, and classes that no held-out row has."""
    run_setup(task)
    data, held_out = task.data(), task.held_out()
    sources: dict[str, Source] = dict(data) if isinstance(data, Mapping) else {"the rows to train on": data}
    seen = {name: _read_some(source) for name, source in sources.items()}
    for name, records in seen.items():
        yield from describe_nulls(name, records)
    if held_out is None or not len(held_out):
        return
    evaluated = _read_some(held_out)
    yield from describe_nulls("the held-out rows", evaluated)
    trained = [record for records in seen.values() for record in records]
    whole = len(evaluated) == len(held_out) and len(trained) == sum(map(len, sources.values()))
    if whole:  # a class may be among the rows that were not looked at
        yield from describe_missing_classes(trained, evaluated)


def describe_nulls(name: str, records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A sentence for each text column in which more than one value in a hundred is null."""
    for column in records[0] if records else ():
        values = [record.get(column) for record in records]
        nulls = sum(value is None for value in values)
        if nulls > _MOST_NULLS * len(values) and any(isinstance(value, str) for value in values):
            yield (
                f"{name}: {nulls} of {len(values)} rows have no text in the column '{column}' (null); is it the right "
                "column?"
            )


def describe_missing_classes(
    trained: Sequence[Mapping[str, Any]], evaluated: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """A sentence for a column of classes of which some are trained and never evaluated."""
    for column in CLASS_NAMES:
        there, here = _classes(trained, column), _classes(evaluated, column)
        missing = sorted(there.keys() - here.keys(), key=str)
        if here and missing:
            shown = ", ".join(f"{one} ({there[one]} to train on)" for one in missing[:_MOST_NAMED])
            more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
            several = "have" if len(missing) > 1 else "has"
            yield f"{len(missing)} of {len(there)} classes {several} no held-out row ('{column}'): {shown}{more}"


def describe_empty_counts(task: Task, arrays: Batch, terms: Sequence[str]) -> Iterator[str]:
    """A sentence for each term of the loss that counts nothing in the first micro-batch."""
    for name, count in expand_counts(task.counts(arrays), terms).items():
        if not count:
            yield f"the term '{name}' counts nothing in the first micro-batch; does its mask match anything?"


def _classes(records: Sequence[Mapping[str, Any]], column: str) -> Counter[Any]:
    """How often each class is there; empty if the column is missing or has other values."""
    values = [record.get(column) for record in records]
    plain = [value.item() if isinstance(value, np.generic) else value for value in values]
    return Counter(plain) if all(isinstance(value, int | str) for value in plain) else Counter()


def _read_some(source: Source) -> list[Mapping[str, Any]]:
    """Records of evenly spaced rows; none if they are not mappings, or cannot be read, which a start reports."""
    rows = np.unique(np.linspace(0, len(source) - 1, min(len(source), _MOST_ROWS)).astype(np.int64)).tolist()
    records, began = list[Mapping[str, Any]](), monotonic()
    for row in rows:
        try:
            record = source[row]
        except Exception:
            return []
        if not isinstance(record, Mapping):
            return []
        records.append(record)
        if monotonic() > began + _MOST_SECONDS:
            break
    return records
