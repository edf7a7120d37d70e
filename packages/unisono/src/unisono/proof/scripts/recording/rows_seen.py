"""Which rows a script computes: the numbers that its samplers draw, and digests of what its model is given."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Subset

from unisono.proof.scripts.recording.evaluations_seen import EvaluationsSeen

_MAX_EPOCH = 10_000_000  # rows of a data set whose epochs are looked at
_SOURCE_BITS = 40  # of a row's number, above which the number of its data set stands


class FetchedRows:
    """The rows of batches that a script has fetched from its `DataLoader`s, until a backward pass is made of them.

    A pass takes the oldest batch of each data set.

    Attributes:
        evaluations: what is told of batches that are of an evaluation.
    """

    def __init__(self) -> None:
        self._drawn: WeakKeyDictionary[Any, deque[Any]] = WeakKeyDictionary()  # by iterator, of batches to be fetched
        self._begun: WeakSet[Any] = WeakSet()  # iterators that have fetched a batch
        self._waiting: dict[int, deque[list[int]]] = {}  # batches without a pass yet, by data set
        self._data: dict[int, Any] = {}  # all of them, whose ids must not be given to others
        self._iterators: dict[int, Any] = {}  # the last one of each
        self._lengths: dict[int, int] = {}  # of those that passes were made of
        self._passes = 0  # that were made of such batches
        self._latest: deque[list[int]] | None = None  # what the last batch since a backward pass was added to
        self._source: Any = None  # the iterator that it is of
        self.evaluations = EvaluationsSeen()

    @property
    def lengths(self) -> list[int]:
        """How many rows each data set has that passes were made of; -1 where that is not known."""
        return [*self._lengths.values()]

    def draw(self, iterator: Any, indices: Any) -> None:
        """A sampler has drawn the rows of a batch, which may be fetched much later."""
        self._drawn.setdefault(iterator, deque()).append(indices)

    def fetch(self, iterator: Any) -> int | None:
        """An iterator has returned the next batch; without gradients it is one of an evaluation.

        Returns:
            Its rows, where a sampler has numbered them.
        """
        drawn = self._drawn.get(iterator)
        if not drawn:
            return None
        indices = drawn.popleft()
        if not torch.is_grad_enabled():
            self.evaluations.add(iterator, _row_numbers(indices))
            return None
        key = id(iterator._dataset)
        self._data[key] = iterator._dataset
        self._iterators[key] = iterator
        self._latest, self._source = self._waiting.setdefault(key, deque()), iterator
        if iterator not in self._begun:
            self._begun.add(iterator)
            self._latest.clear()
        numbers = _row_numbers(indices)
        self._latest.append(numbers)
        return len(numbers) or None

    def find_wholes(self) -> list[int]:
        """Of each data set that passes were made of and that is a part of another, how many rows the whole has.

        By its numbers rows are known. 0 for a data set that is no `Subset`, -1 where the length is not known.
        """
        return [_whole_length(self._data[key]) for key in self._lengths]

    def list_epochs(self) -> list[NDArray[np.int64]]:
        """The rows of one epoch of every data set that passes were made of, as its sampler deals them out to this rank.

        Rows of a `Subset` have their numbers in the whole data set. None of what has no numbers, or too many. To be
        called when nothing is trained any more, since samplers draw.
        """
        result = []
        for key, length in self._lengths.items():
            rows: list[int] = []
            with suppress(Exception):  # a sampler of the script's own may need what is gone
                if 0 < length <= _MAX_EPOCH:
                    for indices in self._iterators[key]._index_sampler:
                        rows += _row_numbers(indices)
                        if len(rows) > 2 * length:  # it never ends
                            rows = []
                            break
                    rows = _in_whole(self._data[key], rows)
            result.append(np.array(rows, np.int64))
        return result

    def find_next_epoch(self, updates: int) -> int:
        """The update that is the first of the second epoch; 0 where that is not known, or several data sets are read.

        Args:
            updates: that were made of the passes so far.
        """
        if len(self._lengths) != 1 or not self._passes:
            return 0
        with suppress(Exception):  # a sampler of the script's own may have no length
            batches = len(self._iterators[next(iter(self._lengths))]._index_sampler)
            return math.ceil(batches * updates / self._passes) + 1
        return 0

    @property
    def has_latest(self) -> bool:
        """Whether a batch was fetched since the last backward pass, and is still there."""
        return bool(self._latest)

    def drop_latest(self) -> None:
        """That batch is one of an evaluation."""
        if self._latest:
            self.evaluations.add(self._source, self._latest.pop())

    def end_reading(self, iterator: Any, updates: int) -> None:
        """An iterator has no more batches, after that many updates."""
        self.evaluations.end_reading(iterator, _length_of(iterator._dataset), updates)

    def begin_pass(self) -> None:
        """A backward pass begins; no batch before it is one of an evaluation."""
        self._latest = None

    def take_pass(self) -> list[int]:
        """The rows of a backward pass."""
        rows = []
        self._passes += any(self._waiting.values())
        for key, batches in self._waiting.items():
            if batches:
                self._lengths.setdefault(key, _length_of(self._data[key]))
                number = [*self._lengths].index(key)
                rows += [(number << _SOURCE_BITS) + row for row in batches.popleft()]
        return rows


def source_of(row: int) -> int:
    """Which of the data sets that passes were made of a row is of, by its number in a step."""
    return row >> _SOURCE_BITS


def _in_whole(data: Any, rows: list[int]) -> list[int]:
    """Numbers of rows of a `Subset`, of another one perhaps, as those in the whole data set."""
    while isinstance(data, Subset):
        rows = [int(data.indices[row]) for row in rows]
        data = data.dataset
    return rows


def _whole_length(data: Any) -> int:
    whole = data
    while isinstance(whole, Subset):
        whole = whole.dataset
    return 0 if whole is data else _length_of(whole)


def _length_of(data: Any) -> int:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return -1


def _row_numbers(indices: Any) -> list[int]:
    """The rows of a batch, as its sampler names them; none for a data set without numbers."""
    each = indices if isinstance(indices, list | tuple) else [indices]
    return [int(index) for index in each if isinstance(index, int) or (isinstance(index, Tensor) and index.dim() == 0)]


def digest_rows(inputs: Any) -> tuple[list[str], str]:
    """A digest of every row of the tensors among a model's inputs, and the shape of one row; of padded rows without it.

    Double precision is rounded to single: what another model has made (a generator) differs by rounding between runs.
    """
    given = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and not _made_by_parameters(leaf)]
    tensors = [tensor for tensor in given if tensor.dim() and tensor.numel()]
    if not tensors:
        return [], ""
    count = len(tensors[0])
    arrays = [t.detach().cpu() for t in tensors if len(t) == count]
    real = _find_real(inputs)
    plain = [(a.float() if a.dtype in (torch.bfloat16, torch.float64) else a).numpy() for a in arrays]
    padded = [real is not None and a.shape[:2] == real.shape for a in arrays]

    def read_row(row: int) -> bytes:
        kept: Any = slice(None) if real is None else real[row]
        return b"".join((a[row][kept] if p else a[row]).tobytes() for a, p in zip(plain, padded, strict=True))

    shape = " ".join(
        f"{a.dtype} {tuple(a.shape[2:] if p else a.shape[1:])}" for a, p in zip(arrays, padded, strict=True)
    )
    return [hashlib.blake2b(read_row(row), digest_size=8).hexdigest() for row in range(count)], shape


def _find_real(inputs: Any) -> NDArray[np.bool_] | None:
    """Which elements of padded sequences are no padding, if an `attention_mask` of zeros and ones says so."""
    if isinstance(inputs, Mapping):
        mask = inputs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            found = mask.detach().cpu().numpy()
            return found.astype(bool) if ((found == 0) | (found == 1)).all() else None
        inputs = list(inputs.values())
    parts = inputs if isinstance(inputs, list | tuple) else []
    return next((real for one in parts if (real := _find_real(one)) is not None), None)


def _made_by_parameters(tensor: Tensor) -> bool:
    """Whether a model has made it, with parameters that are trained; data may need a gradient, too."""
    if tensor.grad_fn is None:
        return isinstance(tensor, nn.Parameter)
    left, seen = [tensor.grad_fn], {tensor.grad_fn}
    while left:
        node = left.pop()
        if isinstance(getattr(node, "variable", None), nn.Parameter):
            return True
        new = {before for before, _ in node.next_functions if before is not None} - seen
        seen |= new
        left += new
    return False
