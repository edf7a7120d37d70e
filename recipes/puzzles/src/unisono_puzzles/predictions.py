"""What `unisono predict` writes of puzzles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unisono_puzzles.data.formats import Format
from unisono_puzzles.data.tables import grid_to_json, puzzle_to_text


def describe_solutions(
    outputs: Mapping[str, Any], fields: Mapping[str, Any], format_: Format, pass_at: Sequence[int]
) -> dict[str, Any]:
    """The columns: puzzle, solution, whether it is exact, confidence and steps.

    `exact` and `cells` are empty where the answer is unknown. ARC grids are written as JSON.

    Args:
        outputs: Of a kind, without its name.
        fields: Of the batch, in NumPy.
        format_: Of the kind.
        pass_at: Numbers of guesses, where a vote was taken.
    """
    found = {name: np.asarray(outputs[name].tolist()) for name in ("solution", "q", "early_steps")}
    answers = fields["answer"]
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
        for most in pass_at:
            right = outputs[f"pass@{most}"].tolist()
            columns[f"pass@{most}"] = [
                bool(won) if known.any() else "" for won, known in zip(right, answers, strict=True)
            ]
    return columns
