"""The puzzle task in JAX: the algorithm of the torch task on the same data, with arrays of the same names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from unisono import Batch, Context, Loss
from unisono_puzzles.base import PuzzlesTask
from unisono_puzzles.batches import KIND, Fields, fields_of, with_kind, zero_fields

if TYPE_CHECKING:
    from jax import Array

    from unisono_puzzles.model.jax_model import PuzzleModel


class Puzzles(PuzzlesTask):
    """A small recursive model that solves puzzles, in JAX."""

    engine = "jax"
    frozen = ("answer_start", "latent_start")
    static_scalars = ("h_cycles", "l_cycles")  # lengths of loops

    def build(self, key: Array) -> PuzzleModel:
        """The model."""
        from unisono_puzzles.model.jax_model import PuzzleModel

        return PuzzleModel(self.model_config, self.kinds, key)

    # A step is compiled for one shape, so every micro-batch has the arrays of all kinds, and `lax.switch` selects what
    # is computed. There is no collective inside the switch, so devices may take different branches.

    def collate(self, samples: Sequence[Fields]) -> Batch:
        """A batch of one kind, with its number, and zeros for the others, from which nothing is computed."""
        held = super().collate(samples)
        kind, names = self.kind_of(held), list(self.kinds)
        if len(names) == 1:
            return held
        training, rows = f"{kind}/explore" in held, len(samples)
        for other in sorted({*names} - {kind}):
            votes = self.config.votes if self.votes_in(other) and not training else 1
            zeros = zero_fields(self.kinds[other].format.length, rows, votes, training)
            held = {**held, **with_kind(other, zeros)}
        return {**held, KIND: np.full(rows, names.index(kind), dtype=np.int32)}

    def initial_carry(self, batch: Batch) -> Fields:
        """The initial state of all rows, for every kind."""
        found = (with_kind(kind, fields_of(batch, kind)) for kind in self.kinds)
        return {name: array for one in found if one for name, array in super(Puzzles, self).initial_carry(one).items()}

    def outputs(self, model: Any, batch: Batch, context: Context) -> Fields:
        """One supervision step of each row; in evaluation, all of them."""

        def compute(kind: str) -> Fields:
            carry = None if context.carry is None else with_kind(kind, fields_of(context.carry, kind))
            own = with_kind(kind, fields_of(batch, kind))
            return super(Puzzles, self).outputs(model, own, replace(context, carry=carry))

        return self._choose(batch, compute)

    def loss(self, outputs: Fields, batch: Batch, context: Context) -> Loss:
        """Loss and metrics per row; training metrics are of the rows that halt in this step."""
        weights: dict[str, float] = {}

        def compute(kind: str) -> Fields:
            own = with_kind(kind, fields_of(batch, kind))
            found = super(Puzzles, self).loss(outputs, own, context)
            weights.update(found.weights)
            carry = {**(context.carry or {}), **(found.carry or {})}  # rows of other kinds wait
            return {"sums": found.sums, "metrics": found.metrics, "carry": carry}

        result = self._choose(batch, compute)
        return Loss(result["sums"], weights, result["metrics"], carry=result["carry"] if context.training else None)

    def _choose(self, batch: Batch, compute: Callable[[str], Fields]) -> Fields:
        """Compute only the kind of the micro-batch; outputs of other kinds are zeros."""
        import jax
        import jax.numpy as jnp

        if len(self.kinds) == 1:
            return compute(next(iter(self.kinds)))
        shapes = [jax.eval_shape(partial(compute, kind)) for kind in self.kinds]
        every = {name: shape for one in shapes for name, shape in one.items()}
        nothing = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), every)
        branches = [lambda kind=kind: {**nothing, **compute(kind)} for kind in self.kinds]
        chosen: Fields = jax.lax.switch(batch[KIND][0], branches)
        return chosen

    def zeros(self, shape: tuple[int, ...], like: Array) -> Array:
        """Floats of the run's precision."""
        import jax.numpy as jnp

        return jnp.zeros(shape)

    def constant(self, array: Any, like: Array) -> Array:
        """A NumPy array."""
        import jax.numpy as jnp

        return jnp.asarray(array)

    def without_gradient(self, compute: Callable[[], Any]) -> Any:
        """Call a function and stop gradients through its result."""
        import jax

        return jax.lax.stop_gradient(compute())

    def repeat(self, advance: Callable[[Fields], Fields], state: Fields, times: int) -> Fields:
        """Apply `advance` `times` times, in a loop that is compiled once."""
        import jax

        final: Fields = jax.lax.fori_loop(0, times, lambda _, before: advance(before), state)
        return final

    def sum_rows(self, value: Array) -> Array:
        """One number per row; the engine sums them."""
        return value

    def to_loss_precision(self, value: Array) -> Array:
        """fp64 in an fp64 run, else fp32: TPUs have no fp64, and `act.cross_entropies` loses nothing in fp32."""
        import jax.numpy as jnp

        return value.astype(jnp.promote_types(value.dtype, jnp.float32))
