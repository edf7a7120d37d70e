"""Loss terms and metrics per row, for both engines; each engine sums them in its own way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from array_api_compat import array_namespace

from unisono_puzzles.model import act
from unisono_puzzles.settings import PuzzlesConfig

PerRow = dict[str, Any]  # (rows,) each
Pairs = dict[str, tuple[Any, Any]]  # values and weights, (rows,) each

TRAINING = ("exact", "cells", "steps", "halt_accuracy", "examples_learnt")
EVALUATION = ("exact", "cells", "halting/exact", "halting/cells", "halting/steps", "halt_accuracy")


def term_weights(config: PuzzlesConfig) -> dict[str, float]:
    """The nonzero weights of the loss terms."""
    return {name: weight for name, weight in config.weights.model_dump().items() if weight}


def terms(
    config: PuzzlesConfig, outputs: Mapping[str, Any], answers: Any, to_loss_precision: Any, training: bool
) -> tuple[PerRow, Any, Any]:
    """The loss terms of rows, the fraction of correct cells, and whether all are correct.

    Args:
        config: the group `task`.
        outputs: `logits` and `q` of a supervision step, in training also `change`, and `value` with q_continue.
        answers: tokens, (rows, cells).
        to_loss_precision: casts an array to the precision of the loss.
        training: evaluation leaves out the terms that only guide training.
    """
    weights = term_weights(config)
    xp = array_namespace(outputs["logits"])
    q = to_loss_precision(outputs["q"])
    cells, exact = act.grade(xp.argmax(outputs["logits"], axis=-1), answers, q.dtype)
    found: PerRow = {
        "answer": act.cross_entropies(
            to_loss_precision(outputs["logits"]), answers, config.cross_entropy == "stablemax"
        )
    }
    if "halt" in weights:  # only of puzzles with a known answer
        known = xp.astype(xp.any(answers > 0, axis=-1), q.dtype)
        found["halt"] = act.halting_losses(q[:, 0], exact) * known
    if training and "q_continue" in weights:
        found["q_continue"] = act.halting_losses(q[:, 1], outputs["value"])
    if training and "consistency" in weights:
        found["consistency"] = to_loss_precision(outputs["change"])
    return found, cells, exact


def training_metrics(halted: Mapping[str, Any], q: Any, cells: Any, exact: Any, competing: bool) -> Pairs:
    """Metrics of the rows that halt in this step, and how many examples each row has finished so far."""
    xp = array_namespace(cells)
    over = xp.astype(halted["halted"], cells.dtype)
    would_halt = xp.astype(act.wants_to_halt(q, competing), cells.dtype)
    values = {
        "exact": exact,
        "cells": cells,
        "steps": xp.astype(halted["steps"], cells.dtype),
        "halt_accuracy": xp.astype(would_halt == exact, cells.dtype),
    }
    pairs = {name: (value * over, over) for name, value in values.items()}
    learnt = xp.astype(halted["learnt"], cells.dtype)
    return {**pairs, "examples_learnt": (learnt, xp.ones_like(learnt))}


def evaluation_metrics(
    outputs: Mapping[str, Any], batch: Mapping[str, Any], cells: Any, exact: Any, levels: Sequence[str]
) -> Pairs:
    """Metrics of rows with a known answer: after all steps, where each would have halted, and by rating.

    Args:
        outputs: `early` (the answer where it would have halted), `early_steps`, `would_halt` (whether it would
            halt after the last step), and `pass@k` with votes over augmentations.
        batch: `answer` and `level`.
        cells: share of the cells that are right after all steps, (rows,).
        exact: whether all are, (rows,).
        levels: names of the ratings' levels, by their number in `level`.
    """
    xp = array_namespace(cells)
    one = xp.astype(xp.any(batch["answer"] > 0, axis=-1), cells.dtype)
    early_cells, early = act.grade(outputs["early"], batch["answer"], cells.dtype)
    would_halt = xp.astype(outputs["would_halt"], cells.dtype)
    values = {
        "exact": exact,
        "cells": cells,
        "halting/exact": early,
        "halting/cells": early_cells,
        "halting/steps": xp.astype(outputs["early_steps"], cells.dtype),
        "halt_accuracy": xp.astype(would_halt == exact, cells.dtype),
    }
    pairs = {name: (value * one, one) for name, value in values.items()}
    pairs |= {
        name: (xp.astype(won, cells.dtype) * one, one) for name, won in outputs.items() if name.startswith("pass@")
    }
    for number, name in enumerate(levels):
        inside = xp.astype(batch["level"] == number, cells.dtype)
        pairs[f"rating/{name}"] = (exact * inside, inside)
    return pairs
