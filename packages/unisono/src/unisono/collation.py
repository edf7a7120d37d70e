"""How samples become a micro-batch where a task does not say: columns are stacked, and what cannot be is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np

from unisono.runtime.errors import DataError


class SampleColumns(Sequence[dict[str, Any]]):
    """Samples of one structure, held by field: what `Vectorised.sample_batch` best returns.

    >>> samples = SampleColumns(x=np.arange(6).reshape(3, 2), kind=["a", "b", "c"])
    >>> len(samples), samples[1]
    (3, {'x': array([2, 3]), 'kind': 'b'})

    Args:
        fields: arrays or lists by name, whose first axis is the sample.
    """

    def __init__(self, **fields: Any) -> None:
        sizes = {name: len(values) for name, values in fields.items()}
        if not sizes or len(set(sizes.values())) > 1:
            raise DataError(f"SampleColumns: all fields must have an entry for each sample; they have {sizes}")
        self.fields: dict[str, Any] = fields
        self._size = next(iter(sizes.values()))

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, number: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, number: slice) -> SampleColumns: ...

    def __getitem__(self, number: int | slice) -> dict[str, Any] | SampleColumns:
        """A sample, or some of them."""
        if isinstance(number, slice):
            return SampleColumns(**{name: values[number] for name, values in self.fields.items()})
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        return {name: values[number] for name, values in self.fields.items()}


def stack_samples(samples: Sequence[Any], fields: Sequence[str], task: str) -> dict[str, Any]:
    """The default of `Task.collate`: of dicts of equally shaped arrays, or of tuples, an array for each name.

    Args:
        samples: at least one; `SampleColumns` are taken as they are.
        fields: the names of the items of a tuple.
        task: its name, for errors.

    Raises:
        DataError: for samples that cannot be stacked.
    """
    if isinstance(samples, SampleColumns):
        columns = {name: np.asarray(values) for name, values in samples.fields.items()}
        return {name: c.astype(object) if c.dtype.kind in "US" else c for name, c in columns.items()}
    if not isinstance(samples[0], Mapping):
        samples = [_name_items(sample, fields, task) for sample in samples]
    for sample in samples:  # otherwise the first sample would decide the batch's keys
        if sample.keys() != samples[0].keys():
            raise DataError(
                f"{task}.sample returned the keys {sorted(samples[0])} for one row and {sorted(sample)} for another; "
                "return the same keys, or define collate()"
            )
    return {name: _stack(name, [sample[name] for sample in samples], task) for name in samples[0]}


def _name_items(sample: Any, fields: Sequence[str], task: str) -> dict[str, Any]:
    """A sample that is a tuple, as torch's datasets give it, by the names of its items."""
    if not isinstance(sample, tuple | list):
        raise DataError(
            f"{task}.sample returned a {type(sample).__name__}; the default collate stacks dicts of arrays. Return a "
            "dict, or define collate()."
        )
    if not fields:
        shown = ", ".join(f'"{name}"' for name in ("x", "y", "z", "w")[: len(sample)])
        raise DataError(
            f"{task}.sample returned a tuple of {len(sample)}; name its items in the class, as in fields = "
            f"({shown or chr(34) + 'x' + chr(34)},), or return a dict"
        )
    if len(sample) != len(fields):
        raise DataError(
            f"{task}.sample returned a tuple of {len(sample)}, and {task}.fields has {len(fields)} names "
            f"({', '.join(fields)}); give each item a name"
        )
    return dict(zip(fields, sample, strict=True))


def _stack(name: str, values: Sequence[Any], task: str) -> Any:
    """One column of a batch. Strings, None and other objects stay a NumPy array of objects, on the host."""
    arrays = [np.asarray(value) for value in values]
    if any(array.dtype.kind in "OUS" for array in arrays):
        if any(array.ndim for array in arrays):
            raise DataError(
                f"{task}.sample returned lists of strings or None in '{name}', which make no array; turn them into "
                "numbers in sample(), or define collate()"
            )
        column = np.empty(len(values), dtype=object)
        column[:] = [value.item() if isinstance(value, np.generic | np.ndarray) else value for value in values]
        return column
    if len({array.shape for array in arrays}) > 1:
        shapes = sorted({array.shape for array in arrays})
        raise DataError(
            f"{task}.sample returned arrays of different shapes in '{name}' ({shapes[0]} and {shapes[1]}); give them "
            "one shape, or define collate()"
        )
    return np.stack(arrays)
