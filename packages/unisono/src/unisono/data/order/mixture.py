"""Mixes several sources, with fixed counts of each per block of positions.

`Joined` numbers the rows of all sources consecutively, so that everything after the order sees a single source.
`MixtureOrder` is the order: it maps a position to a source and one of its rows.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from unisono.config.schema import data as settings
from unisono.data.order.lanes import SINGLE_LANE, Lanes, group_equal
from unisono.data.order.order import Indices, Shuffle
from unisono.data.order.plan import Stream
from unisono.runtime.errors import ConfigError, nearest
from unisono.runtime.rng import key
from unisono.task import Source, read_records


class Joined:
    """A concatenation of sources.

    It has `lengths`, `blocks` and `fingerprint` if all of them do.

    Args:
        sources: by name, in concatenation order.
    """

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self.sources = dict(sources)
        self._names = list(self.sources)
        self.starts = [0, *accumulate(len(source) for source in self.sources.values())]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, row: int) -> Any:
        name, inside = self.name(row)
        return self.sources[name][inside]

    def __getitems__(self, rows: Sequence[int]) -> Sequence[Any]:
        """Records of several rows, read in one call if they are of one source."""
        places = [self.name(row) for row in rows]
        if len(names := {name for name, _ in places}) == 1:
            return read_records(self.sources[names.pop()], [inside for _, inside in places])
        return [self.sources[name][inside] for name, inside in places]

    def name(self, row: int) -> tuple[str, int]:
        """The name of a row's source, and the row's number in it."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        number = bisect_right(self.starts, row) - 1
        return self._names[number], int(row) - self.starts[number]

    @cached_property
    def lengths(self) -> Indices:
        """Units of each row, (rows,)."""
        return np.concatenate([np.asarray(lengths, dtype=np.int64) for lengths in self._all("lengths")])

    @cached_property
    def blocks(self) -> Indices:
        """Rows of each block, (blocks,)."""
        return np.concatenate([np.asarray(blocks, dtype=np.int64) for blocks in self._all("blocks")])

    @property
    def fingerprint(self) -> str:
        """A hash of the sources' fingerprints, names and order."""
        parts = list(zip(self._names, self._all("fingerprint"), strict=True))
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _all(self, name: str) -> list[Any]:
        values = [getattr(source, name) for source in self.sources.values()]
        if any(value is None for value in values):
            raise AttributeError(name)
        return values


@dataclass(frozen=True)
class _Phase:
    """A stretch of the run with constant weights."""

    first: int  # its first position in each lane
    weights: tuple[int, ...]  # of each source


@dataclass(frozen=True)
class MixtureOrder:
    """Maps positions to rows of several sources, mixed by weight; a `Stream`.

    Positions come in blocks. Each block has a fixed number of positions per source, in a keyed permutation. Each source
    contributes its own stream, in order. With several lanes, each lane mixes independently.

    Attributes:
        names: of the sources.
        streams: of the sources.
        starts: the number of each source's first row, and finally the total number of rows.
        phases: in order; the first one begins at 0.
        seed: of the run.
        block: positions per block; a change of weights may shorten one.
        until: whether an epoch ends with the `first` source or with `all`.
        lanes: that mix independently.
    """

    names: tuple[str, ...]
    streams: tuple[Stream, ...]
    starts: tuple[int, ...]
    phases: tuple[_Phase, ...]
    seed: int
    block: int = 1000
    until: str = "all"
    lanes: Lanes = SINGLE_LANE

    @classmethod
    def from_config(
        cls,
        configured: settings.Mixture,
        joined: Joined,
        streams: Sequence[Stream],
        seed: int,
        batch: int,
        lanes: Lanes,
        units: int | None = None,
    ) -> MixtureOrder:
        """The mixture for the settings.

        Args:
            configured: `data.mixture`.
            joined: the sources.
            streams: of each source.
            seed: of the run.
            batch: positions per step.
            lanes: as above.
            units: units in a step of packed rows; None if rows are samples. The number of samples in a step is unknown
                before packing, so the position of a change of weights is then estimated from mean lengths.
        """
        weights = whole_weights(configured, joined.sources)
        begins, step = [Fraction(0)], 0
        for change, before in zip(configured.changes, weights[:-1], strict=True):
            samples = batch if units is None else units / _mean_mixed_length(before, joined.sources)
            begins.append(begins[-1] + (change.step - step) * samples)
            step = change.step
        phases = tuple(_Phase(int(begin / lanes.count), its) for begin, its in zip(begins, weights, strict=True))
        names, starts = tuple(joined.sources), tuple(joined.starts)
        return cls(names, tuple(streams), starts, phases, seed, configured.block, configured.until, lanes)

    def __call__(self, positions: Indices) -> Indices:  # (n,) -> (n,)
        """Rows at these positions."""
        return self.locate(positions)[0]

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:  # (n,) -> (n,), (n,)
        """Rows and epochs at these positions, from the streams of their sources."""
        return locate_rows(self.streams, self.starts, *self._locate(np.asarray(positions, dtype=np.int64)))

    @cached_property
    def size(self) -> int:
        """Positions until the first source, or all sources, are exhausted; approximate with several lanes.

        Raises:
            ConfigError: if a source is never exhausted.
        """
        configured = [n for n in range(len(self.names)) if any(phase.weights[n] for phase in self.phases)]
        ends = {number: self._exhausted_after(number) for number in configured}
        never = [self.names[number] for number, end in ends.items() if end is None]
        known = [end for end in ends.values() if end is not None]
        if not known or (never and self.until == "all"):
            raise ConfigError(
                f"train.epochs: the source '{never[0]}' of data.mixture is never used up, since its weight becomes 0 "
                "before; set the length of the run by train.steps, or use data.mixture.until=first"
            )
        return self.lanes.count * (min(known) if self.until == "first" else max(known))

    def _locate(self, positions: Indices) -> tuple[Indices, Indices]:  # (n,) -> (n,), (n,)
        """The number of the source, and the position in its stream."""
        lanes, places = self.lanes(positions)
        first = np.array([phase.first for phase in self.phases], dtype=np.int64)
        phases = np.searchsorted(first, places, side="right") - 1
        blocks, offsets = np.divmod(places - first[phases], self.block)
        numbers = np.empty_like(places)
        for here in group_equal((places - offsets) * self.lanes.count + lanes):
            phase, block, lane = int(phases[here[0]]), int(blocks[here[0]]), int(lanes[here[0]])
            before, source, nth = self._deal_block(phase, block, lane)
            numbers[here] = source[offsets[here]]
            places[here] = before[numbers[here]] + nth[offsets[here]]
        return numbers, self.lanes.positions(lanes, places)

    def _deal_block(self, phase: int, block: int, lane: int) -> tuple[Indices, Indices, Indices]:
        """Counts of sources before a block, (sources,); each position's source, and its number within it, (places,)."""
        begin, end = (
            self._count_in_phase(phase, block * self.block),
            self._count_in_phase(phase, (block + 1) * self.block),
        )
        quotas = tuple(after - before for before, after in zip(begin, end, strict=True))
        before = np.array([a + b for a, b in zip(self._before[phase], begin, strict=True)], dtype=np.int64)
        return before, *_shuffle_block(key(self.seed, "mixture", lane, phase, block), quotas)

    def _count_in_phase(self, phase: int, places: int) -> tuple[int, ...]:
        """Counts of each source in the first positions of a phase, which ends where the next one begins."""
        if phase + 1 < len(self.phases):
            places = min(places, self.phases[phase + 1].first - self.phases[phase].first)
        return count_places(self.phases[phase].weights, places)

    @cached_property
    def _before(self) -> list[tuple[int, ...]]:
        """Counts of each source before each phase."""
        before = [(0,) * len(self.names)]
        for number, (phase, following) in enumerate(pairwise(self.phases)):
            given = self._count_in_phase(number, following.first - phase.first)
            before.append(tuple(a + b for a, b in zip(before[-1], given, strict=True)))
        return before

    def _exhausted_after(self, number: int) -> int | None:
        """Positions of the first lane after which a source is exhausted; None if it never is."""
        rows = -(-self.streams[number].size // self.lanes.count)
        for phase, (its, before) in enumerate(zip(self.phases, self._before, strict=True)):
            if not its.weights[number]:
                continue
            missing = rows - before[number]
            places = (missing + 3) * sum(its.weights) // its.weights[number]  # an upper bound, see count_places
            blocks = range(places // self.block + 1)

            def given_by(block: int, phase: int = phase) -> int:
                return self._count_in_phase(phase, (block + 1) * self.block)[number]

            block = bisect_left(blocks, missing, key=given_by)
            if given_by(block) >= missing:
                given, source, nth = self._deal_block(phase, block, 0)
                last = np.flatnonzero((source == number) & (given[number] + nth == rows - 1))
                return its.first + block * self.block + int(last[0]) + 1
        return None


def sources_of(source: Source) -> dict[str, Source]:
    """The joined sources by name; a single source has no name."""
    return source.sources if isinstance(source, Joined) else {"": source}


def locate_rows(
    streams: Sequence[Stream], starts: Sequence[int], numbers: Indices, places: Indices
) -> tuple[Indices, Indices]:  # (n,), (n,) -> (n,), (n,)
    """Rows of joined sources and their epochs, given the number of a source and the place in its stream."""
    rows, epochs = np.empty_like(places), np.empty_like(places)
    for here in group_equal(numbers):
        number = int(numbers[here[0]])
        rows[here], epochs[here] = streams[number].locate(places[here])
        rows[here] += starts[number]
    return rows, epochs


def whole_weights(configured: settings.Mixture, sources: Mapping[str, Source]) -> list[tuple[int, ...]]:
    """The weights, and those of each change, as integers.

    Raises:
        ConfigError: if weights do not match the sources, or are by tokens although lengths are unknown.
    """
    for name in configured.weights:
        if name not in sources:
            raise ConfigError(f"data.mixture.weights: there is no source '{name}', {nearest(name, sources)}")
    for name in sources:
        if name not in configured.weights:
            raise ConfigError(f"data.mixture.weights has no weight for '{name}'; give it one (0 to leave it out)")
    result = []
    for weights in (configured.weights, *(change.weights for change in configured.changes)):
        exact = [Fraction(str(weights[name])) for name in sources]  # exactly as written: 0.1 is a tenth
        if configured.by == "tokens":
            exact = [w / _mean_length(name, sources[name]) if w else w for name, w in zip(sources, exact, strict=True)]
        common = math.lcm(*(weight.denominator for weight in exact))
        result.append(tuple(int(weight * common) for weight in exact))
    return result


@lru_cache(maxsize=4096)
def count_places(weights: tuple[int, ...], places: int) -> tuple[int, ...]:
    """Counts of each source in the first `places` positions: monotonic, and within two of the exact share.

    Of the first n positions that reach a node of the tree, `⌊n·p + ½⌋` go to its first branch. Each position adds zero
    or one to that, and therefore to the counts of the leaves. Since weights grow towards the root at least like
    Fibonacci numbers, rounding errors, scaled by the shares on their way down, sum to less than two at any leaf.

    >>> count_places((2, 3, 1), 1000)
    (333, 500, 167)
    """
    counts = {0: places}
    for node, left, right, first, both in _huffman_splits(weights):
        arrived = counts.pop(node)
        counts[left] = (2 * arrived * first + both) // (2 * both)
        counts[right] = arrived - counts[left]
    return tuple(counts.get(~number, 0) for number in range(len(weights)))


@lru_cache(maxsize=256)
def _huffman_splits(weights: tuple[int, ...]) -> tuple[tuple[int, int, int, int, int], ...]:
    """A Huffman tree over the sources, from the root (0): node, both branches, the weights of the first and of both.

    Source n is the node ~n. A single source is the first branch of the root, and the other is empty.
    """
    heap = [(weight, number, ~number) for number, weight in enumerate(weights) if weight]
    heapq.heapify(heap)
    if len(heap) == 1:
        return ((0, heap[0][2], 0, 1, 1),)
    splits = []
    while len(heap) > 1:
        (left, _, one), (right, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        node = len(heap)  # the last one is 0
        splits.append((node, one, other, left, left + right))
        heapq.heappush(heap, (left + right, len(weights) + len(splits), node))
    return tuple(reversed(splits))


@lru_cache(maxsize=256)
def _shuffle_block(address: int, quotas: tuple[int, ...]) -> tuple[Indices, Indices]:
    """The source of each position of a block, and its number among those of that source, both (places,)."""
    size, sources = sum(quotas), np.repeat(np.arange(len(quotas)), quotas)
    source = sources[Shuffle(size, address)(np.arange(size, dtype=np.int64))]
    nth = np.empty(size, dtype=np.int64)
    nth[np.argsort(source, kind="stable")] = np.concatenate([np.arange(quota) for quota in quotas])
    return source, nth


def _mean_mixed_length(weights: tuple[int, ...], sources: Mapping[str, Source]) -> Fraction:
    """The mean length of a sample in a mixture with these weights."""
    key = "data.mixture.changes with data.packing"
    units = (w * _mean_length(n, one, key) for w, (n, one) in zip(weights, sources.items(), strict=True) if w)
    return sum(units, Fraction(0)) / sum(weights)


def _mean_length(name: str, source: Source, key: str = "data.mixture.by=tokens") -> Fraction:
    lengths = getattr(source, "lengths", None)
    if lengths is None:
        raise ConfigError(
            f"{key} needs the lengths of its sources, but '{name}' has no lengths; prepare it with "
            "`unisono data prepare`, or remove this setting"
        )
    if not (total := int(np.sum(lengths, dtype=np.int64))):
        raise ConfigError(f"{key}: the source '{name}' has no tokens")
    return Fraction(total, len(lengths))
