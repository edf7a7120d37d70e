"""A task's model as a pytree: its arrays by name, and everything else.

The engine works with `{name: array}`; the model that a task sees is put together from it inside of the jitted step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from unisono.config.schema.layout import Layout
from unisono.engines.jax.numerics import precision
from unisono.engines.jax.parallel.mesh import Grid
from unisono.runtime.errors import ConfigError, nearest
from unisono.runtime.rng import key as address
from unisono.runtime.text import join_names
from unisono.task import Task

_NO_DECAY = ("Embedding", "LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm")  # modules of Equinox


class _Array:
    """Where an array stands among the leaves that are none."""


_ARRAY_MARKER = _Array()


@dataclass(frozen=True)
class Structure:
    """A model without its arrays.

    Attributes:
        names: of the arrays, in the order of the tree.
        shapes: of each by name, with the dtype that `build` gave it.
        trained: names of those that are trained.
        blocks: names of the arrays of each repeated block.
        no_decay: names of arrays that belong to an embedding or a norm, which do not decay.
    """

    names: tuple[str, ...]
    shapes: Mapping[str, jax.ShapeDtypeStruct]
    trained: frozenset[str]
    blocks: tuple[frozenset[str], ...]
    no_decay: frozenset[str]
    _tree: Any
    _leaves: tuple[Any, ...]

    def model(self, arrays: Mapping[str, Any], recompute: int = 0) -> Any:
        """The model with these arrays.

        Args:
            arrays: every one of `names`.
            recompute: every N-th repeated block is recomputed in the backward pass; 0 for none.
        """
        given = iter(self.names)
        leaves = [arrays[next(given)] if leaf is _ARRAY_MARKER else leaf for leaf in self._leaves]
        model = jax.tree.unflatten(self._tree, leaves)
        return _checkpoint_blocks(model, recompute) if recompute else model


def build_structure(task: Task, seed: int) -> Structure:
    """The structure of the model that a task builds; nothing is computed.

    Raises:
        ConfigError: for a model that cannot be trained, with the name of the array.
    """
    found: dict[str, Any] = {}

    def build() -> dict[str, jax.Array]:
        model = _build_task_model(task, init_key(seed))
        found["model"] = jax.tree.map(lambda leaf: _ARRAY_MARKER if is_array(leaf) else leaf, model)
        found["names"] = tuple(named_arrays(model))  # in the order of the tree; JAX sorts what a dict is made of
        return named_arrays(model)

    with jax.enable_x64(False):  # initial weights are the same in every precision
        shapes = jax.eval_shape(build)
    model = found["model"]
    leaves, tree = jax.tree.flatten(model, is_leaf=lambda leaf: leaf is _ARRAY_MARKER)
    floats = {name for name, array in shapes.items() if jnp.issubdtype(array.dtype, jnp.floating)}
    frozen = {name for name in floats if any(fnmatchcase(name, pattern) for pattern in task.frozen)}
    for pattern in task.frozen:
        if not any(fnmatchcase(name, pattern) for name in floats):
            raise ConfigError(
                f"{type(task).__name__}.frozen: '{pattern}' matches no parameter, {nearest(pattern, floats)}"
            )
    _refuse_state(task, model, floats - frozen)
    if not floats - frozen:
        raise ConfigError(f"{type(task).__name__}: the model has no parameter to train (an array of floats)")
    blocks = tuple(frozenset(_names_below(path, shapes)) for path, _ in _blocks(model))
    no_decay = frozenset(
        name
        for path, _ in _modules(model, lambda module: type(module).__name__ in _NO_DECAY)
        for name in _names_below(path, shapes)
    )
    return Structure(found["names"], shapes, frozenset(floats - frozen), blocks, no_decay, tree, tuple(leaves))


def _refuse_state(task: Task, model: Any, trained: Iterable[str]) -> None:
    """Refuse Equinox's `State`: an optimizer would train it as if it were weights, and nothing else changes it.

    Raises:
        ConfigError: naming its arrays, unless all of them are frozen.
    """
    for path, _ in _modules(model, lambda node: isinstance(node, eqx.nn.State)):
        if names := [f"'{name}'" for name in sorted(_names_below(path, trained))]:
            raise ConfigError(
                f"{type(task).__name__}.build: the model has an equinox.nn.State (of BatchNorm or SpectralNorm, with "
                f"the arrays {join_names(names)}), and outputs() cannot pass a new one on to the next step. Use layers "
                f"without state, as LayerNorm or GroupNorm; to keep a pretrained one: frozen = ('{path}.*',)"
            )


def initialise(task: Task, structure: Structure, seed: int, grid: Grid, kind: str) -> dict[str, jax.Array]:
    """The arrays of the model as `build` makes them, each device its part; the same numbers on any layout.

    Args:
        task: builds it.
        structure: of its model.
        seed: of the run.
        grid: of devices.
        kind: the precision of the run; floats come in that of its master weights.
    """
    shardings = {name: grid.sharding(grid.spec(structure.shapes[name].shape)) for name in structure.names}
    with jax.enable_x64(False):
        arrays = jax.jit(lambda: named_arrays(_build_task_model(task, init_key(seed))), out_shardings=shardings)()
    return jax.jit(lambda arrays: precision.to_master(arrays, kind), out_shardings=shardings)(arrays)


def recompute_interval(structure: Structure, layout: Layout) -> int:
    """The interval N at which blocks are recomputed in the backward pass; 0 for none.

    Raises:
        ConfigError: if that is asked for and the model has no blocks.
    """
    if layout.activation_checkpointing and not structure.blocks:
        raise ConfigError(
            f"layout.activation_checkpointing={layout.activation_checkpointing}: the model has no blocks, a list or "
            "tuple of modules of one class. Keep its layers in one, or use jax.checkpoint in outputs()"
        )
    return layout.activation_checkpointing


def init_key(seed: int) -> jax.Array:
    """The key from which the first weights are drawn."""
    return key_from_bits(address(seed, "init"))


def key_from_bits(number: int) -> jax.Array:
    """A key from 64 bits of an address; the same whatever the precision."""
    halves = np.array([number >> 32, number & 0xFFFFFFFF], dtype=np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(halves), impl="threefry2x32")


def _build_task_model(task: Task, key: jax.Array) -> Any:
    model = task.build(key)
    seen: dict[int, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        if not is_array(leaf):
            continue
        name = keystr(path, simple=True, separator=".")
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating) or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ConfigError(
                f"{type(task).__name__}.build: '{name}' is of {leaf.dtype}; parameters are real numbers, and keys come "
                "with the context"
            )
        if id(leaf) in seen:
            raise ConfigError(
                f"{type(task).__name__}.build: '{seen[id(leaf)]}' and '{name}' are the same array, but a pytree cannot "
                "tie weights: they would be trained separately. Store it once and use it twice (or equinox.nn.Shared)"
            )
        seen[id(leaf)] = name
    if not seen:
        raise ConfigError(f"{type(task).__name__}.build returned a {type(model).__name__} without an array")
    return model


def named_arrays(model: Any) -> dict[str, jax.Array]:
    """The arrays of a model by name, in the order of the tree."""
    return {
        keystr(path, simple=True, separator="."): jnp.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(model)
        if is_array(leaf)
    }


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, and so a parameter or a constant of the model."""
    return isinstance(leaf, jax.Array | np.ndarray)


def _is_module(value: Any) -> bool:
    return isinstance(value, eqx.Module)


def _children(node: Any) -> list[tuple[str, Any]]:
    """The parts of a node one level down, with what they add to a name."""
    parts = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda part: part is not node)
    return [(keystr(path, simple=True, separator="."), part) for path, part in parts]


def _modules(model: Any, wanted: Callable[[Any], bool], path: str = "") -> Iterator[tuple[str, Any]]:
    """The outermost modules of a kind, with their paths."""
    if isinstance(model, eqx.Module | eqx.nn.State) and wanted(model):
        yield path, model
    elif not isinstance(model, _Array) and not jax.tree_util.all_leaves([model]):
        for name, part in _children(model):
            yield from _modules(part, wanted, f"{path}.{name}" if path else name)


def _blocks(model: Any, path: str = "") -> list[tuple[str, Any]]:
    """Repeated blocks: members of the outermost lists or tuples of modules that share a class and can be called."""
    if isinstance(model, _Array) or jax.tree_util.all_leaves([model]):
        return []
    parts = [(f"{path}.{name}" if path else name, part) for name, part in _children(model)]
    alike = len(parts) > 1 and len({type(part) for _, part in parts}) == 1
    if isinstance(model, list | tuple) and alike and _is_module(parts[0][1]) and callable(parts[0][1]):
        inner = _children(parts[0][1])
        if any(_is_module(part) or isinstance(part, list | tuple | dict) for _, part in inner):
            return parts
    return [block for name, part in parts for block in _blocks(part, name)]


def _checkpoint_blocks(model: Any, every: int) -> Any:
    """The model with every k-th of its blocks under `equinox.filter_checkpoint`."""
    paths = [path for number, (path, _) in enumerate(_blocks(model)) if number % every == 0]

    def wrap(node: Any, path: str) -> Any:
        if path in paths:
            return eqx.filter_checkpoint(node)
        if isinstance(node, _Array) or not any(one.startswith(f"{path}." if path else "") for one in paths):
            return node
        names = [f"{path}.{name}" if path else name for name, _ in _children(node)]
        parts, tree = jax.tree.flatten(node, is_leaf=lambda part: part is not node)
        return jax.tree.unflatten(tree, [wrap(part, name) for part, name in zip(parts, names, strict=True)])

    return wrap(model, "")


def _names_below(path: str, names: Iterable[str]) -> Iterator[str]:
    return (name for name in names if name == path or name.startswith(f"{path}."))
