"""The programs of a run (step, evaluation, search for non-finite values), each compiled for its shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from unisono.config.schema.run import RunConfig
from unisono.engines.jax.batches import ColumnNames, DeviceBatch, signature
from unisono.engines.jax.evaluation import EvaluationProgram, NonFiniteSearchProgram
from unisono.engines.jax.forward import Columns, Forward, Inputs
from unisono.engines.jax.guards.compilation import Compiler, ProgramKey
from unisono.engines.jax.model import Structure
from unisono.engines.jax.numerics.optimizers import Optimizer
from unisono.engines.jax.parallel.mesh import Grid
from unisono.engines.jax.step import CONTROLS, ObservedStep, State, Step
from unisono.protocols import TaskFeatures
from unisono.task import Task

Scalars = Mapping[str, float]
Arrays = Mapping[str, Any]
StepArguments = tuple[State, Arrays, DeviceBatch, Inputs]
EvaluationArguments = tuple[Arrays, Arrays, DeviceBatch, Inputs]
SearchArguments = tuple[Arrays, Arrays, Arrays, DeviceBatch, Inputs]


@dataclass
class Programs:
    """Makes and keeps the programs of one process.

    Attributes:
        task: whose functions they call.
        features: what it can do.
        config: of the run.
        structure: of the model.
        optimizer: makes the update.
        grid: of devices.
        compiler: compiles them.
        scalars: names of scheduled values that a program is given as numbers.
        recompute: every N-th block is recomputed in the backward pass; 0 for none.
    """

    task: Task
    features: TaskFeatures
    config: RunConfig
    structure: Structure
    optimizer: Optimizer
    grid: Grid
    compiler: Compiler
    scalars: tuple[str, ...]
    recompute: int
    _forwards: dict[ProgramKey, Forward] = field(default_factory=dict)

    def forward(self, training: bool, scalars: Scalars, names: ColumnNames, grid: Grid | None = None) -> Forward:
        """The functions of the task, with the scheduled values that a program is compiled for."""
        return Forward(
            self.task, self.features, self.structure, grid or self.grid, self.config.train.precision, names,
            self.scalars, self._static(scalars), training, self.recompute,
        )  # fmt: skip

    def _static(self, scalars: Scalars) -> dict[str, int]:
        """Scheduled values that programs are compiled for, in whole numbers: a ramp compiles once for each."""
        return {name: round(scalars[name]) for name in self.task.static_scalars if name in scalars}

    def inputs(self, step: int, scalars: Scalars, started: bool, controls: Mapping[str, float] | None) -> Inputs:
        """The numbers of a training step, or with `controls=None` of an evaluation."""
        floats = {name: scalars[name] for name in self.scalars}
        floats |= {name: controls.get(name, math.inf) for name in CONTROLS} if controls is not None else {}
        purpose = "eval" if controls is None else "dropout"
        return Inputs.for_step(step, self.config.run.seed, purpose, started, floats, self.config.train.precision)

    def step(
        self, given: StepArguments, names: ColumnNames, scalars: Scalars, rows: int, observed: bool = False
    ) -> tuple[Callable[..., Any], Columns]:
        """The training step. Its first argument, the state, is donated, unless the step is observed.

        Args:
            given: what the program will be called with: state, arrays that are not trained, batch and inputs.
            names: of the micro-batches.
            scalars: scheduled values.
            rows: real rows of the global batch, for a loss across samples; else 0.
            observed: whether it also returns what observers look at; see `Step.observed`.
        """
        state, _, batch, _ = given

        def make(forward: Forward) -> Any:
            placed = jax.tree.map(lambda array: array.sharding, state), self.grid.replicated
            passes = batch.number.shape[0]
            layout, norms = self.config.layout, self.config.observe.norms
            step = Step(forward, self.optimizer, passes, layout.defer_reduction, rows, norms)
            if observed:
                seen = ObservedStep(placed[0].parameters, placed[0].parameters, self.grid.batch)
                return jax.jit(step.observed, out_shardings=(*placed, seen))
            return jax.jit(step, donate_argnums=0, out_shardings=placed)

        name = "the observed step" if observed else "the step"
        return self._get_program(name, make, True, names, scalars, rows, given)

    def evaluation(
        self, given: EvaluationArguments, names: ColumnNames, scalars: Scalars, rows: int
    ) -> tuple[Callable[..., jax.Array], Columns]:
        """The sums of a global batch without an update; arguments as for `step`, with parameters for the state."""

        def make(forward: Forward) -> Any:
            return jax.jit(EvaluationProgram(forward, rows), out_shardings=self.grid.replicated)

        return self._get_program("the evaluation", make, False, names, scalars, rows, given)

    def search(
        self, given: SearchArguments, names: ColumnNames, scalars: Scalars
    ) -> Callable[..., tuple[jax.Array, ...]]:
        """The search for the first non-finite number; `given` begins with parameters, constants and carry."""

        def make(forward: Forward) -> Any:
            return jax.jit(NonFiniteSearchProgram(forward), out_shardings=self.grid.replicated)

        program, _ = self._get_program("the search", make, True, names, scalars, 0, given)
        return program

    def _get_program(
        self,
        name: str,
        make: Callable[[Forward], Any],
        training: bool,
        names: ColumnNames,
        scalars: Scalars,
        rows: int,
        given: tuple[Any, ...],
    ) -> tuple[Any, Any]:
        *_, batch, _ = given
        key = ProgramKey(name, signature(batch), tuple(self._static(scalars).items()), rows)
        if key not in self._forwards:
            self._forwards[key] = self.forward(training, scalars, names)
        program = self.compiler.get(key, lambda: make(self._forwards[key]), *given)
        return program, self._forwards[key].columns
