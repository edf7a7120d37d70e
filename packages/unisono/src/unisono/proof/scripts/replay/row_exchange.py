"""Keeps the batches that a rank reads, or gives a run on one process those that the ranks of another run have read.

Batches are taken where a `DataLoader` returns them. A script without one has what its outermost trained module is given
kept, and what goes past it into the loss (`loss_inputs`). The ranks' batches are put side by side, or one process is
given them in turn, as its own accumulation says.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor
from torch.utils._pytree import tree_leaves

from unisono.proof.scripts.replay.batch_joining import join_batches
from unisono.proof.scripts.replay.content_store import ContentStore, NotKeptError, StoredTensor, map_leaves
from unisono.proof.scripts.replay.row_fit import RowFit, describe_fit, find_rows, fit_parts

How = Literal["side by side", "in turn"]
_CONTENT = "content"


@dataclass
class Window:
    """What a pass was given, from its first forward pass to `backward`.

    Attributes:
        forwards: the arguments of each forward pass.
        beside: the tensors that were there before, and go past the model into the loss, by the order in which they are
            first used.
    """

    forwards: list[Any] = field(default_factory=list)
    beside: dict[int, Any] = field(default_factory=dict)


@dataclass
class KeptRows:
    """What a rank has read.

    Attributes:
        batches: of every data set, in order, each with its number of rows, where that is known.
        windows: pass by pass, of a script without a `DataLoader`.
        reason: why something could not be kept; empty if all was.
    """

    batches: list[list[tuple[Any, int | None]]] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    reason: str = ""


class RowExchange(Protocol):
    """What the hooks of a script call; values are given back as they are to be used."""

    def take_batch(self, source: object, batch: Any, rows: int | None) -> Any:
        """A `DataLoader` has returned a batch of a data set."""

    def take_inputs(self, window: int, given: Any) -> Any:
        """A trained module is called with these arguments, in a pass."""

    def take_beside(self, window: int, number: int, tensor: Tensor) -> Tensor:
        """A tensor that was there before the pass is used after its forward pass, as that of this number."""

    def keep_beside(self, window: int, number: int, tensor: Tensor) -> None:
        """It has gone into the loss."""

    def close(self) -> None:
        """The script has ended."""


class RowKeeper:
    """Keeps what this rank reads.

    Args:
        folder: that all ranks share.
        rank: of this process.
        ranks: how many there are.
    """

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self._store = ContentStore(folder / _CONTENT, ranks)
        self._file = _file_of(folder, rank)
        self._rows = KeptRows()
        self._sources: list[object] = []

    def take_batch(self, source: object, batch: Any, rows: int | None) -> Any:
        """Keep it."""
        number = _number_of(source, self._sources)
        while len(self._rows.batches) <= number:
            self._rows.batches.append([])
        self._keep(lambda: self._rows.batches[number].append((self._store.put(batch), rows)))
        return batch

    def take_inputs(self, window: int, given: Any) -> Any:
        """Keep them."""
        self._keep(lambda: self._window(window).forwards.append(self._store.put(given)))
        return given

    def take_beside(self, window: int, number: int, tensor: Tensor) -> Tensor:
        """Not kept, unless it goes into the loss."""
        return tensor

    def keep_beside(self, window: int, number: int, tensor: Tensor) -> None:
        """Keep it."""
        if number not in self._window(window).beside:
            self._keep(lambda: self._window(window).beside.update({number: self._store.put(tensor)}))

    def close(self) -> None:
        """Write what there is beside the tensors."""
        try:
            kept = pickle.dumps(self._rows)
        except Exception as error:
            kept = pickle.dumps(KeptRows(reason=f"a batch cannot be written ({type(error).__name__}: {error})"))
        self._file.write_bytes(kept)

    def _window(self, number: int) -> Window:
        while len(self._rows.windows) <= number:
            self._rows.windows.append(Window())
        return self._rows.windows[number]

    def _keep(self, act: Callable[[], None]) -> None:
        if self._rows.reason:
            return
        try:
            act()
        except NotKeptError as error:
            self._rows.reason = str(error)


class RowReplay:
    """Gives a run on one process what the ranks of another have read.

    Args:
        folder: of the other run's rows.
        ranks: of it, whose rows are given.
        how: their batches side by side, or those of one after the other.
        since: the step, from 0, from which on it is given these; before it, those of all ranks.
        all_ranks: how many these are, then.

    Attributes:
        step: that is being made.
        reason: why a batch could not be given; empty if all were.
        beside: how what one rank gave to the loss past the model differs from what is here for the same rows.
    """

    def __init__(self, folder: Path, ranks: Sequence[int], how: How, since: int = 0, all_ranks: int = 0) -> None:
        self.step, self._since = 0, since
        self._store = ContentStore(folder / _CONTENT)
        self._later = [*ranks]
        self._ranks = [read_rows(folder, rank) for rank in (range(all_ranks) if since else ranks)]
        self._how = how
        self._sources: list[object] = []
        self._fetched: list[int] = []
        self._forwards: dict[int, int] = {}
        self._constant = [_find_constants(rows.windows) for rows in self._ranks]
        self._counts: dict[int, list[int | None]] = {}  # rows of the ranks in a pass
        self._rows_here: list[int] | None = None  # places of the rows of one rank among those of the first pass here
        self.reason = ""
        self.beside: list[RowFit] = []
        self._fits: list[tuple[tuple[float, float], ...] | None] = []  # of the first batches here to those of the ranks

    @property
    def scaled(self) -> str:
        """In words, how the ranks' rows are those of one process, scaled alike in several batches; empty if not."""
        if len(self._fits) < 2 or self._fits[0] is None or self._fits[1] is None:
            return ""
        pairs = list(zip(*self._fits, strict=False))
        if any(abs(a - b) > 1e-6 * max(1.0, abs(a)) for one, two in pairs for a, b in zip(one, two, strict=True)):
            return ""
        factor, more = self._fits[0][0]
        return f"{factor:.4g} times those of one process and {more:.4g} more, in the first column of rank 0"

    def take_batch(self, source: object, batch: Any, rows: int | None) -> Any:
        """The ranks' in place of it; where they read none any more, itself."""
        number = _number_of(source, self._sources)
        while len(self._fetched) <= number:
            self._fetched.append(0)
        place = self._fetched[number]
        self._fetched[number] += 1
        found = []
        for rank, index in self._places(place):
            batches = self._ranks[rank].batches
            if number >= len(batches) or index >= len(batches[number]):
                return batch
            found.append(batches[number][index])
        if number == 0 and place < 2 and len(found) > 1 and not self.reason:
            fit = fit_parts(batch, [self._store.get(kept) for kept, _ in found])
            self._fits.append(fit)
        return self._give(batch, [kept for kept, _ in found], [count for _, count in found])

    def take_inputs(self, window: int, given: Any) -> Any:
        """The same of the arguments of a forward pass."""
        place = self._forwards.get(window, 0)
        self._forwards[window] = place + 1
        windows = self._windows(window)
        if windows is None or any(place >= len(one.forwards) for one in windows):
            return given
        kept = [one.forwards[place] for one in windows]
        self._counts[window] = [None] * len(kept) if len(kept) == 1 else [_rows_of(one) for one in kept]
        result = self._give(given, kept, self._counts[window])
        if window == place == 0 and len(self._ranks) == 1:
            here, there = (next((t for t in tree_leaves(one) if _has_rows(t)), None) for one in (given, result))
            self._rows_here = None if here is None or there is None else find_rows(here, there)
        return result

    def take_beside(self, window: int, number: int, tensor: Tensor) -> Tensor:
        """The same of a tensor that goes past the model.

        What is the same in every pass of a rank may be no part of a row but a weight, which hides a fault if it is
        given to one process: nothing is said then, unless one process has the same. Of one rank alone, it is given if
        it has another shape than here: that of its rows, as the places of pairs have.
        """
        windows = self._windows(window)
        if windows is None or not tensor.dim() or any(number not in one.beside for one in windows):
            return tensor
        places = self._places(window)
        kept = [one.beside[number] for one in windows]
        if all(_digest_of(one) in self._constant[rank] for one, (rank, _) in zip(kept, places, strict=True)):
            if len(kept) == 1 and self._store.get(kept[0]).shape != tensor.shape:
                places_of_it: Tensor = self._give(tensor, kept, [None])
                return places_of_it
            if any(_digest_of(one) != _digest_of(self._store.put(tensor)) for one in kept):
                self.reason = self.reason or (
                    f"a tensor of shape {tuple(tensor.shape)} goes into the loss, is the same in every pass of a rank, "
                    "and another on one process: is it part of the rows?"
                )
            return tensor
        result: Tensor = self._give(tensor, kept, self._counts.get(window, [None] * len(kept)))
        here = self._rows_here if window == 0 else None
        if (
            here
            and len(result) == len(here)
            and len(tensor) > max(here)
            and (said := describe_fit(tensor[here], result))
        ):
            self.beside.append(replace(said, words=f"a tensor of shape {tuple(result.shape)} is {said.words}"))
        return result

    def keep_beside(self, window: int, number: int, tensor: Tensor) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is left to do."""

    def _places(self, number: int) -> list[tuple[int, int]]:
        """By rank, the number there of what stands in place of that of this number here."""
        if self._since and self.step >= self._since:
            return [(rank, number) for rank in self._later]
        size = len(self._ranks)
        return [(r, number) for r in range(size)] if self._how == "side by side" else [(number % size, number // size)]

    def _windows(self, number: int) -> list[Window] | None:
        found = [(self._ranks[rank].windows, index) for rank, index in self._places(number)]
        return [windows[n] for windows, n in found] if all(n < len(windows) for windows, n in found) else None

    def _give(self, native: Any, kept: Sequence[Any], counts: Sequence[int | None]) -> Any:
        try:
            return _fill(native, join_batches([self._store.get(one) for one in kept], counts))
        except NotKeptError as error:
            self.reason = self.reason or str(error)
            return native


def read_rows(folder: Path, rank: int) -> KeptRows:
    """What a rank has read; of one that did not come to its end, nothing."""
    file = _file_of(folder, rank)
    if not file.exists():
        return KeptRows(reason=f"rank {rank} did not come to its end")
    rows: KeptRows = pickle.loads(file.read_bytes())
    return rows


def _file_of(folder: Path, rank: int) -> Path:
    return folder / f"rows-{rank}.pickle"


def _number_of(source: object, sources: list[object]) -> int:
    """The number of a data set in the order in which they are first read; the list holds them, so that ids are kept."""
    for number, one in enumerate(sources):
        if one is source:
            return number
    sources.append(source)
    return len(sources) - 1


def _rows_of(kept: Any) -> int | None:
    """How many rows the first tensor of kept arguments has."""
    found: list[StoredTensor] = []
    map_leaves(kept, lambda leaf: found.append(leaf) if isinstance(leaf, StoredTensor) and leaf.shape else None)
    return found[0].shape[0] if found else None


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _digest_of(kept: Any) -> str:
    return kept.digest if isinstance(kept, StoredTensor) else ""


def _find_constants(windows: Sequence[Window]) -> set[str]:
    """Digests of what goes past the model in every pass alike; nothing where the model's inputs never change either."""
    if len(windows) < 2 or all(one.forwards == windows[0].forwards for one in windows):
        return set()
    contents = [{_digest_of(one) for one in window.beside.values()} for window in windows]
    return set.intersection(*contents)


def _fill(native: Any, value: Any) -> Any:
    """The value in the kind of container that the script has: a `BatchEncoding` keeps its class."""
    if isinstance(native, MutableMapping) and not isinstance(native, dict) and isinstance(value, Mapping):
        for key, one in value.items():
            native[key] = one
        return native
    if isinstance(native, list | tuple) and isinstance(value, list | tuple) and len(native) == len(value):
        each = [_fill(old, new) for old, new in zip(native, value, strict=True)]
        return type(native)(*each) if hasattr(native, "_fields") else type(native)(each)
    if isinstance(native, dict) and isinstance(value, Mapping):
        return {key: _fill(native.get(key), one) for key, one in value.items()}
    return value
