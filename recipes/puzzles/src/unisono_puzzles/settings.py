"""The settings of the puzzle recipe: the groups `data`, `model` and `task`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from unisono import Data, Settings

Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


# data -----------------------------------------------------------------------------------------------------------


class Augmented(Settings):
    """Settings of all kinds of puzzles."""

    augment: bool = Field(True, description="show each training puzzle under a random symmetry")
    augmentations: PositiveInt | None = Field(
        None, description="number of symmetries per puzzle besides the identity; null: any, drawn anew each time"
    )
    seed: NonNegativeInt = Field(0, description="seed for generated puzzles, subsets and numbered augmentations")
    cache: Path | None = Field(
        None, description="cache for puzzles that have been read and checked; null: $UNISONO_CACHE or ~/.cache/unisono"
    )


class Embedded(Augmented):
    """Generated Sudokus with a unique solution; no download."""

    kind: Literal["embedded"]
    side: Literal[4, 6, 9] = Field(6, description="cells per side")
    puzzles: PositiveInt = Field(2000, description="number of training puzzles")
    held_out: PositiveInt = Field(500, description="number of held-out puzzles")
    clues: tuple[NonNegativeInt, NonNegativeInt] = Field(
        (10, 14),
        description="minimum and maximum number of clues; a puzzle keeps more if its solution would not be unique",
    )

    @model_validator(mode="after")
    def _in_order(self) -> Embedded:
        if not self.clues[0] <= self.clues[1] <= self.side**2:
            raise ValueError(
                f"data.clues={list(self.clues)}: give the minimum and the maximum number of clues, up to {self.side**2}"
            )
        return self


class FromTables(Augmented):
    """Puzzles in text files."""

    path: Path = Field(description="a CSV file, or a folder with train.csv and test.csv")
    test: Path | None = Field(None, description="a CSV file to evaluate on; null: test.csv of the folder, or held_out")
    held_out: Share = Field(0.1, description="fraction of the puzzles to hold out if there is no test file")
    puzzles: PositiveInt | None = Field(None, description="size of a random training subset; null: all puzzles")
    improper: Literal["stop", "skip"] = Field("stop", description="stop, or skip puzzles that cannot be used")


class Sudoku(FromTables):
    """Sudokus: CSV with the columns `q` and `a` (or question, answer), or one Sudoku per line; 4×4, 6×6, 9×9."""

    kind: Literal["sudoku"]
    unique: bool = Field(
        False, description="solve every puzzle before training to check that its solution is unique; minutes for 50,000"
    )


class Maze(FromTables):
    """Mazes: CSV with the columns `q` and `a`, walls #, start S, goal G, and o along the way in answers."""

    kind: Literal["maze"]
    size: tuple[PositiveInt, PositiveInt] | None = Field(None, description="rows and columns; null: a square")


class Arc(Augmented):
    """ARC-AGI 1 or 2 in JSON; every augmentation of a task has a puzzle embedding of its own."""

    kind: Literal["arc"]
    path: Path = Field(description="a folder with <set>/<task>.json, or with *_challenges.json and *_solutions.json")
    sets: list[str] | None = Field(None, description="use only these sets of tasks; null: all")
    evaluate: list[str] | None = Field(
        None, description="sets whose tests are held out; null: those called evaluation…, else all"
    )
    augmentations: PositiveInt = Field(1000, description="augmentations of each task besides the original")
    translate: bool = Field(True, description="place training grids at random offsets in the 30×30 field")


class Arrays(Settings):
    """A folder in the layout of the original repositories, with train/ and test/ in it; already augmented."""

    kind: Literal["arrays"]
    path: Path = Field(description="a folder with train/dataset.json and test/dataset.json")


class Prepared(Settings):
    """A folder made by `unisono data prepare puzzles`."""

    kind: Literal["prepared"]
    path: Path = Field(description="folder that contains train and test")


Part = Annotated[Embedded | Sudoku | Maze | Arc | Arrays | Prepared, Field(discriminator="kind")]


class EmbeddedData(Data, Embedded):
    """`data=embedded`."""


class SudokuData(Data, Sudoku):
    """`data=sudoku`."""


class MazeData(Data, Maze):
    """`data=maze`."""


class ArcData(Data, Arc):
    """`data=arc`."""


class ArraysData(Data, Arrays):
    """`data=arrays`."""


class PreparedData(Data, Prepared):
    """`data=prepared`."""


class SeveralData(Data):
    """`data=several`: puzzles of several kinds; a micro-batch holds one kind, so that nothing is padded.

    Without `mixture`, every kind has as many rows of a global batch.
    """

    kind: Literal["several"]
    parts: dict[str, Part] = Field(description="kinds of puzzles, each under a name")

    @model_validator(mode="before")
    @classmethod
    def _share_equally(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("mixture") is None and isinstance(given.get("parts"), dict):
            return {**given, "mixture": {"weights": dict.fromkeys(given["parts"], 1), "grouped": True}}
        return given

    @model_validator(mode="after")
    def _at_least_two(self) -> SeveralData:
        if len(self.parts) < 2:
            raise ValueError(
                f"data.parts has {len(self.parts)} kinds of puzzles, and needs two; for one, use data=<kind>"
            )
        for name in self.parts:
            if not name.isidentifier():
                raise ValueError(f"data.parts: {name!r} cannot be a name; use letters, digits and _")
        if self.mixture is not None and not self.mixture.grouped:
            raise ValueError("data.mixture: a micro-batch holds puzzles of one kind; add grouped=true")
        return self


PuzzlesData = Annotated[
    EmbeddedData | SudokuData | MazeData | ArcData | ArraysData | PreparedData | SeveralData,
    Field(discriminator="kind"),
]


# model ----------------------------------------------------------------------------------------------------------


class Model(Settings):
    """A small network that is applied to its own state again and again (TRM), or two of them (HRM)."""

    width: PositiveInt = Field(512, description="hidden dimension of a cell")
    heads: PositiveInt = Field(8, description="attention heads; they divide the width")
    layers: PositiveInt = Field(2, description="layers of the network")
    expansion: PositiveFloat = Field(4.0, description="expansion of SwiGLU, whose inner width is 2/3 of it, rounded up")
    inner_multiple: PositiveInt = Field(256, description="the inner width of SwiGLU is a multiple of it")
    mixer: Literal["attention", "mlp", "sparse"] = Field(
        "attention",
        description="how cells see each other: attention, a SwiGLU over all cells, or attention to the cells of the "
        "same row, column and box alone",
    )
    positions: Literal["rope", "learned", "none"] = Field("rope", description="position encoding")
    prefix: PositiveInt = Field(16, description="positions before the first cell, which hold the puzzle embedding")
    embedding: NonNegativeInt = Field(
        512, description="dimension of puzzle embeddings, up to prefix × width; 0: no puzzle embeddings"
    )
    nets: Literal[1, 2] = Field(1, description="1: one network for both states (TRM); 2: one for each (HRM)")
    h_cycles: PositiveInt = Field(
        3, description="updates of the answer state per step; schedules.h_cycles schedules it"
    )
    l_cycles: PositiveInt = Field(
        6, description="updates of the latent state in each of them; schedules.l_cycles schedules it"
    )
    gradient: Literal["cycle", "step", "all"] = Field(
        "cycle",
        description="backpropagate through the answer state's last cycle (TRM), each state's last update (HRM), or all",
    )

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Model:
        if self.width % self.heads:
            raise ValueError(f"model.width={self.width} is not divisible by model.heads={self.heads}")
        if self.positions == "rope" and self.width // self.heads % 2:
            raise ValueError(
                f"model.width={self.width} gives each of {self.heads} heads an odd number of features, and "
                "model.positions=rope needs an even one"
            )
        if self.positions == "rope" and self.mixer == "mlp":
            raise ValueError("model.positions=rope needs attention; with model.mixer=mlp use model.positions=none")
        if self.embedding > self.prefix * self.width:
            raise ValueError(
                f"model.embedding={self.embedding} is larger than model.prefix × model.width = "
                f"{self.prefix} × {self.width}; make model.embedding smaller or model.prefix larger"
            )
        return self


# task -----------------------------------------------------------------------------------------------------------


class Weights(Settings):
    """How much each term of the loss counts."""

    answer: PositiveFloat = Field(1.0, description="weight of the cells' cross-entropy, averaged over a puzzle")
    halt: NonNegativeFloat = Field(
        0.5, description="weight of the halting head, which predicts whether the answer is correct"
    )
    q_continue: NonNegativeFloat = Field(
        0.0,
        description="weight of the Q-value of continuing, which halting must exceed (HRM); 0: none",
    )
    consistency: NonNegativeFloat = Field(
        0.0,
        description="weight of the squared change of the answer state in its last cycle, so that it converges",
    )


class PuzzlesConfig(Settings):
    """How puzzles are learnt."""

    retired: ClassVar[Mapping[str, tuple[Any, str]]] = {
        "refill": (
            False,
            "A row that has not halted ignores its new example, as in the original: if it kept it, the next batch "
            "would depend on the model's last answers, and could not be built ahead of its step.",
        )
    }

    weights: Weights = Field(Weights(), description="weights of the loss terms")
    cross_entropy: Literal["stablemax", "softmax"] = Field("stablemax", description="cross-entropy of the cells")
    halt_steps: PositiveInt = Field(16, description="maximum supervision steps per puzzle; evaluation always uses all")
    halt_exploration: Fraction = Field(
        0.1,
        description="fraction of rows that must not halt before a random step; schedules.halt_exploration schedules it",
    )
    votes: PositiveInt = Field(
        1, description="ARC: augmentations per question whose answers vote in evaluation; 1: no voting"
    )
    pass_at: list[PositiveInt] = Field(
        [1, 2], description="ARC with voting: report whether the answer is among the top k, for each k"
    )
