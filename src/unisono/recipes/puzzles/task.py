"""The puzzle task in torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from unisono import Batch, Context, Loss
from unisono.recipes.puzzles.base import PuzzlesBase, fields_of, kind_of, named
from unisono.recipes.puzzles.data.formats import ARC_SIDE
from unisono.recipes.puzzles.model import act, scores, votes
from unisono.recipes.puzzles.model.shape import places

if TYPE_CHECKING:
    from torch import Tensor

    from unisono.recipes.puzzles.model.torch_model import PuzzleModel


class Puzzles(PuzzlesBase):
    """A small recursive model that solves puzzles, in torch."""

    def build(self) -> PuzzleModel:
        """The model."""
        from unisono.recipes.puzzles.model.torch_model import PuzzleModel

        return PuzzleModel(self.model_config, self.kinds)

    def initial_carry(self, batch: Batch) -> dict[str, Tensor]:
        """Rows that have not begun."""
        import torch

        kind, fields = kind_of(batch), fields_of(batch)
        shape = (len(fields["question"]), places(self.kinds[kind], self.model_config), self.model_config.width)
        states = {name: torch.zeros(shape, device=fields["question"].device) for name in act.STATES}
        return named(kind, act.first_carry(fields, states))

    def outputs(self, model: Any, batch: Batch, context: Context) -> dict[str, Tensor]:
        """One supervision step of each row; in evaluation, all of them."""
        kind, fields = kind_of(batch), fields_of(batch)
        cycles = self.cycles(context.scalars)
        if not context.training:
            return self._voted(model, kind, fields, cycles)
        assert context.carry is not None
        rows = act.begin(fields_of(context.carry), fields, model.starts)
        thought = model(kind, rows, *cycles)
        outputs = {**rows, **_states(thought), "logits": thought.logits, "q": thought.q, "change": thought.change}
        if self.competing:
            outputs["value"] = self._value(model, kind, outputs, cycles)
        return outputs

    def loss(self, outputs: dict[str, Tensor], batch: Batch, context: Context) -> Loss:
        """Sums over rows; in training of those that halt in this step."""
        kind, fields = kind_of(batch), fields_of(batch)
        answers = outputs["answer"] if context.training else fields["answer"]
        terms, cells, exact = scores.terms(self.config, outputs, answers, _wide, context.training)
        sums = {name: value.sum() for name, value in terms.items()}
        weights = scores.term_weights(self.config)
        if not context.training:
            pairs = scores.evaluation_metrics(outputs, fields, cells, exact, self.levels[kind])
            return Loss(sums, {name: weights[name] for name in sums}, self._metrics(kind, pairs, training=False))
        q = outputs["q"].detach()
        halted = act.halt(outputs, q, fields, self.exploration(context.scalars), self.config.halt_steps, self.competing)
        pairs = scores.training_metrics(halted, q, cells, exact, self.competing)
        kept = {name: outputs[name].detach() for name in (*act.PUZZLE, *act.STATES)}
        return Loss(sums, weights, self._metrics(kind, pairs, training=True), carry=named(kind, {**kept, **halted}))

    def solve(self, model: Any, kind: str, fields: Mapping[str, Tensor], cycles: tuple[int, int]) -> dict[str, Tensor]:
        """All supervision steps of puzzles, and the answer at the step where each would have halted."""
        import torch

        carry = fields_of(self.initial_carry(named(kind, fields)))
        rows = act.begin(carry, fields, model.starts)
        early = torch.zeros_like(fields["question"], dtype=torch.int64)
        done = torch.zeros_like(carry["halted"])
        early_steps = torch.zeros_like(carry["steps"])
        for _ in range(self.config.halt_steps):
            thought = model(kind, rows, *cycles)
            rows = {**rows, **_states(thought)}
            early = torch.where(done[:, None], early, thought.logits.argmax(-1))
            early_steps = early_steps + (~done).to(early_steps.dtype)
            wants = act.wants_to_halt(thought.q, self.competing)
            done = done | wants
        return {
            "logits": thought.logits,
            "solution": thought.logits.argmax(-1),
            "q": thought.q,
            "early": early,
            "early_steps": early_steps,
            "told": wants,
        }

    def votes_of(self, answers: Tensor, q: Tensor, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The answers that most augmentations gave, how many did, and whether the right one is among the best.

        Args:
            answers: to all augmentations of all questions, (questions · augmentations, 900).
            q: of the halting head, (questions · augmentations,).
            fields: of the batch.
        """
        import torch

        like = fields["identifier"]
        index = torch.arange(ARC_SIDE, dtype=torch.int32, device=like.device)
        symmetry, colours = fields["symmetry"], fields["colours"]
        grids = votes.restore(answers, symmetry.flatten(), colours.flatten(0, 1), index).unflatten(0, like.shape)
        salts = torch.as_tensor(votes.salts(), device=like.device)
        count, score = votes.rank(grids, q.sigmoid().unflatten(0, like.shape), salts)
        truth = votes.restore(fields["answer"], symmetry[:, 0], colours[:, 0], index)
        won = {f"pass@{most}": votes.passes(grids, score, truth, most) for most in self.config.pass_at}
        best = score.topk(min(max(self.config.pass_at), like.shape[1]), dim=1).indices
        ranked = grids.gather(1, best[..., None].expand(-1, -1, grids.shape[2]))
        return {**won, "ranked": ranked, "votes": count.gather(1, best)}

    def _voted(self, model: Any, kind: str, fields: Mapping[str, Tensor], cycles: tuple[int, int]) -> dict[str, Tensor]:
        """What `solve` says of each row; of a question with augmentations, of the first, and how their votes came out."""
        if fields["question"].ndim == 2:
            return self.solve(model, kind, fields, cycles)
        rows, many = fields["identifier"].shape
        flat = {name: fields[name].flatten(0, 1) for name in ("question", "identifier")}
        flat["answer"] = fields["answer"].repeat_interleave(many, 0)
        solved = self.solve(model, kind, flat, cycles)
        won = self.votes_of(solved["solution"], solved["q"][:, 0], fields)
        return {name: value.unflatten(0, (rows, many))[:, 0] for name, value in solved.items()} | won

    def _value(self, model: Any, kind: str, rows: Mapping[str, Tensor], cycles: tuple[int, int]) -> Tensor:
        """What going on is worth, told by the model one step later; without gradients."""
        import torch

        with torch.no_grad():
            detached = {name: value.detach() for name, value in rows.items()}
            later = model(kind, detached, *cycles)
            return act.going_on(later.q, rows["steps"] + 1 >= self.config.halt_steps)  # type: ignore[no-any-return]

    def _metrics(
        self, kind: str, pairs: Mapping[str, tuple[Tensor, Tensor]], training: bool
    ) -> dict[str, tuple[Tensor | float, Tensor | float]]:
        """Sums of a micro-batch; where there are several kinds, those of the others are zero."""
        sums: dict[str, tuple[Any, Any]] = {name: (value.sum(), count.sum()) for name, (value, count) in pairs.items()}
        if len(self.kinds) == 1:
            return sums
        every: dict[str, tuple[Any, Any]] = {}
        for other in self.kinds:
            levels = [] if training else [f"rating/{level}" for level in self.levels[other]]
            votes_ = [] if training or not self.votes_in(other) else [f"pass@{most}" for most in self.config.pass_at]
            for name in (*(scores.TRAINING if training else scores.EVALUATION), *levels, *votes_):
                every[f"{other}/{name}"] = sums[name] if other == kind else (0.0, 0.0)
        return every


def _states(thought: Any) -> dict[str, Tensor]:
    return {name: getattr(thought, name) for name in act.STATES}


def _wide(value: Tensor) -> Tensor:
    return value.double() if value.device.type != "mps" else value.float()
