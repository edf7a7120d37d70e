"""The plan of packed rows: which samples share which row of which step, decided on their lengths alone.

Packing runs on lanes, over chunks of a fixed number of samples. Chunk `c` of lane `l` is the positions
`[(c·L + l)·D, (c·L + l + 1)·D)` of the stream, and its bins are the lane's next rows; none is carried on into the
next chunk. Row `r` of a lane's share in step `s` is the lane's bin number `s·B/L + r`. So what a row holds depends
neither on who computes it nor on when, and a process packs only the lanes that it owns.

How many rows a chunk makes is known once it is packed. Hence a lane has a cursor, (chunk, rows before it), which a
checkpoint keeps: a resume packs at most one chunk again. Without one, a row is found by packing all chunks before it.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from unisono.config.batch_split import divisors
from unisono.config.schema.data import Data, Packing
from unisono.config.schema.run import Train
from unisono.data.order import packing
from unisono.data.order.order import Indices, Shuffle
from unisono.data.order.plan import NO_SAMPLES, SampleIndices, Stream
from unisono.runtime.errors import CheckpointError, ConfigError, DataError
from unisono.runtime.rng import key

_MAX_KEPT_CHUNKS = 2  # packed chunks per lane that are kept: a step can lie across two


class Lengths(Protocol):
    """Units of samples, asked for once per chunk and only for lanes that the process owns."""

    def __call__(self, rows: Indices, epochs: Indices) -> Indices:
        """Of these rows of the source in these epochs, (n,), (n,) -> (n,)."""


def lookup_lengths(lengths: Indices) -> Lengths:
    """Lengths that are known beforehand, (rows of the source,)."""
    return lambda rows, epochs: lengths[rows]


@dataclass(frozen=True)
class _Chunk:
    """A packed chunk: its samples' rows and epochs, (samples,), its pieces, and where each bin's begin, (bins + 1,)."""

    rows: Indices
    epochs: Indices
    pieces: packing.Pieces
    edges: Indices


class _Lane:
    """What is known of one lane: the rows before each chunk from some chunk on, and the chunks packed last."""

    def __init__(self, chunk: int, before: Sequence[int]) -> None:
        self.chunk = chunk
        self.before = list(before)
        self.kept: dict[int, _Chunk] = {}

    @property
    def next_chunk(self) -> int:
        """The first chunk that has not been packed yet."""
        return self.chunk + len(self.before) - 1

    def chunk_of(self, row: int) -> int:
        """The chunk that a row is in, or would begin; `row` must not lie past what is known."""
        return self.chunk + bisect_right(self.before, row) - 1

    def rows_before(self, chunk: int) -> int:
        """Rows of the lane before a chunk."""
        return self.before[chunk - self.chunk]


class PackedPlan:
    """Packed rows, step by step.

    Args:
        stream: positions to rows of the source.
        lengths: units of samples.
        settings: how to pack.
        capacity: units that a row holds.
        global_batch: rows per step.
        lanes: that divide `global_batch`.
        steps: in the whole run.
        index: rows before each chunk of each lane, (lanes, chunks + 1), as `index` returns it; None to find out.

    Raises:
        ConfigError: for settings that do not fit each other.
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
        index: Indices | None = None,
    ) -> None:
        if global_batch % lanes:
            raise ConfigError(
                f"data.lanes={lanes} do not divide train.global_batch={global_batch}; these do: "
                f"{divisors(global_batch)}"
            )
        if settings.method == "concatenate" and settings.cut == "never":
            raise ConfigError(
                "data.packing: method=concatenate cuts samples wherever a row is full, so it cannot go with cut=never; "
                "use method=online or offline"
            )
        self._stream, self.lengths, self._settings = stream, lengths, settings
        self.capacity, self.global_batch, self.lanes, self.steps = capacity, global_batch, lanes, steps
        self._share = global_batch // lanes
        self._index = index
        self._lanes = [self._new_lane(lane) for lane in range(lanes)]
        self._lock = threading.Lock()  # what comes next is asked for ahead, in another thread than where the run is

    @classmethod
    def from_config(
        cls, stream: Stream, lengths: Lengths | Indices, train: Train, data: Data, *, capacity: int | None, lanes: int
    ) -> PackedPlan:
        """The plan of a run.

        Args:
            stream: positions to rows of the source.
            lengths: units of samples, or of every row of the source, (rows,).
            train: its steps and global batch.
            data: its packing.
            capacity: units that a row holds where `data.packing.length` does not say: `Task.capacity`.
            lanes: of the order.

        Raises:
            ConfigError: for what cannot go with packing.
        """
        settings = data.packing
        assert settings is not None
        capacity = settings.length or capacity
        if capacity is None:
            raise ConfigError("this task does not say how many units a packed row holds; set data.packing.length")
        if train.steps is None:
            about = ""
            if not callable(lengths):
                epoch = int(lengths.sum()) / (capacity * train.global_batch)
                steps = max(1, round(epoch * (train.epochs or 1)))
                about = f"; an epoch is about {epoch:.1f} steps, so train.steps={steps} comes near to it"
            raise ConfigError(
                f"train.epochs={train.epochs:g} cannot be counted with data.packing, as only packing tells how many "
                f"rows an epoch makes; set train.steps and train.epochs=null{about}"
            )
        return cls(
            stream,
            lengths if callable(lengths) else lookup_lengths(np.asarray(lengths)),
            settings,
            capacity=capacity,
            global_batch=train.global_batch,
            lanes=lanes,
            steps=train.steps,
        )

    @property
    def seed(self) -> int:
        """Of the run."""
        return self._stream.seed

    def rows(self, step: int) -> int:
        """Rows in the global batch of a step: always all."""
        return self.global_batch

    def samples(self, step: int, rows: range) -> SampleIndices:
        """The pieces that stand in these rows of the global batch of a step."""
        parts: list[tuple[Indices, ...]] = []
        for lane in range(rows.start // self._share, -(-rows.stop // self._share)):
            first_slot = lane * self._share
            begin, end = max(rows.start, first_slot), min(rows.stop, first_slot + self._share)
            to_slot = first_slot - step * self._share  # from the number of a lane's row to its row of the global batch
            with self._lock:
                parts += self._lane_pieces(lane, begin - to_slot, end - to_slot, to_slot)
        if not parts:
            return NO_SAMPLES
        return SampleIndices(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def index(self, chunks: int) -> Indices:  # -> (lanes, chunks + 1)
        """Rows before each of the first chunks of each lane, for a later plan to look up; all of them are packed."""
        table = np.zeros((self.lanes, chunks + 1), dtype=np.int64)
        for lane in range(self.lanes):
            for chunk in range(chunks):
                table[lane, chunk + 1] = table[lane, chunk] + self._pack(lane, chunk).pieces.bins
        return table

    # the cursor -------------------------------------------------------------------------------------------------

    def state(self, step: int, rows: range) -> dict[str, Any]:
        """The cursors of the lanes in these rows: chunk, and rows before it, as of the beginning of a step."""
        if rows.start % self._share or rows.stop % self._share:
            raise ConfigError(
                f"rows {rows.start} to {rows.stop - 1} of the global batch are no whole lanes of {self._share} rows: "
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
        """Go on from the cursors that the processes of an earlier run, whatever their number, kept.

        Raises:
            CheckpointError: for cursors that are missing, double, of different steps, or of another packing.
        """
        whose: dict[int, int] = {}
        found: dict[int, tuple[int, int]] = {}
        for rank, state in enumerate(states):
            if not isinstance(state, dict) or not {"step", "of", "cursors"} <= state.keys():
                raise CheckpointError(f"the checkpoint has no cursors of packed rows of rank {rank}: was it packed?")
            for name, value in self._identity().items():
                if (theirs := state["of"].get(name)) != value:
                    raise CheckpointError(
                        f"the checkpoint's rows were packed with {name}={theirs}, and this run's are with {value}: "
                        "a different order, which cannot resume from this checkpoint. Set it back, or start a new run"
                    )
            if state["step"] != states[0]["step"]:
                raise CheckpointError(
                    f"the checkpoint's cursors are of step {states[0]['step']} for rank 0 and of step {state['step']} "
                    f"for rank {rank}"
                )
            for lane, chunk, before in state["cursors"]:
                if lane in found:
                    raise CheckpointError(f"the checkpoint has lane {lane} twice, of ranks {whose[lane]} and {rank}")
                found[lane], whose[lane] = (int(chunk), int(before)), rank
        missing = sorted(set(range(self.lanes)) - set(found))
        if missing:
            raise CheckpointError(
                f"the checkpoint lacks the cursors of {len(missing)} of {self.lanes} lanes, {missing[:8]}: the state "
                "of a process is missing"
            )
        self._lanes = [_Lane(found[lane][0], [found[lane][1]]) for lane in range(self.lanes)]

    def _identity(self) -> dict[str, Any]:
        """What decides where a row lies, by the names of the settings."""
        settings = {f"data.packing.{name}": value for name, value in self._settings.model_dump().items()}
        mine = {"data.packing.length": self.capacity, "data.lanes": self.lanes, "train.global_batch": self.global_batch}
        return settings | mine

    # lanes ------------------------------------------------------------------------------------------------------

    def _new_lane(self, lane: int) -> _Lane:
        return _Lane(0, [0] if self._index is None else self._index[lane].tolist())

    def _lane_pieces(self, lane: int, begin: int, end: int, to_slot: int) -> list[tuple[Indices, ...]]:
        """Slots, rows, epochs, first and last units of the lane's rows `begin..end-1`, one tuple per chunk."""
        parts: list[tuple[Indices, ...]] = []
        while begin < end:
            known = self._pack_until(lane, begin, there=True)
            number = known.chunk_of(begin)
            before = known.rows_before(number)
            chunk = known.kept.get(number) or self._pack_and_keep(lane, number)
            bins = slice(begin - before, min(end - before, chunk.pieces.bins))
            part = slice(chunk.edges[bins.start], chunk.edges[bins.stop])
            pieces, items = chunk.pieces, chunk.pieces.item[part]
            parts.append(
                (
                    pieces.bin[part] + before + to_slot,
                    chunk.rows[items],
                    chunk.epochs[items],
                    pieces.first[part],
                    pieces.last[part],
                )
            )
            begin = before + bins.stop
        return parts

    def _pack_until(self, lane: int, row: int, there: bool) -> _Lane:
        """The lane, packed as far as this row: all rows before it are known, or the row itself, too."""
        if row < self._lanes[lane].before[0]:
            self._lanes[lane] = self._new_lane(lane)
        known = self._lanes[lane]
        empty = 0
        while known.before[-1] < row + there:
            made = self._pack_and_keep(lane, known.next_chunk).pieces.bins
            known.before.append(known.before[-1] + made)
            empty = 0 if made else empty + 1
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
        rows, epochs = self._stream.at(positions)
        lengths = np.asarray(self.lengths(rows, epochs), dtype=np.int64)
        longest = int(lengths.argmax())
        if how.cut == "never" and lengths[longest] > self.capacity:
            raise DataError(
                f"row {rows[longest]} of the source has {lengths[longest]} units, and a packed row holds "
                f"{self.capacity}: set data.packing.cut=long to cut it, or a larger data.packing.length"
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
    """Bins that were filled the longest item first, in an order that says nothing of what is in them."""
    if not pieces.bins:
        return pieces
    bins = Shuffle(pieces.bins, seed)(np.arange(pieces.bins))[pieces.bin]
    order = np.argsort(bins, kind="stable")
    return packing.Pieces(bins[order], pieces.item[order], pieces.first[order], pieces.last[order], pieces.bins)
