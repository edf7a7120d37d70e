"""Small puzzle files that tests read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from unisono_puzzles.data.formats import Puzzles, sudoku_format
from unisono_puzzles.data.generate import sudokus
from unisono_puzzles.data.tables import puzzle_to_text

SHARED = Path(__file__).parents[4] / "shared" / "data"


def small_sudokus(count: int = 12, side: int = 4) -> Puzzles:
    return sudokus(side, count, (side + 1, side + 3), seed=3)


def write_csv(path: Path, puzzles: Puzzles, header: str = "source,q,a,rating") -> list[str]:
    """The puzzles as CSV; returns the lines."""
    lines = [header]
    for row in range(len(puzzles)):
        question, answer = (
            puzzle_to_text(tokens[row], puzzles.format) for tokens in (puzzles.questions, puzzles.answers)
        )
        lines.append(f"made,{question},{answer},{puzzles.ratings[row]:g}")
    path.write_text("\n".join(lines) + "\n")
    return lines


def write_arc(folder: Path, tasks: int = 3, seed: int = 0) -> None:
    """Tasks that colour a grid anew, in the layout of one file per task: two demonstrations and one test each."""
    rng = np.random.default_rng(seed)
    for number in range(tasks):
        colours = rng.permutation(10)

        def pair(colours: np.ndarray = colours) -> dict[str, list[list[int]]]:
            grid = rng.integers(0, 10, size=rng.integers(1, 7, size=2))
            return {"input": grid.tolist(), "output": colours[grid].tolist()}

        set_ = "evaluation" if number == 0 else "training"
        (folder / set_).mkdir(parents=True, exist_ok=True)
        content = {"train": [pair(), pair()], "test": [pair()]}
        (folder / set_ / f"task{number}.json").write_text(json.dumps(content))


def write_mazes(path: Path) -> None:
    """Two 5×5 mazes with their ways."""
    question = "#####" + "#S  #" + "# # #" + "## G#" + "#####"
    answer = "#####" + "#Soo#" + "# #o#" + "## G#" + "#####"
    mirrored = "".join(question[row * 5 : row * 5 + 5][::-1] for row in range(5))
    way = "".join(answer[row * 5 : row * 5 + 5][::-1] for row in range(5))
    path.write_text(f"source,question,answer,rating\nmade,{question},{answer},4\nmade,{mirrored},{way},4\n")


def arrays_of(model: Any) -> dict[str, np.ndarray]:
    """The arrays of a JAX model by their names in torch: an array's path, with dots."""
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(model)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}


def with_arrays(model: Any, arrays: dict[str, np.ndarray]) -> Any:
    """A JAX model with other arrays, given by their names in torch."""
    import jax

    def replaced(path: Any, leaf: Any) -> Any:
        value = arrays[jax.tree_util.keystr(path, simple=True, separator=".")]
        assert value.shape == leaf.shape
        return jax.numpy.asarray(value, leaf.dtype)

    return jax.tree_util.tree_map_with_path(replaced, model)


SUDOKU4 = sudoku_format(4)


def write_published(folder: Path, puzzles: Puzzles, variants: int = 1, ignored: int = 0) -> None:
    """The puzzles in the layout of the original repositories, each in rotations that stand for its augmentations."""
    folder.mkdir(parents=True)
    count = len(puzzles) * variants
    for name, tokens in (("inputs", puzzles.questions), ("labels", puzzles.answers)):
        rolled = [np.roll(tokens[row], turn) for row in range(len(puzzles)) for turn in range(variants)]
        np.save(folder / f"all__{name}.npy", np.stack(rolled))
    np.save(folder / "all__puzzle_identifiers.npy", np.zeros(count, dtype=np.int32))
    np.save(folder / "all__puzzle_indices.npy", np.arange(count + 1, dtype=np.int32))
    np.save(folder / "all__group_indices.npy", np.arange(0, count + 1, variants, dtype=np.int32))
    meta = {
        "pad_id": 0, "ignore_label_id": ignored, "blank_identifier_id": 0, "num_puzzle_identifiers": 1,
        "vocab_size": puzzles.format.vocabulary, "seq_len": puzzles.format.length, "total_groups": len(puzzles),
        "mean_puzzle_examples": 1.0, "total_puzzles": count, "sets": ["all"],
    }  # fmt: skip
    (folder / "dataset.json").write_text(json.dumps(meta))
