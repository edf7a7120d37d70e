"""Which module lets a row see the rows beside it, and by how much? And a document of a packed row the one beside it?

A row that depends on its neighbours is another computation on every layout. Batch normalisation is known for it; of
anything else a user hardly knows, so it is looked for in the modules of the model, with batch normalisation set aside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from unisono.proof.probes.trial import Trial, is_per_row, take_rows
from unisono.proof.recording.output_digest import row_distance
from unisono.proof.recording.trace import Array, RunFacts
from unisono.protocols import require_packable
from unisono.runtime.text import join_names

Calls = list[
    tuple[str, list[Array], list[Array]]
]  # of every module in order of its end: its name, what went in and out


def probe_rows(facts: RunFacts, trial: Trial, rows: Sequence[int]) -> None:
    """Find out what makes rows depend on their neighbours, and forget it where it is no row that does.

    Args:
        facts: with `neighbours`; `normalised` or `dependent` are written.
        trial: of a model that gives the same twice.
        rows: that are tried, each with copies of itself in place of the others.
    """
    count = trial.micro.size
    by_row = _find_arrays_by_row(trial)

    def outputs(order: Sequence[int]) -> dict[str, Array]:
        made = trial.outputs(trial.copy(take_rows(trial.micro.arrays, count, order)))
        return {name: array for name, array in made.items() if by_row is None or name in by_row}

    def largest(once: Mapping[str, Array]) -> tuple[float, str, int]:
        found = [(*row_distance(once, outputs([row] * count), row, count), row) for row in rows]
        return max(found, default=(0.0, "", 0))

    plain = largest(outputs(range(count)))
    if plain[0] <= trial.floor:
        facts.neighbours = False  # an array that has as many entries as there are rows, and is none of rows
        return
    normalised: list[str] = []
    with _normalising_nothing(trial.model, normalised) as known:
        size, name, row = largest(outputs(range(count))) if known else plain
        if known and normalised and size <= trial.floor:
            facts.normalised = join_names(dict.fromkeys(normalised))
            return
        if size <= trial.floor:
            size, name, row = plain
        module = _find_module(trial, row) if trial.model is not None else ""
    facts.dependent = (
        f"{module or 'outputs()'} lets a row see the rows beside it: row {row} of '{name}' changes by "
        f"{size:.1%} where copies of it take the place of the others"
    )


def _find_arrays_by_row(trial: Trial) -> set[str] | None:
    """The outputs that have one row less where the batch has; None where the model cannot be asked."""
    count = trial.micro.size
    with _normalising_nothing(trial.model, []):
        try:
            made = trial.outputs(trial.take(range(count - 1)))
        except Exception:  # such as rows that are one group
            return None
    return {name for name, array in made.items() if is_per_row(array, count - 1)}


@contextmanager
def _normalising_nothing(model: Any, met: list[str]) -> Iterator[bool]:
    """A context in which batch normalisation only scales and shifts, whoever calls it; whether there can be any.

    Args:
        model: a torch module, or None.
        met: gets the name of each layer that normalised, or of torch's function where no layer is around it.
    """
    if model is None:
        yield False
        return
    import torch
    import torch.nn.functional as F
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.overrides import TorchFunctionMode

    inside: list[str] = []

    class Scaling(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is not F.batch_norm:
                return func(*args, **(kwargs or {}))
            named = dict(zip(("input", "mean", "variance", "weight", "bias", "training"), args, strict=False))
            named |= kwargs or {}
            if not named.get("training", False):
                return func(*args, **(kwargs or {}))
            met.append(inside[-1] if inside else "torch.nn.functional.batch_norm")
            x, shape = named["input"], (1, -1, *[1] * (named["input"].ndim - 2))
            for what, combine in (("weight", torch.mul), ("bias", torch.add)):
                if named.get(what) is not None:
                    x = combine(x, named[what].view(shape))
            return x.clone()

    handles = []
    for name, part in model.named_modules():
        if isinstance(part, _BatchNorm):
            shown = f"'{name}' ({type(part).__name__})"
            handles.append(part.register_forward_pre_hook(lambda *_, shown=shown: inside.append(shown)))
            handles.append(part.register_forward_hook(lambda *_: inside.pop() and None, always_call=True))
    try:
        with Scaling():
            yield True
    finally:
        for handle in handles:
            handle.remove()


def _find_module(trial: Trial, row: int) -> str:
    """The innermost module that is given the same of a row twice, and makes another of it beside other rows."""
    count = trial.micro.size
    with _watch(trial.model) as once:
        trial.outputs(trial.copy())
    with _watch(trial.model) as beside:
        trial.outputs(trial.copy(take_rows(trial.micro.arrays, count, [row] * count)))

    def differs(mine: Sequence[Array], others: Sequence[Array]) -> bool:
        named = [{str(n): _rows_first(a, count) for n, a in enumerate(arrays)} for arrays in (mine, others)]
        return row_distance(named[0], named[1], row, count)[0] > trial.floor

    for (name, given, made), (other, given_there, made_there) in zip(once, beside, strict=False):
        if name != other:
            break  # which modules are called depends on the rows
        if not differs(given, given_there) and differs(made, made_there):
            part = trial.model.get_submodule(name)
            return f"'{name}' ({type(part).__name__})" if name else f"the model itself ({type(part).__name__})"
    return ""


def _rows_first(array: Array, count: int) -> Array:
    """An array inside of a model with its rows on the first axis, where one can tell: (rows, …), (…, rows, …)."""
    if array.ndim and array.shape[0] == count:
        return array
    axis = next((n for n, size in enumerate(array.shape) if size == count), None)
    if axis is not None:
        return np.moveaxis(array, axis, 0)
    flat = array.ndim > 0 and array.shape[0] and array.shape[0] % count == 0  # (rows * length, …)
    return array.reshape(count, -1) if flat else array


@contextmanager
def _watch(model: Any) -> Iterator[Calls]:
    """What goes into the modules of a torch model, and out of them."""
    import torch
    from torch.utils._pytree import tree_leaves

    calls: Calls = []

    def copies(values: Any) -> list[Array]:
        tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())
        return [tensor.detach().to("cpu", torch.float64, copy=True).numpy() for tensor in tensors]

    def see(name: str) -> Callable[..., None]:
        return lambda _, args, kwargs, made: calls.append((name, copies((args, kwargs)), copies(made)))

    handles = [part.register_forward_hook(see(name), with_kwargs=True) for name, part in model.named_modules()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def probe_documents(facts: RunFacts, trial: Trial, capacity: int, samples: Sequence[Any]) -> None:
    """Change one document of a packed row, and see whether the other adds something else to the loss.

    Where documents do not see each other, the loss of a row is f(first) + g(second), whatever f and g make of their
    places, and so the losses of (a, b) and (b, a) add up to those of (a, a) and (b, b).

    Args:
        facts: `packed` is written.
        trial: of the model.
        capacity: units of a packed row.
        samples: to make two documents of the same length of.
    """
    packable = require_packable(trial.task)
    long = [sample for sample in samples if packable.length(sample) > 1]
    length = min([*sorted(map(packable.length, long), reverse=True)[:2], capacity // 2])
    documents = [packable.cut(one, 0, length) for one in long if packable.length(one) >= length][:2]
    if len(documents) < 2 or length < 1:
        return

    def sums(first: int, second: int) -> dict[str, float]:
        arrays = trial.task.collate([packable.pack([documents[first], documents[second]])])
        return trial.sums(replace(trial.micro, arrays=arrays, rows=trial.micro.rows[:2], packed=1))

    with trial.undone():
        by_places = {(a, b): sums(a, b) for a in (0, 1) for b in (0, 1)}
    for name in by_places[0, 0]:
        mixed = by_places[0, 1][name] + by_places[1, 0][name] - by_places[0, 0][name] - by_places[1, 1][name]
        whole = max(abs(one[name]) for one in by_places.values())
        if abs(mixed) > trial.floor * whole:
            facts.packed = (
                f"the sum of '{name}' of a packed row of two documents changes by {abs(mixed) / whole:.1%} with what "
                f"stands beside a document of {length} units"
            )
            return
