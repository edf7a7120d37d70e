"""What a run knows of its puzzles without their data: their kinds, the levels of their ratings, and ARC's tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from unisono_puzzles.data.formats import FormatJson, format_from_json, format_to_json
from unisono_puzzles.data.library import Library
from unisono_puzzles.model.shape import Kind

_LEVELS = 4  # of ratings


class KindJson(TypedDict):
    """A kind in a run's assets."""

    format: FormatJson
    embeddings: int
    levels: list[float]
    tasks: NotRequired[list[str]]


@dataclass(frozen=True)
class Catalogue:
    """The kinds of puzzles of a run, each by its name.

    Attributes:
        kinds: What the model has for each.
        edges: The quartiles of the held-out ratings, without repetition: the highest rating of each level.
        tasks: Names of ARC's tasks, in the order of their embeddings.
    """

    kinds: dict[str, Kind]
    edges: dict[str, list[float]]
    tasks: dict[str, list[str]]

    @classmethod
    def of(cls, libraries: Mapping[str, Library]) -> Catalogue:
        """That of these puzzles."""
        return cls(
            {name: Kind(library.format, library.embeddings) for name, library in libraries.items()},
            {name: _quartiles(getattr(library.held_out, "ratings", None)) for name, library in libraries.items()},
            {name: list(library.tasks) for name, library in libraries.items()},
        )

    @classmethod
    def from_json(cls, kinds: Mapping[str, KindJson]) -> Catalogue:
        """The inverse of `to_json`."""
        return cls(
            {name: Kind(format_from_json(one["format"]), one["embeddings"]) for name, one in kinds.items()},
            {name: one["levels"] for name, one in kinds.items()},
            {name: one.get("tasks", []) for name, one in kinds.items()},
        )

    def to_json(self) -> dict[str, KindJson]:
        """As a run saves it."""
        return {
            name: {
                "format": format_to_json(kind.format),
                "embeddings": kind.embeddings,
                "levels": self.edges[name],
                "tasks": self.tasks[name],
            }
            for name, kind in self.kinds.items()
        }

    @property
    def levels(self) -> dict[str, list[str]]:
        """Names of the quartiles of the held-out ratings, by kind: `1_up_to_6`, …; none without ratings."""
        return {name: _level_names(edges) for name, edges in self.edges.items()}

    def levels_of(self, kind: str, ratings: NDArray[np.floating[Any]]) -> NDArray[np.int32]:
        """The quartile of each rating; -1 for none."""
        edges = self.edges[kind]
        if len(edges) < 2:
            return np.full(len(ratings), -1, dtype=np.int32)
        return np.where(np.isfinite(ratings), np.searchsorted(edges[:-1], ratings), -1).astype(np.int32)


def _quartiles(ratings: NDArray[np.floating[Any]] | None) -> list[float]:
    known = np.zeros(0) if ratings is None else ratings[np.isfinite(ratings)]
    if not len(known):
        return []
    quantiles = np.quantile(known, np.arange(1, _LEVELS + 1) / _LEVELS, method="lower")
    return sorted({float(value) for value in quantiles})


def _level_names(edges: Sequence[float]) -> list[str]:
    """Names that sort as the levels do, with the highest rating of each; [] for fewer than two levels."""
    if len(edges) < 2:
        return []
    names = [f"{number}_up_to_{edge:g}" for number, edge in enumerate(edges[:-1], start=1)]
    return [*names, f"{len(edges)}_above_{edges[-2]:g}"]
