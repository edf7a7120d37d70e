"""Is a forward pass the same each time, and does a row depend on the rows beside it? And does an evaluation draw?"""

from __future__ import annotations

import copy
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from unisono.data.loading.draws import find_drawing_lines, restore_global_generators
from unisono.data.loading.loader import MicroBatch
from unisono.engines.observers import ModelView
from unisono.proof.predictions import is_equal
from unisono.proof.probes.rows import is_per_row, take_rows
from unisono.proof.probes.state import TORCH, describe_state, digest_kept, find_kept, repeat_call
from unisono.proof.recording.output_digest import Sketch, build_sketches, mixed_rows, row_differs, sketch_distance
from unisono.proof.recording.trace import Array, RunFacts
from unisono.runtime.text import join_names
from unisono.task import Task

_KINDS = re.compile("BatchNorm|InstanceNorm|Dropout")  # of modules that compute otherwise in training
_COPIED = 4  # rows, copies of which stand in place of the others
_FEW = 16  # rows, each of which a pass is made for where they are mixed
_ROUNDING = 1e-4  # what kernels that add in another order each time stay below


def probe_model(
    facts: RunFacts, view: ModelView, task: Task, micro: MicroBatch, scalars: Mapping[str, float], floor: float
) -> None:
    """Make a forward pass twice, once for each of the first rows with copies of it in place of the others, and again.

    Args:
        facts: to write what was found into.
        view: of the model.
        task: whose model it is.
        micro: whose rows they are.
        scalars: of the first step.
        floor: relative difference that is rounding.
    """
    with view.without_side_effects(), restore_global_generators():
        facts.carried = _find_carried(view, micro, scalars, floor)
        fixed = with_same_buffers(view) if facts.carried else view
        facts.reseeded = _is_reseeded(fixed, micro, scalars, floor)
    _try_passes(facts, fixed, task, micro, scalars, floor)


def with_same_buffers(view: ModelView) -> ModelView:
    """A view all of whose passes begin with the buffers that the model has now."""

    def restoring(call: Callable[..., Any]) -> Callable[..., Any]:
        def restored(*arguments: Any, **named: Any) -> Any:
            with view.without_side_effects():
                return call(*arguments, **named)

        return restored

    result = copy.copy(view)
    for name in ("outputs", "sums", "draws"):
        setattr(result, name, restoring(getattr(view, name)))
    return result


def _copy(micro: MicroBatch, arrays: Mapping[str, Any] | None = None) -> MicroBatch:
    """The same with arrays of its own, which a task may change; these, if some are given."""
    return replace(micro, arrays=copy.deepcopy(dict(micro.arrays if arrays is None else arrays)))


def _make_outputs(view: ModelView, micro: MicroBatch, scalars: Mapping[str, float]) -> dict[str, Array]:
    return view.flatten(view.outputs(micro, scalars))


def _try_passes(
    facts: RunFacts, view: ModelView, task: Task, micro: MicroBatch, scalars: Mapping[str, float], floor: float
) -> None:
    count = micro.size

    def outputs(arrays: Mapping[str, Any] | None = None) -> dict[str, Array]:
        return _make_outputs(view, _copy(micro, arrays), scalars)

    with view.without_side_effects(), restore_global_generators():
        once = outputs()
        sketches = build_sketches(once)
        again = repeat_call(task, outputs, lambda made: sketch_distance(sketches, build_sketches(made))[0] <= floor)
        size, name = sketch_distance(sketches, build_sketches(again))
        alike, after, call = [], "", outputs
        if size <= floor:
            alike = [(row, outputs(copy_row(micro, row))) for row in range(min(count, _COPIED)) if count > 1]
            size, name = sketch_distance(sketches, build_sketches(outputs()))
            after, call = ", after one of other rows,", partial(outputs, copy_row(micro, 0))
        if size > floor:
            said = f"a second forward pass{after} with the same weights, rows and seeds gave another {name}"
            said = f"{said}; {describe_state(task, call, micro.arrays, model=getattr(view, 'module', None))}"
            facts.unrepeatable = facts.unrepeatable or said
            facts.unstable_forward = said if size > _ROUNDING else ""
            return
        facts.neighbours = any(row_differs(once, others, row, count, floor) for row, others in alike)
        if facts.neighbours and count <= _FEW:
            facts.beside = _describe_beside(micro, once, outputs, floor)
            alike += [(row, outputs(copy_row(micro, row))) for row in range(len(alike), count)]
            by_row = {
                n: np.stack([others[n][row] for row, others in alike]) for n, a in once.items() if is_per_row(a, count)
            }
            facts.mixed = mixed_rows(once, by_row, floor)
        elif not facts.neighbours:
            facts.unstable_forward = _find_remembered(view, outputs, micro, once, floor)


def _describe_beside(micro: MicroBatch, once: Mapping[str, Array], outputs: Any, floor: float) -> str:
    """Which rows a row depends on, where it is not all of them: each is changed by itself into the one after it.

    A statistic of a batch is made of all its rows, or is read by all (a maximum); rows that are mixed depend on one or
    two others, by their places.
    """
    count, of_row = micro.size, {row: list[int]() for row in range(micro.size)}
    for changed in range(count):
        order = [*range(count)]
        order[changed] = (changed + 1) % count
        made = outputs(take_rows(micro.arrays, count, order))
        for row in order[:changed] + order[changed + 1 :]:
            if row_differs(once, made, row, count, floor):
                of_row[row].append(changed)
    most = [*map(len, of_row.values()), *Counter(one for others in of_row.values() for one in others).values()]
    if count < 3 or count - 1 in most:
        return ""
    return "; ".join(f"row {row} on {join_names(map(str, others))}" for row, others in of_row.items() if others)


def _find_remembered(view: ModelView, outputs: Any, micro: MicroBatch, once: Mapping[str, Array], floor: float) -> str:
    """What the model keeps of its first pass, a row for a row, and reads in the next ones; empty for nothing.

    The same rows in other places then give other outputs, and their own in these places once what is kept is put into
    the same order.
    """
    count = micro.size
    order = [*range(1, count), 0]
    kept = _find_tensors_by_row(getattr(view, "module", None), count)
    if count < 2 or not kept:
        return ""
    turned, wanted = take_rows(micro.arrays, count, order), build_sketches(take_rows(once, count, order))
    if sketch_distance(build_sketches(outputs(turned)), wanted)[0] <= floor:
        return ""
    for holder, key, value in kept.values():
        holder[key] = value[order]
    try:
        again = build_sketches(outputs(turned))
    finally:
        for holder, key, value in kept.values():
            holder[key] = value
    if sketch_distance(again, wanted)[0] > floor:
        return ""
    return (
        f"the model keeps {join_names(sorted(kept))} of an earlier micro-batch, which is no buffer: rows in another "
        "order have outputs of their own only if what it keeps is put into this order, too"
    )


def _find_tensors_by_row(model: Any, count: int) -> dict[str, tuple[dict[Any, Any], Any, Any]]:
    """Plain tensors that a model keeps, in dictionaries too, with a row for each of the micro-batch, and where."""

    def is_by_row(value: Any) -> bool:
        return hasattr(value, "untyped_storage") and value.ndim > 0 and len(value) == count

    found: dict[str, tuple[dict[Any, Any], Any, Any]] = {}
    for name, (module, attribute, value) in find_kept(model).items():
        if is_by_row(value):
            found[name] = vars(module), attribute, value
        for key, inner in value.items() if isinstance(value, dict) else ():
            if is_by_row(inner):
                found[f"{name}[{key!r}]"] = value, key, inner
    return found


def _is_reseeded(view: ModelView, micro: MicroBatch, scalars: Mapping[str, float], floor: float) -> bool:
    """Whether passes with two seeds draw the same: they end in one random state, and give the same."""
    if not view.draws(micro, scalars):
        return False
    found = []
    for number in (micro.number, micro.number + 1):
        given = replace(_copy(micro), number=number)
        made = build_sketches(_make_outputs(view, given, scalars))
        found.append((made, view.sums(given, scalars), view.random_digest()))
    (made, sums, state), (others, other_sums, other_state) = found
    return state != 0 and state == other_state and not _find_other((made, sums), (others, other_sums), floor)


def _find_carried(view: ModelView, micro: MicroBatch, scalars: Mapping[str, float], floor: float) -> list[str]:
    """The buffers that a pass changes, if the next one reads them and passes that begin with the same are the same.

    The next one may be of the same rows, or of copies of one: a largest value so far moves by other rows alone.
    """

    def sketch(arrays: Mapping[str, Any] | None = None) -> dict[str, Sketch]:
        return build_sketches(_make_outputs(view, _copy(micro, arrays), scalars))

    with view.without_side_effects():
        before = {name: buffer.copy() for name, buffer in view.whole("buffers").items()}
        once = sketch()
        after = view.whole("buffers")
        changed = [name for name in after if not np.array_equal(before[name], after[name])]
        moved = sketch_distance(once, sketch())[0] if changed else 0.0
    for row in range(min(micro.size, _COPIED) if changed else 0):
        if moved:
            break
        with view.without_side_effects():
            fresh = sketch(copy_row(micro, row))
        with view.without_side_effects():
            sketch()
            moved = sketch_distance(fresh, sketch(copy_row(micro, row)))[0]
    if not moved:
        return []
    with view.without_side_effects():
        again = sketch_distance(once, sketch())[0]
    # A power iteration that has nearly converged moves outputs by less than rounding may, and gradients by more: where
    # a pass repeats in every bit, any difference comes from the buffers.
    repeats = again <= floor and (moved > floor or not again)
    shared = [name for name in changed if name not in view.local_buffers]  # those of batch norm are not read
    return (shared or changed) if repeats else []


def copy_row(micro: MicroBatch, row: int) -> dict[str, Any]:
    """The arrays of a micro-batch with a copy of one row in place of every other."""
    return take_rows(micro.arrays, micro.size, [row] * micro.size)


def probe_evaluation(view: ModelView, micro: MicroBatch, scalars: Mapping[str, float]) -> str:
    """Where the evaluation of a held-out micro-batch draws random numbers; empty if it does not."""
    with view.without_side_effects(), restore_global_generators():
        if not view.draws(micro, scalars, training=False):
            return ""
        line = find_drawing_lines(lambda: view.draws(micro, scalars, training=False)).get(TORCH, "")
    return f"outputs() or loss() draws in evaluation{f' ({line})' if line else ''}"


def find_switched(view: ModelView, micro: MicroBatch, scalars: Mapping[str, float]) -> str:
    """The normalisations and dropouts that a pass in evaluation puts into training mode, in words; empty for none."""
    model: Any = getattr(view, "module", None)
    if "torch" not in sys.modules or not hasattr(model, "named_modules"):
        return ""
    before = {name: module.training for name, module in model.named_modules()}
    switched: list[str] = []

    def see(module: Any, *_: Any) -> None:
        if module.training and getattr(module, "p", 1) > 0:
            switched.extend(name for name, part in model.named_modules() if part is module)

    parts = [part for _, part in model.named_modules() if _KINDS.search(type(part).__name__)]
    handles = [part.register_forward_pre_hook(see) for part in parts]
    try:
        with view.without_side_effects(), restore_global_generators():
            view.draws(micro, scalars, training=False)
    finally:
        for handle in handles:
            handle.remove()
        for name, module in model.named_modules():
            module.training = before[name]
    names = join_names(dict.fromkeys(repr(name) for name in switched))
    return f"outputs() or loss() computes with {names} in training mode" if names else ""


def find_remembered_by_evaluation(
    view: ModelView, task: Task, micro: MicroBatch, held: MicroBatch, scalars: Mapping[str, float], floor: float
) -> str:
    """How a training pass is another after an evaluation, in words; empty if it is the same."""
    model = getattr(view, "module", None)

    def train() -> tuple[dict[str, Sketch], dict[str, float]]:
        with view.without_side_effects():
            given = _copy(micro)
            return build_sketches(_make_outputs(view, given, scalars)), view.sums(given, scalars)

    def evaluate() -> None:
        with view.without_side_effects():
            view.draws(held, scalars, training=False)

    with restore_global_generators():
        once, repeated = train(), train()
        before = digest_kept(task, model)
        evaluate()
        after, again = digest_kept(task, model), train()
        changed = _find_other(once, again, floor)
        if not changed or _find_other(once, repeated, floor):  # then it is no matter of the evaluation
            return ""
        kept = [name for name in after if after[name] != before.get(name)]
        why = f"it changes {join_names(kept)}" if kept else describe_state(task, evaluate, {})
    return f"a training pass after an evaluation gives another {changed}; {why}"


def _find_other(
    once: tuple[Mapping[str, Sketch], Mapping[str, float]],
    again: tuple[Mapping[str, Sketch], Mapping[str, float]],
    floor: float,
) -> str:
    """The first output, or the first sum of the loss, that is another the second time; empty for none."""
    size, name = sketch_distance(once[0], again[0])
    if size > floor:
        return name
    return next((f"'{n}'" for n, value in once[1].items() if not is_equal(value, again[1][n], floor)), "")
