"""The settings of the puzzle recipe: the groups `data`, `model` and `task`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from unisono import Data, Settings

Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


# data -----------------------------------------------------------------------------------------------------------


class Augmented(Settings):
    """What all kinds of puzzles have."""

    augment: bool = Field(True, description="show each puzzle of the training under a drawn symmetry")
    augmentations: PositiveInt | None = Field(
        None, description="symmetries of each puzzle there are, besides none; null: any, drawn anew each time"
    )
    seed: NonNegativeInt = Field(0, description="of generated puzzles, subsets and numbered augmentations")
    cache: Path | None = Field(
        None, description="for puzzles that were read and checked; null: $UNISONO_CACHE or ~/.cache/unisono"
    )


class Embedded(Augmented):
    """The example that needs no download: Sudokus with one solution, made on the spot."""

    kind: Literal["embedded"]
    side: Literal[4, 6, 9] = Field(6, description="cells on a side")
    puzzles: PositiveInt = Field(2000, description="to train on")
    held_out: PositiveInt = Field(500, description="to evaluate on")
    clues: tuple[NonNegativeInt, NonNegativeInt] = Field(
        (10, 14), description="fewest and most; a puzzle keeps more where its solution would not be the only one"
    )

    @model_validator(mode="after")
    def _in_order(self) -> Embedded:
        if not self.clues[0] <= self.clues[1] <= self.side**2:
            raise ValueError(f"data.clues={list(self.clues)}: fewest and most of {self.side**2} cells")
        return self


class FromTables(Augmented):
    """Puzzles in files of text."""

    path: Path = Field(description="a CSV file, or a folder with train.csv and test.csv")
    test: Path | None = Field(None, description="a CSV file to evaluate on; null: test.csv of the folder, or held_out")
    held_out: Share = Field(0.1, description="fraction of the puzzles to evaluate on, where there is no file of them")
    puzzles: PositiveInt | None = Field(None, description="train on so many of them, drawn; null: all")
    improper: Literal["stop", "skip"] = Field("stop", description="skip: leave out puzzles that cannot be used")


class Sudoku(FromTables):
    """Sudokus: CSV with the columns `q` and `a` (or question, answer), or one Sudoku per line; 4×4, 6×6, 9×9."""

    kind: Literal["sudoku"]
    unique: bool = Field(
        False, description="solve every puzzle before the start, to see that it has one solution; minutes for 50,000"
    )


class Maze(FromTables):
    """Mazes: CSV with the columns `q` and `a`, walls #, start S, goal G, and o along the way in answers."""

    kind: Literal["maze"]
    size: tuple[PositiveInt, PositiveInt] | None = Field(None, description="rows and columns; null: a square")


class Arc(Augmented):
    """ARC-AGI 1 or 2 in JSON; every augmentation of a task has a puzzle embedding of its own."""

    kind: Literal["arc"]
    path: Path = Field(description="a folder with <set>/<task>.json, or with *_challenges.json and *_solutions.json")
    sets: list[str] | None = Field(None, description="only these sets of tasks; null: all that are there")
    evaluate: list[str] | None = Field(
        None, description="sets whose tests are held out; null: those called evaluation…, else all"
    )
    augmentations: PositiveInt = Field(1000, description="of each task besides the task as it is")
    translate: bool = Field(True, description="place the grids of the training anywhere in the 30×30 field")


class Arrays(Settings):
    """A folder in the layout of the original repositories, with train/ and test/ in it; already augmented."""

    kind: Literal["arrays"]
    path: Path = Field(description="a folder with train/dataset.json and test/dataset.json")


class Prepared(Settings):
    """A folder made by `unisono data prepare puzzles`."""

    kind: Literal["prepared"]
    path: Path = Field(description="the folder, with train and test in it")


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
    """`data=several`: puzzles of several kinds; a micro-batch holds one kind, so that nothing is padded."""

    kind: Literal["several"]
    parts: dict[str, Part] = Field(description="the kinds by a name for each")

    @model_validator(mode="after")
    def _at_least_two(self) -> SeveralData:
        if len(self.parts) < 2:
            raise ValueError(f"data.parts names {len(self.parts)} kinds of puzzles; for one, use data=<kind>")
        for name in self.parts:
            if not name.isidentifier():
                raise ValueError(f"data.parts: {name!r} cannot be a name; use letters, digits and _")
        return self


PuzzlesData = Annotated[
    EmbeddedData | SudokuData | MazeData | ArcData | ArraysData | PreparedData | SeveralData,
    Field(discriminator="kind"),
]


# model ----------------------------------------------------------------------------------------------------------


class Model(Settings):
    """A small network that is applied to its own state again and again (TRM), or two of them (HRM)."""

    width: PositiveInt = Field(512, description="features of a cell")
    heads: PositiveInt = Field(8, description="of attention; they share out the features")
    layers: PositiveInt = Field(2, description="of the network")
    expansion: PositiveFloat = Field(4.0, description="of SwiGLU, whose inner width is 2/3 of it, rounded up")
    inner_multiple: PositiveInt = Field(256, description="the inner width of SwiGLU is a multiple of it")
    mixer: Literal["attention", "mlp", "sparse"] = Field(
        "attention",
        description="how cells see each other: attention, a SwiGLU over all cells, or attention to the cells of the "
        "same row, column and box alone",
    )
    positions: Literal["rope", "learned", "none"] = Field("rope", description="how a cell knows its place")
    prefix: PositiveInt = Field(
        16, description="places before the first cell; the first one holds the puzzle embedding"
    )
    embedding: NonNegativeInt = Field(
        512, description="features of a puzzle embedding, up to prefix × width; 0: puzzles have none"
    )
    nets: Literal[1, 2] = Field(1, description="1: one network for both states (TRM); 2: one for each (HRM)")
    h_cycles: PositiveInt = Field(3, description="updates of the answer state; schedules.h_cycles varies it")
    l_cycles: PositiveInt = Field(6, description="updates of the latent state in each; schedules.l_cycles varies it")
    gradient: Literal["cycle", "step", "all"] = Field(
        "cycle",
        description="through the last cycle of the answer state (TRM), the last update of each state (HRM), or all",
    )

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Model:
        if self.width % self.heads:
            raise ValueError(f"model.width={self.width} cannot be shared out among model.heads={self.heads}")
        if self.positions == "rope" and self.width // self.heads % 2:
            raise ValueError(
                f"model.width={self.width} gives each of {self.heads} heads an odd number of features, and "
                "model.positions=rope needs an even one"
            )
        if self.positions == "rope" and self.mixer == "mlp":
            raise ValueError("model.positions=rope turns what attention compares; with model.mixer=mlp use none")
        if self.embedding > self.prefix * self.width:
            raise ValueError(
                f"model.embedding={self.embedding} does not fit model.prefix={self.prefix} places of "
                f"model.width={self.width}"
            )
        return self


# task -----------------------------------------------------------------------------------------------------------


class Weights(Settings):
    """How much each term of the loss counts."""

    answer: PositiveFloat = Field(1.0, description="cross-entropy of the cells, the mean over those of a puzzle")
    halt: NonNegativeFloat = Field(0.5, description="of the halting head, which tells whether the answer is right")
    q_continue: NonNegativeFloat = Field(
        0.0,
        description="of the value of going on, learnt by Q-learning, which halting then has to exceed (HRM); 0: none",
    )
    consistency: NonNegativeFloat = Field(
        0.0,
        description="of the squared change of the answer state in its last cycle, so that it comes to rest; 0: none",
    )


class PuzzlesConfig(Settings):
    """How puzzles are learnt."""

    weights: Weights = Field(Weights(), description="of the terms of the loss")
    cross_entropy: Literal["stablemax", "softmax"] = Field("stablemax", description="of the cells")
    halt_steps: PositiveInt = Field(16, description="supervision steps of a puzzle at most, and always in evaluation")
    halt_exploration: Fraction = Field(
        0.1,
        description="share of rows that may not halt before a drawn step; schedules.halt_exploration varies it",
    )
    refill: bool = Field(
        False, description="whether a row that is still at work keeps the example it is given for its next turn"
    )
    votes: PositiveInt = Field(
        1, description="ARC: augmentations of a question whose answers vote in an evaluation; 1: the task as it is"
    )
    pass_at: list[PositiveInt] = Field([1, 2], description="ARC with votes: right if among so many best-voted answers")

    @model_validator(mode="after")
    def _order_is_a_function(self) -> PuzzlesConfig:
        if self.refill:
            raise ValueError(
                "task.refill=true is not supported: which example a row needs next would follow from what the model "
                "answered, so that each step would have to wait for the last one before its batch could be prepared. A "
                "row that is still at work ignores its new example, as in the original; the metric examples_learnt "
                "counts those that a row has finished"
            )
        return self
