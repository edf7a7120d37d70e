"""The first whole evaluation of a script: the rows that a rank reads in it, and the numbers that come of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

_READS = {"item", "tolist", "__float__", "__int__", "__format__"}
_MOST_ROWS, _MOST_NUMBERS = 200_000, 50


class EvaluationsSeen:
    """Follows a script through its evaluations: batches without a gradient, until it trains again.

    Attributes:
        rows: of the first evaluation that has read a `DataLoader` to its end, by their numbers.
        length: of its data set; -1 where that is not known.
        updates: that were made before it was through.
        numbers: that were read of tensors after its last batch, and after the last exchange between ranks.
    """

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.length = -1
        self.updates = 0
        self.numbers: list[float] = []
        self._open: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()  # by iterator, its rows so far
        self._listens = False  # an evaluation is through, and nothing is trained yet

    def add(self, iterator: Any, rows: Sequence[int]) -> None:
        """A batch of an evaluation is read."""
        self._open.setdefault(iterator, []).extend(rows)

    def end_reading(self, iterator: Any, length: int, updates: int) -> None:
        """An iterator has no more batches, after that many updates."""
        rows = self._open.pop(iterator, [])
        if rows and not self.rows and len(rows) <= _MOST_ROWS:
            self.rows, self.length, self.updates, self._listens = rows, length, updates, True

    def hear(self, name: str, given: Sequence[Tensor]) -> None:
        """A function of torch was called outside of a pass."""
        one = given[0] if self._listens and name in _READS and given else None
        if one is None or one.requires_grad:  # the last loss of the training, which is printed beside it
            return
        if one.numel() == 1 and not (one.is_complex() or one.is_meta):
            self.numbers = [*self.numbers, float(one.detach())][-_MOST_NUMBERS:]

    def exchange(self) -> None:
        """Ranks exchange something: what was read before is of one rank."""
        if self._listens:
            self.numbers = []

    def begin_training(self) -> None:
        """The script trains again: what it reads on is no evaluation, nor is a batch whose labels it has made so."""
        self._listens = False
        self._open.clear()
