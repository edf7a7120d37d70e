"""Adaptive computation time: which rows start a new puzzle, which halt, and the loss terms of rows.

Written once for both engines, on the Python array API. A row of the global batch works on one puzzle for several
training steps. When it halts, it takes the puzzle at its position in the next batch; until then it ignores new ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from array_api_compat import array_namespace

Arrays = Mapping[str, Any]

PUZZLE = ("question", "answer", "identifier")  # what a row keeps of its current example
STATES = ("answer_state", "latent_state")


class StepOutput(NamedTuple):
    """What the model of either engine gives after a supervision step.

    Attributes:
        answer_state: (rows, places, width).
        latent_state: as answer_state.
        logits: of the tokens of each cell, (rows, cells, vocabulary).
        q: values of halting and of continuing, (rows, 2).
        change: mean squared change of the answer state in its last cycle, (rows,).
    """

    answer_state: Any
    latent_state: Any
    logits: Any
    q: Any
    change: Any

    @property
    def states(self) -> dict[str, Any]:
        """The states by name, as in the carry."""
        return {"answer_state": self.answer_state, "latent_state": self.latent_state}


def first_carry(batch: Arrays, states: Arrays) -> dict[str, Any]:
    """The initial carry: all rows have halted, so that they take the first puzzle they see; `states` are zeros."""
    xp = array_namespace(batch["question"])
    count = xp.zeros_like(batch["identifier"])
    return {
        **{name: xp.zeros_like(batch[name]) for name in PUZZLE},
        **states,
        "halted": xp.ones_like(batch["identifier"], dtype=xp.bool),
        "steps": count,
        "learnt": count,
    }


def begin(carry: Arrays, batch: Arrays, starts: Arrays) -> dict[str, Any]:
    """The puzzles and states of this step: rows that have halted start the example of the batch.

    `starts` are the first values of the states, (width,).
    """
    xp = array_namespace(batch["question"])
    halted = carry["halted"]
    rows: dict[str, Any] = {}
    for name in PUZZLE:
        rows[name] = xp.where(_broadcast(halted, batch[name]), batch[name], carry[name])
    for name in STATES:
        state = carry[name]
        rows[name] = xp.where(_broadcast(halted, state), xp.astype(starts[name], state.dtype), state)
    rows["steps"] = xp.where(halted, xp.zeros_like(carry["steps"]), carry["steps"])
    rows["learnt"] = carry["learnt"]
    return rows


def halt(rows: Arrays, q: Any, batch: Arrays, exploration: Any, halt_steps: int, competing: bool) -> dict[str, Any]:
    """`steps`, `halted` and `learnt` of rows after a supervision step.

    Args:
        rows: from `begin`.
        q: Q-values of halting and of continuing, (rows, 2).
        batch: its `explore` and `patience`: uniform draws, and drawn steps from 2 to `halt_steps`.
        exploration: fraction of rows that must not halt before their random step.
        halt_steps: steps after which every row halts.
        competing: whether the Q-value of halting must exceed that of continuing, instead of zero.
    """
    xp = array_namespace(q)
    steps = rows["steps"] + 1
    wants = wants_to_halt(q, competing)
    least = xp.where(batch["explore"] < exploration, batch["patience"], xp.zeros_like(batch["patience"]))
    halted = (steps >= halt_steps) | (wants & (steps >= least))
    return {"steps": steps, "halted": halted, "learnt": rows["learnt"] + xp.astype(halted, rows["learnt"].dtype)}


def wants_to_halt(q: Any, competing: bool) -> Any:
    """Whether the model would halt, (rows,)."""
    return q[:, 0] > (q[:, 1] if competing else 0)


def cross_entropies(logits: Any, answers: Any, stable: bool) -> Any:
    """The cross-entropy of each row, in nats, (rows,): the mean over its cells that count.

    Stablemax (Prieto et al., 2025) has `s(x) = x + 1` for x ≥ 0 and `1 / (1 - x)` below in place of the exponential:
    `-log(s(x_y) / Σ s(x))`. As a difference of logarithms with `log1p`, nothing is lost near zero, so that fp32
    suffices where there is no fp64.

    Args:
        logits: (rows, cells, tokens), in the precision to compute in.
        answers: tokens, (rows, cells); 0 does not count.
        stable: stablemax, else softmax.
    """
    xp = array_namespace(logits)
    zero = xp.zeros_like(logits)
    if stable:
        low, high = xp.where(logits < 0, logits, zero), xp.where(logits < 0, zero, logits)
        logs = xp.where(logits < 0, -xp.log1p(-low), xp.log1p(high))
        total = xp.log(xp.sum(xp.where(logits < 0, 1 / (1 - low), high + 1), axis=-1))
    else:
        highest = xp.max(logits, axis=-1, keepdims=True)
        logs = logits - highest
        total = xp.log(xp.sum(xp.exp(logs), axis=-1))
    tokens = xp.cumulative_sum(xp.ones_like(logits[:1, :1]), axis=-1) - 1  # 0, 1, 2, …; there are few, so no gather
    own = xp.sum(xp.where(xp.astype(answers, logits.dtype)[..., None] == tokens, logs, zero), axis=-1)
    counted = xp.astype(answers > 0, logits.dtype)
    return xp.sum((total - own) * counted, axis=-1) / _at_least_one(xp.sum(counted, axis=-1))


def halting_losses(q: Any, targets: Any) -> Any:
    """Binary cross-entropy of logits (rows,) with targets from 0 to 1, (rows,)."""
    xp = array_namespace(q)
    return xp.logaddexp(q, xp.zeros_like(q)) - q * xp.astype(targets, q.dtype)


def continue_target(q_next: Any, last: Any) -> Any:
    """The target of continuing (0 to 1, (rows,)): the larger Q-value one step later; the last step must halt."""
    xp = array_namespace(q_next)
    best = xp.where(last, q_next[:, 0], xp.maximum(q_next[:, 0], q_next[:, 1]))
    return 1 / (1 + xp.exp(-best))


def grade(predicted: Any, answers: Any, dtype: Any) -> tuple[Any, Any]:
    """The fraction of correct cells, and whether all are correct, both (rows,) as numbers of `dtype`.

    Both are tokens, (rows, cells); an answer of 0 does not count.
    """
    xp = array_namespace(predicted)
    counted = answers > 0
    hits = counted & (xp.astype(predicted, answers.dtype) == answers)
    number = xp.astype(xp.sum(xp.astype(counted, xp.int32), axis=-1), dtype)
    found = xp.astype(xp.sum(xp.astype(hits, xp.int32), axis=-1), dtype)
    return found / _at_least_one(number), xp.astype((found == number) & (number > 0), dtype)


def _at_least_one(number: Any) -> Any:
    xp = array_namespace(number)
    return xp.where(number > 0, number, xp.ones_like(number))


def _broadcast(halted: Any, value: Any) -> Any:
    """A mask of rows with as many axes as the value."""
    return halted[(...,) + (None,) * (value.ndim - 1)]
