"""The programs of a run: the step, the evaluation and the search for what is not finite, each compiled for its shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from unisono.config.schema.run import RunConfig
from unisono.engines.jax.batches import Names, Pass, signature
from unisono.engines.jax.evaluation import Evaluation, Search
from unisono.engines.jax.forward import Columns, Forward, Inputs
from unisono.engines.jax.guards.compilation import Compiler, Key
from unisono.engines.jax.model import Structure
from unisono.engines.jax.numerics.optimizers import Optimizer
from unisono.engines.jax.parallel.mesh import Grid
from unisono.engines.jax.step import CONTROLS, Observed, State, Step
from unisono.task import Task

Scalars = Mapping[str, float]


@dataclass
class Programs:
    """Makes and keeps the programs of one process.

    Attributes:
        task: whose functions they call.
        config: of the run.
        structure: of the model.
        optimizer: makes the update.
        grid: of devices.
        compiler: compiles them.
        scalars: names of scheduled values that a program is given as numbers.
        recompute: every how manieth block is computed again in the backward pass.
    """

    task: Task
    config: RunConfig
    structure: Structure
    optimizer: Optimizer
    grid: Grid
    compiler: Compiler
    scalars: tuple[str, ...]
    recompute: int
    _forwards: dict[Key, Forward] = field(default_factory=dict)

    def forward(self, training: bool, scalars: Scalars, names: Names, grid: Grid | None = None) -> Forward:
        """The functions of the task, with the scheduled values that a program is compiled for."""
        static = {name: scalars[name] for name in self.task.static_scalars}
        precision = self.config.train.precision
        return Forward(
            self.task, self.structure, grid or self.grid, precision, names, self.scalars, static, training,
            self.recompute,
        )  # fmt: skip

    def inputs(self, step: int, scalars: Scalars, started: bool, controls: Mapping[str, float] | None) -> Inputs:
        """The numbers of a training step, or with `controls=None` of an evaluation."""
        floats = {name: scalars[name] for name in self.scalars}
        floats |= {name: controls.get(name, math.inf) for name in CONTROLS} if controls is not None else {}
        purpose = "eval" if controls is None else "dropout"
        return Inputs.of(step, self.config.run.seed, purpose, started, floats, self.config.train.precision)

    def step(
        self, state: State, constants: Mapping[str, Any], batch: Pass, inputs: Inputs, names: Names, scalars: Scalars,
        rows: int, observed: bool = False,
    ) -> tuple[Callable[..., Any], Columns]:  # fmt: skip
        """The training step. Its first argument, the state, is gone afterwards, unless it is observed.

        Args:
            state: of the run; like the other three, what the program will be called with.
            constants: arrays that are not trained.
            batch: of this step.
            inputs: of this step.
            names: of the micro-batches.
            scalars: scheduled values.
            rows: real rows of the global batch, for a loss across samples; else 0.
            observed: whether it also returns what observers look at; see `Step.observed`.
        """
        placed = jax.tree.map(lambda array: array.sharding, state), self.grid.replicated
        seen = Observed(placed[0].parameters, placed[0].parameters, self.grid.batch)
        passes = batch.number.shape[0]

        def make(forward: Forward) -> Any:
            step = Step(forward, self.optimizer, passes, self.config.layout.defer_reduction, rows)
            if observed:
                return jax.jit(step.observed, out_shardings=(*placed, seen))
            return jax.jit(step, donate_argnums=0, out_shardings=placed)

        name = "the observed step" if observed else "the step"
        return self._of(name, make, True, names, scalars, rows, batch, state, constants, batch, inputs)

    def evaluation(
        self, parameters: Mapping[str, Any], constants: Mapping[str, Any], batch: Pass, inputs: Inputs, names: Names,
        scalars: Scalars, rows: int,
    ) -> tuple[Callable[..., jax.Array], Columns]:  # fmt: skip
        """The sums of a global batch without an update; arguments as for `step`."""

        def make(forward: Forward) -> Any:
            return jax.jit(Evaluation(forward, rows), out_shardings=self.grid.replicated)

        return self._of(
            "the evaluation", make, False, names, scalars, rows, batch, parameters, constants, batch, inputs
        )  # fmt: skip

    def search(
        self, state: State, constants: Mapping[str, Any], batch: Pass, inputs: Inputs, names: Names, scalars: Scalars
    ) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
        """Where the first number that is not finite came from; arguments as for `step`."""

        def make(forward: Forward) -> Any:
            return jax.jit(Search(forward), out_shardings=self.grid.replicated)

        given = state.parameters, constants, state.carry, batch, inputs
        program, _ = self._of("the search", make, True, names, scalars, 0, batch, *given)
        return program

    def _of(
        self, name: str, make: Callable[[Forward], Any], training: bool, names: Names, scalars: Scalars, rows: int,
        batch: Pass, *arguments: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        static = tuple((name, scalars[name]) for name in self.task.static_scalars)
        key = Key(name, signature(batch), static, rows)
        if key not in self._forwards:
            self._forwards[key] = self.forward(training, scalars, names)
        program = self.compiler.of(key, lambda: make(self._forwards[key]), *arguments)
        return program, self._forwards[key].columns
