"""The puzzle task in JAX: the algorithm of the torch task on the same data, with arrays of the same names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unisono import ConfigError
from unisono.recipes.puzzles.base import Fields
from unisono.recipes.puzzles.steps import PuzzleSteps

if TYPE_CHECKING:
    from jax import Array

    from unisono.recipes.puzzles.model.jax_model import PuzzleModel


class Puzzles(PuzzleSteps):
    """A small recursive model that solves puzzles, in JAX."""

    engine = "jax"
    frozen = ("answer_start", "latent_start")
    static_scalars = ("h_cycles", "l_cycles")  # lengths of loops

    def build(self, key: Array) -> PuzzleModel:
        """The model."""
        from unisono.recipes.puzzles.model.jax_model import PuzzleModel

        return PuzzleModel(self.model_config, self.kinds, key)

    def check(self) -> None:
        """Settings against the puzzles, of one kind."""
        super().check()
        if len(self.kinds) > 1:
            raise ConfigError(
                f"data.parts has {len(self.kinds)} kinds of puzzles ({', '.join(self.kinds)}), and layout.engine=jax "
                "compiles a step for micro-batches of one shape; use layout.engine=torch, or one kind"
            )

    def zeros(self, shape: tuple[int, ...], like: Array) -> Array:
        """Floats of the run's precision."""
        import jax.numpy as jnp

        return jnp.zeros(shape)

    def constant(self, array: Any, like: Array) -> Array:
        """A NumPy array."""
        import jax.numpy as jnp

        return jnp.asarray(array)

    def without_gradient(self, compute: Callable[[], Any]) -> Any:
        """What a function computes, as a constant."""
        import jax

        return jax.lax.stop_gradient(compute())

    def repeat(self, advance: Callable[[Fields], Fields], state: Fields, times: int) -> Fields:
        """The state after so many advances, in a loop that is compiled once."""
        import jax

        made: Fields = jax.lax.fori_loop(0, times, lambda _, before: advance(before), state)
        return made

    def reduced(self, value: Array) -> Array:
        """The numbers of the rows, which the engine adds up."""
        return value

    def wide(self, value: Array) -> Array:
        """In fp64 where the run is, else fp32: a TPU has no fp64, and `act.cross_entropies` loses nothing."""
        import jax.numpy as jnp

        return value.astype(jnp.promote_types(value.dtype, jnp.float32))
