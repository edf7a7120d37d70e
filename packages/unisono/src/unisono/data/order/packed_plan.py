"""The plan of packed rows: which samples share which row of which step, decided only by their lengths.

Each lane is packed in chunks of a fixed number of samples. Chunk `c` of lane `l` consists of the positions
`[(c·L + l)·D, (c·L + l + 1)·D)` of the stream, and its bins are the lane's next rows; bins do not extend into the next
chunk. Row `r` of a lane's share in step `s` is the lane's bin `s·B/L + r`. So the content of a row does not depend on
which process packs it, or when, and a process packs only the lanes that it owns.

The number of rows in a chunk is known only after packing. So each lane has a cursor, (chunk, rows before it), which is
saved in checkpoints: a resume repacks at most one chunk. Without it, all earlier chunks must be packed to find a row.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from unisono.config.schema.data import Data, Packing
from unisono.config.schema.run import Train
from unisono.data.order import packing
from unisono.data.order.order import Indices, Shuffle
from unisono.data.order.plan import NO_SAMPLES, SampleIndices, Stream
from unisono.runtime.errors import CheckpointError, ConfigError, DataError
from unisono.runtime.rng import key

_MAX_KEPT_CHUNKS = 2  # packed chunks to keep per lane, since a step can span two


Lengths = Callable[[Indices, Indices], Indices]  # of rows in epochs, asked once per chunk, for own lanes alone


def lookup_lengths(lengths: Indices) -> Lengths:
    """Lengths that are known in advance, (rows of the source,)."""
    return lambda rows, epochs: lengths[rows]


@dataclass(frozen=True)
class _Chunk:
    """A packed chunk: its samples' rows and epochs, (samples,), its pieces, and each bin's first piece, (bins + 1,)."""

    rows: Indices
    epochs: Indices
    pieces: packing.Pieces
    edges: Indices


class _Lane:
    """The state of a lane: the number of rows before each known chunk, and the most recently packed chunks."""

    def __init__(self, chunk: int = 0, before: int = 0) -> None:
        self.chunk = chunk
        self.before = [before]
        self.kept: dict[int, _Chunk] = {}

    def chunk_of(self, row: int) -> int:
        """The chunk that contains a row, or begins with it; `row` must not be beyond the known chunks."""
        return self.chunk + bisect_right(self.before, row) - 1

    def rows_before(self, chunk: int) -> int:
        """Number of rows of the lane before a chunk."""
        return self.before[chunk - self.chunk]


class PackedPlan:
    """Packed rows, step by step.

    Args:
        stream: maps positions to rows of the source.
        lengths: lengths of samples in units.
        settings: how to pack.
        capacity: units per row.
        global_batch: rows per step.
        lanes: number of lanes; must divide `global_batch`, as those of `resolve_lane_count` do.
        steps: in the whole run.

    Raises:
        ConfigError: for contradictory settings.
    """

    def __init__(
        self,
        stream: Stream,
        lengths: Lengths,
        settings: Packing,
        *,
        capacity: int,
        global_batch: int,
        lanes: int,
        steps: int,
    ) -> None:
        assert global_batch % lanes == 0, f"{lanes} lanes of {global_batch} rows"
        if settings.method == "concatenate" and settings.cut == "never":
            raise ConfigError(
                "data.packing: method=concatenate cuts samples wherever a row is full, so it conflicts with cut=never; "
                "use method=online or offline"
            )
        self._stream, self.lengths, self._settings = stream, lengths, settings
        self.capacity, self.global_batch, self.lanes, self.steps = capacity, global_batch, lanes, steps
        self._share = global_batch // lanes
        self._lanes = [_Lane() for _ in range(lanes)]
        self._lock = threading.Lock()  # samples() is called by the prefetching thread, state() by the training thread

    @classmethod
    def from_config(
        cls, stream: Stream, lengths: Lengths | Indices, train: Train, data: Data, *, capacity: int | None, lanes: int
    ) -> PackedPlan:
        """The plan of a run.

        Args:
            stream: maps positions to rows of the source.
            lengths: lengths of samples, or of every row of the source, (rows,).
            train: for its steps and global batch.
            data: for its packing.
            capacity: units per row if `data.packing.length` is null: `Task.capacity`.
            lanes: number of lanes.

        Raises:
            ConfigError: for settings that conflict with packing.
        """
        settings = data.packing
        assert settings is not None
        capacity = settings.length or capacity
        if capacity is None:
            raise ConfigError("this task does not define the capacity of a packed row; set data.packing.length")
        if train.steps is None:
            about = ""
            if not callable(lengths):
                epoch = int(lengths.sum()) / (capacity * train.global_batch)
                steps = max(1, round(epoch * (train.epochs or 1)))
                about = f"; an epoch is about {epoch:.1f} steps, so train.steps={steps} is close"
            raise ConfigError(
                f"train.epochs={train.epochs:g} does not work with data.packing, since the number of rows in an epoch "
                f"is unknown before packing; set train.steps and train.epochs=null{about}"
            )
        known = lengths if callable(lengths) else lookup_lengths(np.asarray(lengths))
        batch = train.global_batch
        return cls(stream, known, settings, capacity=capacity, global_batch=batch, lanes=lanes, steps=train.steps)

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self._stream.seed

    def rows(self, step: int) -> int:
        """Number of rows in the global batch of a step, which is always full."""
        return self.global_batch

    def samples(self, step: int, rows: range) -> SampleIndices:
        """The pieces in these rows of the global batch of a step."""
        parts: list[tuple[Indices, ...]] = []
        for lane in range(rows.start // self._share, -(-rows.stop // self._share)):
            first_slot = lane * self._share
            begin, end = max(rows.start, first_slot), min(rows.stop, first_slot + self._share)
            to_slot = first_slot - step * self._share  # offset from a lane's row number to the row of the global batch
            with self._lock:
                parts += self._lane_pieces(lane, begin - to_slot, end - to_slot, to_slot)
        if not parts:
            return NO_SAMPLES
        return SampleIndices(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    # the cursor -------------------------------------------------------------------------------------------------

    def state(self, step: int, rows: range) -> dict[str, Any]:
        """The cursors (chunk, and rows before it) of the lanes in these rows, at the beginning of a step."""
        if rows.start % self._share or rows.stop % self._share:
            raise ConfigError(
                f"rows {rows.start} to {rows.stop - 1} of the global batch are not whole lanes of {self._share} rows; "
                f"use a world size that divides data.lanes={self.lanes}"
            )
        cursors = []
        for number in range(rows.start // self._share, rows.stop // self._share):
            with self._lock:
                lane = self._pack_until(number, step * self._share, there=False)
                chunk = lane.chunk_of(step * self._share)
                cursors.append([number, chunk, lane.rows_before(chunk)])
        return {"step": step, "of": self._identity(), "cursors": cursors}

    def resume(self, states: list[Any]) -> None:
        """Resume from the cursors saved by the processes of an earlier run, of any number.

        Raises:
            CheckpointError: if cursors are missing, duplicate, of different steps, or of another packing.
        """
        whose: dict[int, int] = {}
        found: dict[int, tuple[int, int]] = {}
        for rank, state in enumerate(states):
            if not isinstance(state, dict) or not {"step", "of", "cursors"} <= state.keys():
                raise CheckpointError(
                    f"the checkpoint has no packing cursors of rank {rank}: was it written without data.packing?"
                )
            for name, value in self._identity().items():
                if (theirs := state["of"].get(name)) != value:
                    raise CheckpointError(
                        f"the checkpoint's rows were packed with {name}={theirs}, but this run has {value}. That "
                        "changes the order, so it cannot resume here; change it back, or start a new run"
                    )
            if state["step"] != states[0]["step"]:
                raise CheckpointError(
                    f"the checkpoint's packing cursors are from step {states[0]['step']} for rank 0 but from step "
                    f"{state['step']} for rank {rank}"
                )
            for lane, chunk, before in state["cursors"]:
                if lane in found:
                    raise CheckpointError(f"the checkpoint has lane {lane} twice, from ranks {whose[lane]} and {rank}")
                found[lane], whose[lane] = (int(chunk), int(before)), rank
        missing = sorted(set(range(self.lanes)) - set(found))
        if missing:
            raise CheckpointError(
                f"the checkpoint lacks the packing cursors of {len(missing)} of {self.lanes} lanes, {missing[:8]}: the "
                "state of a process is missing"
            )
        self._lanes = [_Lane(*found[lane]) for lane in range(self.lanes)]

    def _identity(self) -> dict[str, Any]:
        """The settings that determine the packing, by name."""
        settings = {f"data.packing.{name}": value for name, value in self._settings.model_dump().items()}
        mine = {"data.packing.length": self.capacity, "data.lanes": self.lanes, "train.global_batch": self.global_batch}
        return settings | mine

    # lanes ------------------------------------------------------------------------------------------------------

    def _lane_pieces(self, lane: int, begin: int, end: int, to_slot: int) -> list[tuple[Indices, ...]]:
        """Slots, rows, epochs, first and last units of pieces in the lane's rows `begin..end-1`, by chunk."""
        parts: list[tuple[Indices, ...]] = []
        while begin < end:
            known = self._pack_until(lane, begin, there=True)
            number = known.chunk_of(begin)
            before = known.rows_before(number)
            chunk = known.kept.get(number) or self._pack_and_keep(lane, number)
            bins = slice(begin - before, min(end - before, chunk.pieces.bins))
            part = slice(chunk.edges[bins.start], chunk.edges[bins.stop])
            pieces, items = chunk.pieces, chunk.pieces.item[part]
            slots = pieces.bin[part] + before + to_slot
            parts.append((slots, chunk.rows[items], chunk.epochs[items], pieces.first[part], pieces.last[part]))
            begin = before + bins.stop
        return parts

    def _pack_until(self, lane: int, row: int, there: bool) -> _Lane:
        """The lane, packed up to a row: all rows before it are known, and the row itself if `there` is set."""
        if row < self._lanes[lane].before[0]:
            self._lanes[lane] = _Lane()
        known = self._lanes[lane]
        empty = 0
        while known.before[-1] < row + there:
            bins = self._pack_and_keep(lane, known.chunk + len(known.before) - 1).pieces.bins
            known.before.append(known.before[-1] + bins)
            empty = 0 if bins else empty + 1
            if empty * self._settings.chunk > self._stream.size:
                raise DataError(
                    f"{empty * self._settings.chunk} consecutive samples are all empty, so there is nothing to pack"
                )
        return known

    def _pack_and_keep(self, lane: int, number: int) -> _Chunk:
        kept = self._lanes[lane].kept
        while len(kept) >= _MAX_KEPT_CHUNKS:
            del kept[next(iter(kept))]
        kept[number] = self._pack(lane, number)
        return kept[number]

    def _pack(self, lane: int, number: int) -> _Chunk:
        how, size = self._settings, self._settings.chunk
        positions = (number * self.lanes + lane) * size + np.arange(size, dtype=np.int64)
        rows, epochs = self._stream.locate(positions)
        lengths = np.asarray(self.lengths(rows, epochs), dtype=np.int64)
        longest = int(lengths.argmax())
        if how.cut == "never" and lengths[longest] > self.capacity:
            raise DataError(
                f"row {rows[longest]} of the source has {lengths[longest]} units, but a packed row holds only "
                f"{self.capacity}; set data.packing.cut=long to cut it, or a larger data.packing.length"
            )
        if how.method == "offline":
            pieces = packing.pack_offline(lengths, self.capacity)
            pieces = _shuffle_bins(pieces, key(self.seed, "packing", lane, number))
        elif how.method == "online":
            pieces = packing.pack_online(lengths, self.capacity, how.open_bins)
        else:
            pieces = packing.pack_concatenated(lengths, self.capacity)
        edges = np.searchsorted(pieces.bin, np.arange(pieces.bins + 1))
        whole = (pieces.first == 0) & (pieces.last == lengths[pieces.item])
        last = np.where(whole, -1, pieces.last)
        return _Chunk(rows, epochs, packing.Pieces(pieces.bin, pieces.item, pieces.first, last, pieces.bins), edges)


def _shuffle_bins(pieces: packing.Pieces, seed: int) -> packing.Pieces:
    """Shuffle bins, which best-fit-decreasing sorts by the length of their items."""
    if not pieces.bins:
        return pieces
    bins = Shuffle(pieces.bins, seed)(np.arange(pieces.bins))[pieces.bin]
    order = np.argsort(bins, kind="stable")
    return packing.Pieces(bins[order], pieces.item[order], pieces.first[order], pieces.last[order], pieces.bins)
