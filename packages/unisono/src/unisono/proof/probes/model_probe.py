"""Is a forward pass the same each time, and does a row depend on the rows beside it? And does an evaluation draw?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from unisono.data.loading.draws import find_drawing_lines, restore_global_generators
from unisono.data.loading.micro_batch import MicroBatch
from unisono.proof.diagnoses.predictions import is_equal
from unisono.proof.probes.row_probe import probe_rows
from unisono.proof.probes.state import TORCH, describe_state, digest_kept, find_kept, repeat_call
from unisono.proof.probes.trial import Trial, is_per_row, take_rows
from unisono.proof.recording.output_digest import Sketch, build_sketches, mixed_rows, row_differs, sketch_distance
from unisono.proof.recording.trace import Array, RunFacts
from unisono.runtime.text import join_names

_KINDS = re.compile("BatchNorm|InstanceNorm|Dropout")  # of modules that compute otherwise in training
_COPIED = 4  # rows, copies of which stand in place of the others
_FEW = 16  # rows, each of which a pass is made for where they are mixed
_ROUNDING = 1e-4  # what kernels that add in another order each time stay below


def probe_model(facts: RunFacts, trial: Trial) -> None:
    """Make a forward pass twice, once for each of the first rows with copies of it in place of the others, and again.

    Args:
        facts: to write what was found into.
        trial: of the model.
    """
    with trial.undone():
        facts.carried = find_carried(trial)
        fixed = trial.with_same_buffers() if facts.carried else trial
        facts.reseeded = _is_reseeded(fixed)
    _try_passes(facts, fixed)


def _try_passes(facts: RunFacts, trial: Trial) -> None:
    task, micro, floor, count = trial.task, trial.micro, trial.floor, trial.micro.size

    def outputs(arrays: Mapping[str, Any] | None = None) -> dict[str, Array]:
        return trial.outputs(trial.copy(arrays))

    with trial.undone():
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
            said = f"{said}; {describe_state(task, call, micro.arrays, model=trial.model)}"
            facts.unrepeatable = facts.unrepeatable or said
            facts.unstable_forward = said if size > _ROUNDING else ""
            return
        facts.neighbours = any(row_differs(once, others, row, count, floor) for row, others in alike)
        if facts.neighbours:
            probe_rows(facts, trial, [row for row, _ in alike])
        if facts.neighbours and count <= _FEW:
            facts.beside = _describe_beside(trial, once)
            if facts.dependent and facts.beside:
                facts.dependent += f" ({facts.beside})"
            alike += [(row, outputs(copy_row(micro, row))) for row in range(len(alike), count)]
            by_row = {
                n: np.stack([others[n][row] for row, others in alike]) for n, a in once.items() if is_per_row(a, count)
            }
            facts.mixed = mixed_rows(once, by_row, floor)
        elif not facts.neighbours:
            facts.unstable_forward = _find_remembered(trial, once)


def _describe_beside(trial: Trial, once: Mapping[str, Array]) -> str:
    """Which rows a row depends on, where it is not all of them: each is changed by itself into the one after it.

    A statistic of a batch is made of all its rows, or is read by all (a maximum); rows that are mixed depend on one or
    two others, by their places.
    """
    micro, count = trial.micro, trial.micro.size
    of_row = {row: list[int]() for row in range(count)}
    for changed in range(count):
        order = [*range(count)]
        order[changed] = (changed + 1) % count
        made = trial.outputs(trial.copy(take_rows(micro.arrays, count, order)))
        for row in order[:changed] + order[changed + 1 :]:
            if row_differs(once, made, row, count, trial.floor):
                of_row[row].append(changed)
    most = [*map(len, of_row.values()), *Counter(one for others in of_row.values() for one in others).values()]
    if count < 3 or count - 1 in most:
        return ""
    return "; ".join(f"row {row} on {join_names(map(str, others))}" for row, others in of_row.items() if others)


def _find_remembered(trial: Trial, once: Mapping[str, Array]) -> str:
    """What the model keeps of its first pass, a row for a row, and reads in the next ones; empty for nothing.

    The same rows in other places then give other outputs, and their own in these places once what is kept is put into
    the same order.
    """
    count = trial.micro.size
    order = [*range(1, count), 0]
    kept = _find_tensors_by_row(trial.model, count)
    if count < 2 or not kept:
        return ""
    wanted = build_sketches(take_rows(once, count, order))

    def differs() -> bool:
        turned = trial.copy(take_rows(trial.micro.arrays, count, order))
        return sketch_distance(build_sketches(trial.outputs(turned)), wanted)[0] > trial.floor

    if not differs():
        return ""
    for holder, key, value in kept.values():
        holder[key] = value[order]
    try:
        if differs():
            return ""
    finally:
        for holder, key, value in kept.values():
            holder[key] = value
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


def _is_reseeded(trial: Trial) -> bool:
    """Whether passes with two seeds draw the same: they end in one random state, and give the same."""
    if not trial.view.draws(trial.micro, trial.scalars):
        return False
    found = []
    for number in (trial.micro.number, trial.micro.number + 1):
        given = replace(trial.copy(), number=number)
        found.append((make_pass(trial, given), trial.view.random_digest()))
    (made, state), (others, other_state) = found
    return state != 0 and state == other_state and not find_other(made, others, trial.floor)


def find_carried(trial: Trial) -> list[str]:
    """The buffers that a pass changes, if the next one reads them and passes that begin with the same are the same.

    The next one may be of the same rows, or of copies of one: a largest value so far moves by other rows alone.
    """
    view, micro = trial.view, trial.micro

    def sketch(arrays: Mapping[str, Any] | None = None) -> dict[str, Sketch]:
        return build_sketches(trial.outputs(trial.copy(arrays)))

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
    repeats = again <= trial.floor and (moved > trial.floor or not again)
    shared = [name for name in changed if name not in view.local_buffers]  # those of batch norm are not read
    return (shared or changed) if repeats else []


def find_rowless_buffers(trial: Trial) -> list[str]:
    """The buffers that a pass changes, but not by its rows: other rows leave the same, or the same rows another."""
    view, micro = trial.view, trial.micro

    def left(arrays: Mapping[str, Any] | None = None) -> dict[str, Array]:
        with view.without_side_effects():
            _ = trial.sums(trial.copy(arrays)) or trial.outputs(trial.copy(arrays))
            return {name: buffer.copy() for name, buffer in view.whole("buffers").items()}

    before, once = {name: buffer.copy() for name, buffer in view.whole("buffers").items()}, left()
    changed = [name for name in once if not np.array_equal(before[name], once[name])]
    if not changed or micro.size < 2:
        return []
    again, others = left(), [left(copy_row(micro, row)) for row in range(2)]
    return [
        name
        for name in changed
        if not np.array_equal(once[name], again[name])
        or all(np.array_equal(once[name], other[name]) for other in others)
    ]


def copy_row(micro: MicroBatch, row: int) -> dict[str, Any]:
    """The arrays of a micro-batch with a copy of one row in place of every other."""
    return take_rows(micro.arrays, micro.size, [row] * micro.size)


def probe_evaluation(trial: Trial, held: MicroBatch) -> str:
    """Where the evaluation of a held-out micro-batch draws random numbers; empty if it does not."""

    def evaluate() -> bool:
        return trial.view.draws(held, trial.scalars, training=False)

    with trial.undone():
        if not evaluate():
            return ""
        line = find_drawing_lines(evaluate).get(TORCH, "")
    return f"outputs() or loss() draws in evaluation{f' ({line})' if line else ''}"


def find_switched(trial: Trial, held: MicroBatch) -> str:
    """The normalisations and dropouts that a pass in evaluation puts into training mode, in words; empty for none."""
    model = trial.model
    if model is None:
        return ""
    before = {name: module.training for name, module in model.named_modules()}
    switched: list[str] = []

    def see(module: Any, *_: Any) -> None:
        if module.training and getattr(module, "p", 1) > 0:
            switched.extend(name for name, part in model.named_modules() if part is module)

    parts = [part for _, part in model.named_modules() if _KINDS.search(type(part).__name__)]
    handles = [part.register_forward_pre_hook(see) for part in parts]
    try:
        with trial.undone():
            trial.view.draws(held, trial.scalars, training=False)
    finally:
        for handle in handles:
            handle.remove()
        for name, module in model.named_modules():
            module.training = before[name]
    names = join_names(dict.fromkeys(repr(name) for name in switched))
    return f"outputs() or loss() computes with {names} in training mode" if names else ""


def find_remembered_by_evaluation(trial: Trial, held: MicroBatch) -> str:
    """How a training pass is another after an evaluation, in words; empty if it is the same."""
    view, task = trial.view, trial.task

    def train() -> _Pass:
        with view.without_side_effects():
            return make_pass(trial, trial.copy())

    def evaluate() -> None:
        with view.without_side_effects():
            view.draws(held, trial.scalars, training=False)

    with restore_global_generators():
        once, repeated = train(), train()
        before = digest_kept(task, trial.model)
        evaluate()
        after, again = digest_kept(task, trial.model), train()
        changed = find_other(once, again, trial.floor)
        if not changed or find_other(once, repeated, trial.floor):  # then it is no matter of the evaluation
            return ""
        kept = [name for name in after if after[name] != before.get(name)]
        why = f"it changes {join_names(kept)}" if kept else describe_state(task, evaluate, {})
    return f"a training pass after an evaluation gives another {changed}; {why}"


_Pass = tuple[dict[str, Sketch], dict[str, float]]  # sketches of the outputs, and sums of the loss


def make_pass(trial: Trial, micro: MicroBatch) -> _Pass:
    """Sketches of the outputs, and the sums of the loss."""
    return build_sketches(trial.outputs(micro)), trial.sums(micro)


def find_other(once: _Pass, again: _Pass, floor: float) -> str:
    """The first output, or the first sum of the loss, that is another the second time; empty for none."""
    size, name = sketch_distance(once[0], again[0])
    if size > floor:
        return name
    return next((f"'{n}'" for n, value in once[1].items() if not is_equal(value, again[1][n], floor)), "")
