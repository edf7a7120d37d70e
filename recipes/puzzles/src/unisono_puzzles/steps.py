"""What both engines compute: supervision steps, evaluation and votes, on the Python array API.

The few operations that differ between torch and JAX are methods, defined by the task of each engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from unisono import Batch, Context, Loss
from unisono_puzzles.base import Fields, PuzzlesBase, batch_kind, fields_of, with_kind
from unisono_puzzles.data.formats import ARC_SIDE
from unisono_puzzles.model import act, scores, votes
from unisono_puzzles.model.shape import places


class PuzzleSteps(PuzzlesBase):
    """The puzzle task without its model and the operations of its engine."""

    def zeros(self, shape: tuple[int, ...], like: Any) -> Any:
        """A float array of zeros, on the device of `like`."""
        raise NotImplementedError

    def constant(self, array: Any, like: Any) -> Any:
        """A NumPy array as an array of the engine, on the device of `like`."""
        raise NotImplementedError

    def without_gradient(self, compute: Callable[[], Any]) -> Any:
        """Call a function without gradients through its result."""
        raise NotImplementedError

    def repeat(self, advance: Callable[[Fields], Fields], state: Fields, times: int) -> Fields:
        """Apply `advance` `times` times."""
        raise NotImplementedError

    def sum_rows(self, value: Any) -> Any:
        """Values per row, (rows,), in the form that the engine expects in a `Loss`."""
        raise NotImplementedError

    def to_loss_precision(self, value: Any) -> Any:
        """Cast an array to the precision of the loss."""
        raise NotImplementedError

    def initial_carry(self, batch: Batch) -> Fields:
        """The initial state of all rows: each takes the first puzzle that it sees."""
        kind, fields = batch_kind(batch), fields_of(batch)
        shape = (len(fields["question"]), places(self.kinds[kind], self.model_config), self.model_config.width)
        return with_kind(
            kind, act.first_carry(fields, {name: self.zeros(shape, fields["question"]) for name in act.STATES})
        )

    def outputs(self, model: Any, batch: Batch, context: Context) -> Fields:
        """One supervision step of each row; in evaluation, all of them."""
        kind, fields = batch_kind(batch), fields_of(batch)
        cycles = self.cycles(context.scalars)
        if not context.training:
            return with_kind(kind, self._solve_and_vote(model, kind, fields, cycles))
        assert context.carry is not None
        rows = act.begin(fields_of(context.carry), fields, model.starts)
        outputs = {**rows, **model(kind, rows, *cycles)._asdict()}
        if self.competing:  # the Q-value of continuing, from the model one step later
            last = rows["steps"] + 1 >= self.config.halt_steps
            outputs["value"] = self.without_gradient(lambda: act.continue_target(model(kind, outputs, *cycles).q, last))
        return with_kind(kind, outputs)

    def loss(self, outputs: Fields, batch: Batch, context: Context) -> Loss:
        """Loss and metrics; training metrics are of the rows that halt in this step."""
        kind, fields = batch_kind(batch), fields_of(batch)
        outputs = fields_of(outputs, kind)
        answers = outputs["answer"] if context.training else fields["answer"]
        terms, cells, exact = scores.terms(self.config, outputs, answers, self.to_loss_precision, context.training)
        sums = {name: self.sum_rows(value) for name, value in terms.items()}
        weights = {name: weight for name, weight in scores.term_weights(self.config).items() if name in sums}
        if not context.training:
            pairs = scores.evaluation_metrics(outputs, fields, cells, exact, self.levels[kind])
            return Loss(sums, weights, self._metrics(kind, pairs, training=False))
        kept = self.without_gradient(lambda: {name: outputs[name] for name in ("q", *act.PUZZLE, *act.STATES)})
        q = kept.pop("q")
        exploration = self.exploration(context.scalars)
        halted = act.halt(outputs, q, fields, exploration, self.config.halt_steps, self.competing)
        pairs = scores.training_metrics(halted, q, cells, exact, self.competing)
        return Loss(sums, weights, self._metrics(kind, pairs, training=True), carry=with_kind(kind, {**kept, **halted}))

    def solve(self, model: Any, kind: str, fields: Mapping[str, Any], cycles: tuple[int, int]) -> Fields:
        """Run all supervision steps; also keep the answer of the step at which each puzzle would have halted."""
        carry = fields_of(self.initial_carry(with_kind(kind, fields)))
        rows, xp = act.begin(carry, fields, model.starts), array_namespace(fields["question"])

        def advance(state: Fields) -> tuple[Fields, Any]:
            step = model(kind, {**rows, **{name: state[name] for name in act.STATES}}, *cycles)
            solution, done = xp.argmax(step.logits, axis=-1), state["done"]
            after = {name: xp.astype(value, state[name].dtype) for name, value in step.states.items()}
            after["early"] = xp.where(done[:, None], state["early"], xp.astype(solution, state["early"].dtype))
            after["early_steps"] = state["early_steps"] + xp.astype(~done, state["early_steps"].dtype)
            after["done"] = done | act.wants_to_halt(step.q, self.competing)
            return after, step

        state = {name: rows[name] for name in act.STATES} | {
            "early": xp.zeros_like(fields["question"], dtype=xp.int32),
            "early_steps": xp.zeros_like(carry["steps"]),
            "done": xp.zeros_like(carry["halted"]),
        }
        state = self.repeat(lambda before: advance(before)[0], state, self.config.halt_steps - 1)
        state, last = advance(state)
        return {
            "logits": last.logits,
            "solution": xp.argmax(last.logits, axis=-1),
            "q": last.q,
            "early": state["early"],
            "early_steps": state["early_steps"],
            "would_halt": act.wants_to_halt(last.q, self.competing),
        }

    def count_votes(self, answers: Any, q: Any, fields: Mapping[str, Any]) -> Fields:
        """The answers with most votes, their numbers of votes, and whether the right one is among the best.

        `answers` (questions · augmentations, 900) and `q` (questions · augmentations,) are of all augmentations.
        """
        xp, like = array_namespace(answers), fields["identifier"]
        index = self.constant(np.arange(ARC_SIDE, dtype=np.int32), like)
        symmetry, colours = fields["symmetry"], fields["colours"]
        grids = votes.restore(answers, xp.reshape(symmetry, (-1,)), _flatten_votes(colours), index)
        grids = xp.reshape(grids, (*like.shape, grids.shape[1]))
        trust = xp.reshape(1 / (1 + xp.exp(-q)), like.shape)
        count, score = votes.rank(grids, trust, self.constant(votes.SALTS, like))
        truth = votes.restore(fields["answer"], symmetry[:, 0], colours[:, 0], index)
        won = {f"pass@{most}": votes.passes(grids, score, truth, most) for most in self.config.pass_at}
        best = xp.argsort(score, axis=1, descending=True)[:, : max(self.config.pass_at)]
        ranked = xp.take_along_axis(grids, best[..., None], axis=1)
        return {**won, "ranked": ranked, "votes": xp.take_along_axis(count, best, axis=1)}

    def _solve_and_vote(self, model: Any, kind: str, fields: Mapping[str, Any], cycles: tuple[int, int]) -> Fields:
        """The outputs of `solve` for each row; of augmented questions, those of the first, and the votes."""
        if fields["question"].ndim == 2:
            return self.solve(model, kind, fields, cycles)
        rows, many = fields["identifier"].shape
        xp = array_namespace(fields["question"])
        flat = {name: _flatten_votes(fields[name]) for name in ("question", "identifier")}
        flat["answer"] = xp.repeat(fields["answer"], many, axis=0)
        solved = self.solve(model, kind, flat, cycles)
        won = self.count_votes(solved["solution"], solved["q"][:, 0], fields)
        return {name: xp.reshape(value, (rows, many, *value.shape[1:]))[:, 0] for name, value in solved.items()} | won

    def _metrics(self, kind: str, pairs: Mapping[str, tuple[Any, Any]], training: bool) -> dict[str, tuple[Any, Any]]:
        """The metrics of a micro-batch; those of other kinds are zero."""
        sums = {name: (self.sum_rows(value), self.sum_rows(count)) for name, (value, count) in pairs.items()}
        if len(self.kinds) == 1:
            return sums
        nothing = self.sum_rows(array_namespace(pairs["exact"][0]).zeros_like(pairs["exact"][0]))
        every: dict[str, tuple[Any, Any]] = {}
        for other in self.kinds:
            levels = [] if training else [f"rating/{level}" for level in self.levels[other]]
            votes_ = [] if training or not self.votes_in(other) else [f"pass@{most}" for most in self.config.pass_at]
            for name in (*(scores.TRAINING if training else scores.EVALUATION), *levels, *votes_):
                every[f"{other}/{name}"] = sums[name] if other == kind else (nothing, nothing)
        return every


def _flatten_votes(value: Any) -> Any:
    """(questions, augmentations, …) -> (questions · augmentations, …)."""
    return array_namespace(value).reshape(value, (-1, *value.shape[2:]))
