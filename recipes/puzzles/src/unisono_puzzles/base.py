"""What the puzzle tasks of both engines share: data, samples, batches and counts, in NumPy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from unisono import (
    Batch,
    ConfigError,
    DataError,
    Joined,
    SampleColumns,
    SampleContext,
    SampleContexts,
    Source,
    Task,
    read_asset,
)
from unisono.recipe_tools import cache_entry
from unisono_puzzles import settings
from unisono_puzzles.data.arrays import StoredPuzzle
from unisono_puzzles.data.formats import ARC_COLOURS, FormatJson, Puzzle, Puzzles, format_from_json, format_to_json
from unisono_puzzles.data.library import Library, open_libraries
from unisono_puzzles.data.prepared import PuzzlePreparation
from unisono_puzzles.data.tables import grid_to_json, puzzle_to_text
from unisono_puzzles.model import scores
from unisono_puzzles.model.shape import Kind, inner_width, step_flops

_ASSET = "puzzles.json"
_LEVELS = 4  # of ratings
KIND = "kind"  # the array of a batch of several kinds that says which one it holds
_LEAST_WIDTH = 8  # features of a head in a model that is made smaller
Fields = dict[str, Any]


class _Puzzles(TypedDict):
    format: FormatJson
    embeddings: int
    levels: list[float]
    tasks: NotRequired[list[str]]


class _Assets(TypedDict):
    kinds: dict[str, _Puzzles]
    data: dict[str, Any]


class PuzzlesBase(Task):
    """Questions and answers as tokens, and rows that work at one puzzle for several steps.

    The loss has the terms `answer` and `halt`, and `q_continue` and `consistency` where they have a weight; each counts
    rows. Arrays of a batch and of the carry are called `<kind>/<name>`, since a micro-batch holds one kind of puzzle.
    """

    Config = settings.PuzzlesConfig
    Model = settings.Model
    Data = settings.PuzzlesData

    config: settings.PuzzlesConfig
    model_config: settings.Model
    data_config: Any
    _predict_only = False  # all puzzles are held out, and need no answers
    _run_tasks: Mapping[str, Sequence[str]] = {}  # names of ARC tasks by kind, of the run that predicts

    # data -------------------------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Open the puzzles."""
        _ = self.libraries

    def data(self) -> Source | Mapping[str, Source]:
        """The puzzles to train on; of several kinds, by name."""
        rows: dict[str, Source] = {
            name: PuzzlesOfKind(name, library.training) for name, library in self.libraries.items()
        }
        return rows if len(rows) > 1 else next(iter(rows.values()))

    def held_out(self) -> Source | None:
        """The held-out puzzles, one kind after another."""
        found = {name: library.held_out for name, library in self.libraries.items()}
        rows = {
            name: PuzzlesOfKind(name, puzzles)
            for name, puzzles in found.items()
            if puzzles is not None and len(puzzles)
        }
        return Joined(rows) if len(rows) > 1 else next(iter(rows.values()), None)

    def sample(self, record: tuple[str, Puzzle | StoredPuzzle], context: SampleContext) -> Fields:
        """A puzzle, augmented in training, and the random draws that decide when its row may halt."""
        kind, puzzle = record
        library = self.libraries[kind]
        if self.votes_in(kind) and not context.training:
            return {"kind": kind, **self._variants(library, puzzle), "level": np.int32(-1)}
        example = library.example(puzzle, context.rng if context.training else None)
        fields: Fields = {
            "kind": kind,
            "question": example.question,
            "answer": example.answer,
            "identifier": np.int32(example.identifier),
        }
        # A training batch has all that an evaluation's has: JAX traces the evaluation before the first step on one.
        rating = np.array([np.nan if context.training else example.rating])
        fields["level"] = self._levels_of(kind, rating)[0]
        if context.training:
            fields["explore"] = np.float32(context.rng.random())
            fields["patience"] = np.int32(self._patience(context.rng.random()))
        return fields

    def sample_batch(self, records: Any, contexts: SampleContexts) -> Sequence[Fields]:
        """What `sample` builds of each puzzle; Sudokus and mazes, which have one shape, are built all at once."""
        if not isinstance(records, PuzzlesOfKind) or self.libraries[records.kind].format.kind == "arc":
            return [self.sample(record, context) for record, context in zip(records, contexts, strict=True)]
        kind, puzzles, library = records.kind, records.puzzles, self.libraries[records.kind]
        count, training = len(puzzles), contexts.training
        draws = contexts.rng.random(library.draws + 2) if training else None
        if draws is None:
            questions, answers = puzzles.questions, puzzles.answers
            levels = self._levels_of(kind, puzzles.ratings)
        else:
            boards = library.examples(puzzles, draws[:, :-2])
            questions, answers = boards[:, 0], boards[:, 1]
            levels = np.full(count, -1, dtype=np.int32)
        fields: Fields = {
            "kind": [kind] * count,
            "question": questions,
            "answer": answers,
            "identifier": np.zeros(count, dtype=np.int32),
            "level": levels,
        }
        if draws is not None:
            fields["explore"] = draws[:, -2].astype(np.float32)
            fields["patience"] = self._patience(draws[:, -1]).astype(np.int32)
        return SampleColumns(**fields)

    def collate(self, samples: Sequence[Fields]) -> Batch:
        """A batch of one kind: `question` and `answer` (rows, cells) uint8, and numbers per row.

        If the run has several kinds, the arrays of this one come first, and those of the others are zeros, so that all
        batches have the same shapes, as JAX requires; nothing is computed from them. `kind` (rows,) is its number.
        """
        together = samples.fields if isinstance(samples, SampleColumns) else None
        kinds = sorted(set(together["kind"]) if together else {sample["kind"] for sample in samples})
        if len(kinds) > 1:
            weights = ", ".join(f"{kind}: 1" for kind in self.kinds)
            raise DataError(
                f"a micro-batch would hold puzzles of several kinds ({', '.join(kinds)}), and it can hold one; set "
                f"data.mixture={{weights: {{{weights}}}, grouped: true}}"
            )
        held = {
            name: together[name] if together else np.stack([sample[name] for sample in samples])
            for name in samples[0]
            if name != "kind"
        }
        batch = with_kind(kinds[0], held)
        if len(self.kinds) > 1:
            number = list(self.kinds).index(kinds[0])
            for other in self.kinds.keys() - kinds:
                batch |= with_kind(other, self._zero_fields(other, len(samples), "explore" in held))
            batch[KIND] = np.full(len(samples), number, dtype=np.int32)
        return batch

    def counts(self, batch: Batch) -> dict[str, float]:
        """The number of rows with a known answer, for every term."""
        answers = np.asarray(fields_of(batch)["answer"])
        return dict.fromkeys(scores.term_weights(self.config), float((answers > 0).any(axis=1).sum()))

    def work(self, batch: Batch) -> dict[str, float]:
        """The number of puzzles, and the FLOPs of a supervision step at the full depth."""
        kind, rows, config = batch_kind(batch), float(len(next(iter(batch.values())))), self.model_config
        return {"puzzles": rows, "flops": rows * step_flops(self.kinds[kind], config, config.h_cycles, config.l_cycles)}

    # the model --------------------------------------------------------------------------------------------------

    def cycles(self, scalars: Mapping[str, Any]) -> tuple[int, int]:
        """H cycles and L cycles at this step: scheduled values are rounded to whole numbers."""
        config = self.model_config
        h_cycles, l_cycles = scalars.get("h_cycles", config.h_cycles), scalars.get("l_cycles", config.l_cycles)
        return max(1, round(float(h_cycles))), max(1, round(float(l_cycles)))

    def exploration(self, scalars: Mapping[str, Any]) -> Any:
        """The fraction of rows that must not halt before a random step."""
        return scalars.get("halt_exploration", self.config.halt_exploration)

    def votes_in(self, kind: str) -> bool:
        """Whether evaluation takes a vote over augmentations of each question of this kind."""
        return self.config.votes > 1 and self.kinds[kind].format.kind == "arc"

    @property
    def competing(self) -> bool:
        """Whether the Q-value of halting must exceed that of continuing (HRM)."""
        return self.config.weights.q_continue > 0

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        """The kinds of puzzles, by name."""
        return {name: Kind(library.format, library.embeddings) for name, library in self.libraries.items()}

    @cached_property
    def levels(self) -> dict[str, list[str]]:
        """Names of the quartiles of the held-out ratings, by kind: `1_up_to_6`, …; none without ratings."""
        return {name: _level_names(edges) for name, edges in self._edges.items()}

    def predictions(self, outputs: Any, batch: Batch) -> dict[str, Any]:
        """The columns of `unisono predict`: puzzle, solution, whether it is exact, confidence and steps.

        `exact` and `cells` are empty where the answer is unknown. ARC grids are written as JSON.
        """
        kind, fields = batch_kind(batch), {name: np.asarray(value) for name, value in fields_of(batch).items()}
        outputs = fields_of(outputs, kind)
        found = {name: np.asarray(outputs[name].tolist()) for name in ("solution", "q", "early_steps")}
        format_, answers = self.kinds[kind].format, fields["answer"]
        questions = fields["question"] if fields["question"].ndim == 2 else fields["question"][:, 0]
        pairs = zip(found["solution"], answers, strict=True)
        cells = [float((solved == true)[true > 0].mean()) if true.any() else None for solved, true in pairs]
        columns: dict[str, Any] = {
            "puzzle": [puzzle_to_text(tokens, format_) for tokens in questions],
            "solution": [puzzle_to_text(tokens, format_) for tokens in found["solution"]],
            "answer": [puzzle_to_text(tokens, format_) if tokens.any() else "" for tokens in answers],
            "exact": ["" if share is None else share == 1.0 for share in cells],
            "cells": ["" if share is None else share for share in cells],
            "confidence": 1 / (1 + np.exp(-found["q"][:, 0])),
            "steps": found["early_steps"],
        }
        if "ranked" in outputs:
            grids, votes = np.asarray(outputs["ranked"].tolist()), outputs["votes"].tolist()
            columns["solution"] = [grid_to_json(best[0]) for best in grids]
            for number in range(grids.shape[1]):
                columns[f"guess_{number + 1}"] = [grid_to_json(best[number]) for best in grids]
                columns[f"votes_{number + 1}"] = [int(counts[number]) for counts in votes]
            del columns["exact"], columns["cells"]
            for most in self.config.pass_at:
                right = outputs[f"pass@{most}"].tolist()
                columns[f"pass@{most}"] = [
                    bool(won) if known.any() else "" for won, known in zip(right, answers, strict=True)
                ]
        return columns

    # around the run ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check the settings against the puzzles."""
        for name in self.kinds:
            most = getattr(self.libraries[name].config, "augmentations", None)
            if self.votes_in(name) and (most is None or self.config.votes > most + 1):
                raise ConfigError(
                    f"task.votes={self.config.votes}, but each task of {name} has {most or 0} augmentations besides "
                    "itself (data.augmentations); votes need data=arc"
                )
        if self.config.votes > 1 and not any(map(self.votes_in, self.kinds)):
            raise ConfigError(f"task.votes={self.config.votes} is for ARC, and there is none; use 1")

    def facts(self) -> dict[str, Any]:
        """Sizes of the puzzles and of the model."""
        described = {name: library.facts() for name, library in self.libraries.items()}
        return next(iter(described.values())) if len(described) == 1 else described

    def save_assets(self, directory: Path) -> None:
        """Save the kinds of puzzles, so that the run can be used without its data."""
        kinds = {
            name: {
                "format": format_to_json(kind.format),
                "embeddings": kind.embeddings,
                "levels": self._edges[name],
                "tasks": list(self.libraries[name].tasks),
            }
            for name, kind in self.kinds.items()
        }
        described = {"kinds": kinds, "data": self.data_config.model_dump(mode="json")}
        (directory / _ASSET).write_text(json.dumps(described), encoding="utf-8")

    def load_assets(self, directory: Path) -> None:
        """Use the kinds of a run. Of data other than the run's, all puzzles are solved, with or without answers."""
        described = read_asset(directory, _ASSET, _Assets)
        vars(self)["kinds"] = {
            name: Kind(format_from_json(one["format"]), one["embeddings"]) for name, one in described["kinds"].items()
        }
        vars(self)["_edges"] = {name: one["levels"] for name, one in described["kinds"].items()}
        self._run_tasks = {name: one.get("tasks", []) for name, one in described["kinds"].items()}
        self._predict_only = described["data"] != self.data_config.model_dump(mode="json")

    def shrink(self, limit: int) -> PuzzlesBase | None:
        """The same puzzles with a narrower model and fewer cycles."""
        config = self.model_config
        size = config.width * config.layers * config.nets * (4 * config.width + 3 * inner_width(config.width, config))
        fewer = {
            "width": min(config.width, _LEAST_WIDTH * config.heads),
            "prefix": min(config.prefix, 2),
            "embedding": min(config.embedding, _LEAST_WIDTH),
            "inner_multiple": min(config.inner_multiple, 8),
            "h_cycles": min(config.h_cycles, 2),
            "l_cycles": min(config.l_cycles, 2),
        }
        small = config.model_copy(update=fewer)
        if size <= limit or small == config:
            return None
        return type(self)(self.config, model=small, data=self.data_config)

    @cached_property
    def libraries(self) -> dict[str, Library]:
        """The puzzles, by kind.

        Raises:
            DataError: if a run is given puzzles of a kind that it was not trained on.
        """
        found = open_libraries(self.data_config, self._predict_only)
        for name, library in found.items() if self._predict_only else ():
            known = self.kinds.get(name)
            if known is None or known.format != library.format:
                trained = ", ".join(f"{one} {kind.format.size}" for one, kind in self.kinds.items())
                raise DataError(f"these puzzles are {name} {library.format.size}, and the run was trained on {trained}")
            if library.tasks:
                found[name] = library.with_tasks_of_run(self._run_tasks[name], known.embeddings)
            elif known.embeddings < library.embeddings:
                raise DataError(
                    f"these puzzles need {library.embeddings} puzzle embeddings, and the run has {known.embeddings}"
                )
        return found

    @cached_property
    def _edges(self) -> dict[str, list[float]]:
        """The quartiles of the held-out ratings, without repetition: the highest rating of each level."""
        found: dict[str, list[float]] = {}
        for name, library in self.libraries.items():
            ratings = getattr(library.held_out, "ratings", np.zeros(0))
            ratings = ratings[np.isfinite(ratings)]
            quantiles = (
                np.quantile(ratings, np.arange(1, _LEVELS + 1) / _LEVELS, method="lower") if len(ratings) else []
            )
            found[name] = sorted({float(value) for value in quantiles})
        return found

    def _variants(self, library: Library, puzzle: Any) -> Fields:
        """A question in its first augmentations, with the symmetry and colours of each."""
        examples = [library.variant(puzzle, number) for number in range(self.config.votes)]
        changes = [library.arc_variant(puzzle.group, number) for number in range(self.config.votes)]
        return {
            "question": np.stack([example.question for example in examples]),
            "answer": puzzle.answer,
            "identifier": np.array([example.identifier for example in examples], dtype=np.int32),
            "symmetry": np.array([change.symmetry for change in changes], dtype=np.int32),
            "colours": np.stack([change.colours for change in changes]).astype(np.int32),
        }

    def _zero_fields(self, kind: str, rows: int, training: bool) -> Fields:
        """Zeros in place of a kind that the batch does not hold."""
        length, votes = self.kinds[kind].format.length, not training and self.votes_in(kind)
        shown = (rows, self.config.votes) if votes else (rows,)
        shapes = {"question": (*shown, length), "answer": (rows, length), "identifier": shown, "level": (rows,)}
        shapes |= {"explore": (rows,), "patience": (rows,)} if training else {}
        shapes |= {"symmetry": shown, "colours": (*shown, ARC_COLOURS)} if votes else {}
        dtypes = {"question": np.uint8, "answer": np.uint8, "explore": np.float32}
        return {name: np.zeros(shape, dtypes.get(name, np.int32)) for name, shape in shapes.items()}

    def preparation(self) -> dict[str, tuple[PuzzlePreparation, Path]]:
        """What `unisono data prepare` writes: the augmented training puzzles and the held-out ones."""
        found: dict[str, tuple[PuzzlePreparation, Path]] = {}
        for kind, library in self.libraries.items():
            for part, made in library.preparations().items():
                digest = hashlib.sha256(json.dumps(made.inputs, sort_keys=True).encode()).hexdigest()[:16]
                name = part if len(self.libraries) == 1 else f"{kind}/{part}"
                found[name] = (made, cache_entry("puzzles", digest, *name.split("/")))
        return found

    def _levels_of(self, kind: str, ratings: NDArray[np.floating[Any]]) -> NDArray[np.int32]:
        """The quartile of each rating; -1 for none."""
        edges = self._edges[kind]
        if len(edges) < 2:
            return np.full(len(ratings), -1, dtype=np.int32)
        return np.where(np.isfinite(ratings), np.searchsorted(edges[:-1], ratings), -1).astype(np.int32)

    def _patience(self, draws: Any) -> Any:
        """The first step at which a row that explores may halt: 2 to `halt_steps`, from random numbers."""
        return 2 + np.floor(draws * (max(2, self.config.halt_steps) - 1))


@dataclass(frozen=True)
class PuzzlesOfKind:
    """The puzzles of a kind, each as the name of the kind and the puzzle; a source.

    Attributes:
        kind: its name in the run.
        puzzles: a source of puzzles.
    """

    kind: str
    puzzles: Any

    def __len__(self) -> int:
        return len(self.puzzles)

    def __getitem__(self, row: int) -> tuple[str, Puzzle | StoredPuzzle]:
        return self.kind, self.puzzles[row]

    def __getitems__(self, rows: Sequence[int]) -> PuzzlesOfKind | list[tuple[str, Puzzle | StoredPuzzle]]:
        """Several of them; those that lie in arrays as such."""
        if not isinstance(self.puzzles, Puzzles):
            return [self[row] for row in rows]
        return PuzzlesOfKind(self.kind, self.puzzles.subset(rows))

    @property
    def fingerprint(self) -> str | None:
        """That of the puzzles; None if they have none."""
        return getattr(self.puzzles, "fingerprint", None)

    def check_files(self, share: int = 0, shares: int = 1) -> None:
        """Raise if files have changed since they were opened."""
        if hasattr(self.puzzles, "check_files"):
            self.puzzles.check_files(share, shares)


def _level_names(edges: Sequence[float]) -> list[str]:
    """Names that sort as the levels do, with the highest rating of each; [] for fewer than two levels."""
    if len(edges) < 2:
        return []
    names = [f"{number}_up_to_{edge:g}" for number, edge in enumerate(edges[:-1], start=1)]
    return [*names, f"{len(edges)}_above_{edges[-2]:g}"]


def batch_kind(batch: Mapping[str, Any]) -> str:
    """The kind of puzzles that a batch holds, whose arrays come first."""
    return next(iter(batch)).split("/")[0]


def fields_of(arrays: Mapping[str, Any], kind: str | None = None) -> Fields:
    """Arrays of a kind, by default the first, in a batch or a carry, without the name of the kind."""
    begin = f"{kind or batch_kind(arrays)}/"
    return {name.removeprefix(begin): array for name, array in arrays.items() if name.startswith(begin)}


def with_kind(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `fields_of`."""
    return {f"{kind}/{name}": array for name, array in fields.items()}
