"""The shards of an unfinished folder: planned, prepared in partitions, noted one by one, and merged.

`plan.json` is written first, then each shard with a note next to it, and finally, when all notes exist and are
consistent, `manifest.json`, which marks the folder as finished.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.data.prepare.manifest import MANIFEST_FILE, Plan, ShardNote, build_manifest, read_json, write_json
from unisono.data.prepare.shards import Shards, damaged_error
from unisono.runtime.communication.communicator import usable_cores
from unisono.runtime.errors import ConfigError, DataError, format_ranges
from unisono.runtime.files import file_hash

PLAN_FILE = "plan.json"


@dataclass(frozen=True)
class Partition:
    """The `number`-th of `count` partitions of the shards, counted from 1."""

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Partition:
        """Parse `i/n`.

        >>> Partition.parse("2/3")
        Partition(number=2, count=3)
        """
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if not match or not 1 <= int(match[1]) <= int(match[2]):
            raise ConfigError(f"shard={text}: write shard=i/n with i from 1 to n, e.g. shard=1/8")
        return cls(int(match[1]), int(match[2]))

    def shards(self, total: int) -> range:
        """The numbers of its shards, out of `total`.

        >>> [list(Partition(i, 3).shards(7)) for i in (1, 2, 3)]
        [[0, 1], [2, 3], [4, 5, 6]]
        """
        return range((self.number - 1) * total // self.count, self.number * total // self.count)


@dataclass(frozen=True)
class PlannedShard:
    """A shard of a plan: its number, the number of shards, and its range of records."""

    number: int
    total: int
    first: int
    last: int

    @property
    def stem(self) -> str:
        """The name of its files, without suffix."""
        return f"shard-{self.number:05d}-of-{self.total:05d}"

    @property
    def file(self) -> str:
        """Name of the file with its rows."""
        return f"{self.stem}.arrow"

    @property
    def note(self) -> str:
        """Name of the file with its metadata."""
        return f"{self.stem}.json"


def merge_partitions(folder: Path) -> Shards:
    """Finish a folder, after checking that all its shards exist and were made from the same data and settings.

    Raises:
        DataError: naming what is missing, left over, damaged, or from another source or tokenizer.
    """
    if (folder / MANIFEST_FILE).is_file():
        finished = Shards(folder)
        finished.verify()
        return finished
    if not (folder / PLAN_FILE).is_file():
        raise DataError(
            f"{folder} has no {PLAN_FILE}, so nothing was prepared there; run `unisono data prepare … out={folder}`"
        )
    shards = build_shards(read_json(folder / PLAN_FILE, Plan)["bounds"])
    missing = [shard.number for shard in shards if not (folder / shard.note).is_file()]
    if missing:
        raise DataError(
            f"{folder}: {len(missing)} of {len(shards)} shards are missing ({format_ranges(missing)}); create them by "
            "running `unisono data prepare` with the same arguments, and shard=i/n for each unfinished part"
        )
    known = {shard.note for shard in shards} | {shard.file for shard in shards}
    others = sorted(path.name for path in folder.glob("shard-*-of-*.*") if path.suffix in (".arrow", ".json"))
    if left_over := [name for name in others if name not in known]:
        raise DataError(
            f"{folder} also contains shards of another preparation, e.g. {left_over[0]}, which would overlap with the "
            f"{len(shards)} of its plan; remove the files that do not belong to it"
        )
    notes = [read_json(folder / shard.note, ShardNote) for shard in shards]
    for shard, note in zip(shards, notes, strict=True):
        if note["range"] != [shard.first, shard.last]:
            raise DataError(
                f"{folder / shard.note} covers the records {note['range']}, but in the plan this shard has "
                f"[{shard.first}, {shard.last}]: rows would be missing or occur twice; remove it and prepare it again"
            )
        for what in ("column", "dtype", "of"):
            if note[what] != notes[0][what]:
                raise DataError(
                    f"{folder}: {shard.file} and {shards[0].file} were made from different data or settings: "
                    f"{describe_difference(note[what], notes[0][what], what)}; prepare all parts from the same files "
                    "with the same tokenizer"
                )
    with ThreadPoolExecutor(usable_cores()) as pool:
        hashes = pool.map(lambda shard: file_hash(folder / shard.file), shards)
        for shard, note, found in zip(shards, notes, hashes, strict=True):
            if found != note["sha256"]:
                (folder / shard.note).unlink()  # so that it is prepared again
                raise damaged_error(folder / shard.file, "its hash differs from that recorded when it was written")
    entries = [{"file": shard.file, **manifest_entry(note)} for shard, note in zip(shards, notes, strict=True)]
    manifest = build_manifest(notes[0]["column"], notes[0]["dtype"], notes[0]["of"], entries)
    if not manifest["units"]:
        raise DataError(
            f"{folder}: the {shards[-1].last} records produced no rows: {manifest['left_out']} were left out as "
            "empty, and the others yielded no units. Do the documents contain text that the tokenizer can encode?"
        )
    write_json(folder / MANIFEST_FILE, manifest)
    remove_leftovers(folder)
    return Shards(folder)


def build_shards(bounds: Sequence[int]) -> list[PlannedShard]:
    """The shards of a plan."""
    return [PlannedShard(i, len(bounds) - 1, bounds[i], bounds[i + 1]) for i in range(len(bounds) - 1)]


def manifest_entry(note: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest's entry for a shard."""
    names = ("rows", "units", "left_out", "bytes", "sha256", "content", "shortest", "longest", "mean")
    return {name: note[name] for name in names}


def remove_leftovers(folder: Path) -> None:
    """Remove files that a finished folder does not need."""
    for path in [*folder.glob("shard-*-of-*.json"), *folder.glob("*.writing")]:
        path.unlink(missing_ok=True)


def describe_difference(there: Any, here: Any, name: str) -> str:
    """The first keys in which two JSON values differ."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        differing = [key for key in sorted({*there, *here}) if there.get(key) != here.get(key)]
        return "; ".join(describe_difference(there.get(key), here.get(key), key) for key in differing[:3])
    return f"{name} is {there!r} and {here!r}"
