"""The recordings of a run: what is trained on, what is held out, and the names of the classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from unisono_birdsong.data.recordings import open_split
from unisono_birdsong.data.synthetic import Songs
from unisono_birdsong.settings import RecordingsData, SyntheticData


class LabelledSource(Protocol):
    """Rows of recordings.

    A record has `audio` (bytes, a path, a byte range, or `(samples, rate)`), `labels` (class ids; empty where nothing
    is known), `group` (what may not stand on both sides of a split), `name` (for errors) of a window of a long
    recording, `window`, and `known` where rows without labels may be known to have none.

    Attributes:
        classes: their names.
    """

    classes: tuple[str, ...]

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Library:
    """What is trained on, and what is held out; None for nothing."""

    training: LabelledSource
    held_out: LabelledSource | None


class TaskOfRecordings(Protocol):
    """What exports, probes and pictures use of a task."""

    data_config: SyntheticData | RecordingsData

    @property
    def library(self) -> Library:
        """Its recordings."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""


def open_library(config: SyntheticData | RecordingsData) -> Library:
    """The recordings that the group `data` names."""
    if isinstance(config, RecordingsData):
        return Library(*open_split(config))
    return Library(Songs(config, "training"), Songs(config, "held out") if config.held_out else None)
