"""What two runs recorded about the first quantity that differs: all that a diagnosis is decided by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from unisono.proof.comparison import ComparedQuantity, Difference
from unisono.proof.diagnoses.predictions import ROUNDING, PartGradients, fit_weights, is_equal
from unisono.proof.recording.gradient_sample import add_gradients, norm_of, sample_elements
from unisono.proof.recording.local_gradients import read_local_gradients
from unisono.proof.recording.output_digest import sketch_distance
from unisono.proof.recording.trace import Array, Part, RunFacts, StepFacts, Trace


@dataclass(frozen=True)
class Pattern:
    """What there is to judge by.

    Attributes:
        mine: the run in question.
        reference: the run that it must equal.
        compared: everything that was compared.
        first: the first that failed.
        world_size: processes of the run.
        starts: updates after which the run was started again.
        tried: the run whose task was tried by itself, where it is neither of the two.
    """

    mine: Trace
    reference: Trace
    compared: Sequence[ComparedQuantity]
    first: ComparedQuantity
    world_size: int
    starts: Sequence[int]
    tried: Trace | None = None

    @property
    def worst(self) -> Difference:
        """Of the first quantity that failed."""
        return self.first.worst

    @property
    def number(self) -> int:
        """The step of it, from 0."""
        return self.worst.step - 1

    @property
    def step(self) -> StepFacts:
        """The facts of that step."""
        return self.mine.facts.steps[self.number]

    @property
    def reference_step(self) -> StepFacts:
        """The facts of the same step of the reference."""
        return self.reference.facts.steps[self.number]

    @property
    def root(self) -> RunFacts:
        """The facts of the run whose task was looked at most closely: the one on one process."""
        traces = (self.reference, self.tried, self.mine)
        return next((one.facts for one in traces if one is not None and one.facts.probed), self.mine.facts)

    @property
    def rounding(self) -> float:
        """The relative difference up to which a prediction holds."""
        return max(ROUNDING, self.first.allowed)

    @property
    def fitting(self) -> float:
        """The same for one whose weights are fitted first."""
        return max(1e-8, self.first.allowed)

    @property
    def is_resumed(self) -> bool:
        """Whether steps before were made by another start of the run."""
        return any(start < self.worst.step for start in self.starts)

    def failed(self, quantity: str) -> bool:
        """Whether it differs in the same step; what differs later may follow from this."""
        return any(step == self.worst.step for step in self._steps(quantity))

    def agrees(self, quantity: str) -> bool:
        """Whether it was recorded, which it need not be, and is the same up to this step."""
        return any(step > self.worst.step for step in self._steps(quantity))

    def abstains(self, *quantities: str) -> bool:
        """Whether one of them is there, and could not be compared."""
        left = (c for c in self.compared if c.mark == "ABSTAIN" and c.why != "there is none")
        return any(c.quantity in quantities for c in left)

    def distance_of(self, quantity: str) -> float:
        """The largest relative difference of it, allowed or not; zero where it was not compared before that."""
        found = (c.worst for c in self.compared if c.quantity == quantity)
        return max((worst.size for worst in found if worst.step <= self.worst.step), default=0.0)

    @property
    def other_draws(self) -> str:
        """How the random numbers of a forward pass are others than on one process; empty where they are not."""
        pairs = zip(self.step.draws, self.reference_step.draws, strict=False)
        for number, (ours, theirs) in enumerate(pairs if self.mine.facts.random else ()):
            if ours[:1] != theirs[:1]:
                return f"the generator of micro-batch {number} begins elsewhere"
            if ours != theirs:
                return f"micro-batch {number} draws other random numbers, from the same beginning"
        return ""

    # what each micro-batch adds ----------------------------------------------------------------------------------

    @cached_property
    def parts(self) -> list[Part]:
        """The micro-batches as the reference computed them, with the ranks of this run; none where they are others."""
        ours, theirs = self.step.parts, self.reference_step.parts
        same = [(p.number, p.rows) for p in ours] == [(p.number, p.rows) for p in theirs]
        return [replace(r, rank=m.rank) for m, r in zip(ours, theirs, strict=True)] if same else []

    @property
    def ranks_by_outputs(self) -> tuple[list[int], list[int]] | None:
        """Ranks of which all outputs agree, and the others; None unless there are both."""
        ours, theirs, parts = self.step.outputs, self.reference_step.outputs, self.parts
        if not len(ours) == len(theirs) == len(parts):
            return None
        off = (sketch_distance(mine, true)[0] > self.rounding for mine, true in zip(ours, theirs, strict=True))
        wrong = sorted({part.rank for part, differs in zip(parts, off, strict=True) if differs})
        right = sorted({part.rank for part in parts} - {*wrong})
        return (right, wrong) if right and wrong else None

    @cached_property
    def gradient(self) -> dict[str, Array]:
        """Elements of the raw gradient."""
        return sample_elements(self.mine.tensors("raw gradients", self.number))

    @cached_property
    def true_gradient(self) -> dict[str, Array]:
        """The same elements of the reference's."""
        return sample_elements(self.reference.tensors("raw gradients", self.number))

    @property
    def limit(self) -> float:
        """The norm that the reference's gradient was clipped to, or has without that."""
        return norm_of(self.reference.tensors("clipped gradients", self.number).values())

    @cached_property
    def reference_gradients(self) -> PartGradients | None:
        """What each micro-batch of the reference adds to its gradient by term of the loss, if it has recorded that."""
        found: dict[str, dict[int, dict[str, Array]]] = {}
        for key, value in self.reference.tensors("term gradients", self.number).items():
            term, number, name = key.split("/", 2)
            found.setdefault(term, {}).setdefault(int(number), {})[name] = value
        return PartGradients(self.reference_step.parts, found) if found and self.reference_step.parts else None

    @cached_property
    def part_gradients(self) -> PartGradients | None:
        """The same for the micro-batches of this run, with its ranks; None where these are others."""
        own = self.reference_gradients
        return replace(own, parts=self.parts) if own is not None and self.parts else None

    @cached_property
    def shares(self) -> list[tuple[int, dict[str, Array]]]:
        """What each micro-batch rightly adds to the gradient, with the rank that computed it; none where not known."""
        if self.part_gradients is not None:
            return [(p.rank, g) for p, g in zip(self.parts, self.part_gradients.each, strict=True)]
        local = self.local_gradients
        weights = fit_weights(self.true_gradient, [g for _, g in local], self.fitting)
        if weights is None:
            return []
        return [(rank, {n: w * v for n, v in g.items()}) for (rank, g), w in zip(local, weights, strict=True)]

    @cached_property
    def local_gradients(self) -> list[tuple[int, dict[str, Array]]]:
        """What each backward pass of a rank made before any reduction, where that was recorded."""
        ranks = range(self.world_size)
        return [(rank, one) for rank in ranks for one in read_local_gradients(self.mine, rank, self.number)]

    @property
    def shares_passes(self) -> bool:
        """Whether a script's ranks make, all together, as many backward passes as one process."""
        theirs = len(read_local_gradients(self.reference, 0, self.number))
        return self.world_size > 1 and 0 < theirs == len(self.local_gradients)

    def explain_factor_by_passes(self, factor: float) -> str:
        """In words, that a script's backward passes are as many times as many; empty where they are not.

        A factor that is the number of processes is then also what a sum over passes comes to that should be a mean.
        """
        theirs = len(read_local_gradients(self.reference, 0, self.number))
        ours = len(self.local_gradients) / self.world_size
        if not ours or not theirs or ours == theirs or not is_equal(factor, ours / theirs, self.rounding):
            return ""
        return (
            f"{factor:.6g} times what it should be, and a rank makes {ours:g} backward passes per update instead of "
            f"{theirs}: is the loss of a pass divided by the number of passes, or is it the number of processes?"
        )

    @property
    def rank_shares(self) -> list[dict[str, Array]]:
        """What each rank rightly adds to the gradient."""
        ranks = sorted({rank for rank, _ in self.shares})
        return [add_gradients([share for r, share in self.shares if r == rank]) for rank in ranks]

    def _steps(self, quantity: str) -> list[float]:
        """The first step in which it differs, infinite where it never does; none where it was not compared."""
        return [
            c.worst.step if c.mark == "FAIL" else math.inf
            for c in self.compared
            if c.quantity == quantity and c.mark != "ABSTAIN"
        ]
