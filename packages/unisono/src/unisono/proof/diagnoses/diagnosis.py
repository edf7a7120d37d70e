"""What a pattern of differences says: the likely fault behind the first quantity that differs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from unisono.proof.comparison import ComparedQuantity, first_failure
from unisono.proof.diagnoses import clipping_rules, gradient_rules, loss_rules, predictions, report_rules, update_rules
from unisono.proof.diagnoses.pattern import Pattern
from unisono.proof.diagnoses.predictions import stepped_per_process
from unisono.proof.diagnoses.remedies import REMEDIES, Diagnosis, build_diagnosis
from unisono.proof.invariants import (
    ADDED,
    COLLATED,
    DOCUMENTS,
    EQUAL_BUFFERS,
    GRADIENT,
    INITIALISED,
    NEIGHBOURS,
    PADDING,
    SWITCHED,
)
from unisono.proof.recording.optimizer_settings import OF_GROUPS
from unisono.proof.recording.trace import Trace
from unisono.runtime.fault_names import FaultName
from unisono.runtime.text import join_names

_KEPT_REMEDY = "keep it in a buffer, changed once per update, by what all processes have alike"
_ROUNDING = 1e-13  # a smaller difference fails only where every bit of an fp64 run has to be equal


def diagnose(
    mine: Trace,
    reference: Trace,
    compared: Sequence[ComparedQuantity],
    world_size: int,
    starts: Sequence[int] = (),
    root: Trace | None = None,
) -> Diagnosis | None:
    """The likely fault behind the first quantity that failed, or None if nothing did.

    Args:
        mine: the run in question.
        reference: the run that it must equal.
        compared: quantities and invariants, as `compare_traces` and `check_invariants` return them.
        world_size: processes of the run.
        starts: updates after which it was started again.
        root: the run on one process whose task was tried by itself, if it is not the reference.
    """
    if mine.facts.fault:
        is_of_rows = mine.facts.called != FaultName.NOT_FINITE or world_size == 1
        if is_of_rows and (refused := loss_rules.explain_refusal(mine, root or reference)):
            return refused
        return diagnose_error(mine.facts.called, mine.facts.fault)
    first = first_failure(compared)
    if first is None:
        return None
    pattern = Pattern(mine, reference, compared, first, world_size, starts, root)
    if mine.facts.uninitialised and first.quantity == "initial parameters":
        return build_diagnosis(FaultName.NEVER_INITIALISED, join_names(mine.facts.uninitialised, 3))
    if seen := _diagnose_by_facts(pattern):
        return seen
    if first.quantity in _INVARIANTS:
        return build_diagnosis(_INVARIANTS[first.quantity], first.worst.name)
    if first.quantity not in _RULES:
        return None
    if 0 < first.worst.size < _ROUNDING and first.quantity not in ("initial parameters", "learning rate"):
        return build_diagnosis(FaultName.ORDER_OF_SUMS, "the difference is one of rounding")
    found = _RULES[first.quantity](pattern)
    for consider in (_consider_states, update_rules.consider_optimizer, _consider_way, _consider_second_start):
        found = consider(pattern, found)
    return found


def _diagnose_by_facts(pattern: Pattern) -> Diagnosis | None:
    """What was seen of the task by itself, or of its run, and explains that this quantity differs."""
    quantity = pattern.first.quantity
    for fact, (fault, quantities) in _SEEN_ALONE.items():
        if quantity in quantities and (why := getattr(pattern.root, fact)):
            return build_diagnosis(fault, why)
    if quantity in _OF_PASSES and (wrong := _find_wrong_ranks(pattern)):  # other micro-batches compare no samples
        if why := pattern.root.unstable_samples:
            return build_diagnosis(FaultName.SAMPLES_BY_CALL, why)
        why = f"of the first rows, with the same generators, ranks {wrong} make other samples here"
        return build_diagnosis(FaultName.SAMPLES_BY_PROCESS, why)
    is_later = quantity in ("outputs", "loss") and pattern.worst.step > 1 and not pattern.parts
    if is_later and (why := pattern.root.carry_by_neighbours):
        return build_diagnosis(FaultName.ROW_BY_NEIGHBOURS, why)
    if quantity in (GRADIENT, "initial parameters") and pattern.mine.facts.replaced:
        return build_diagnosis(FaultName.OPTIMIZER_BEFORE_WRAPPING, pattern.mine.facts.replaced)
    return None


def _consider_states(pattern: Pattern, diagnosis: Diagnosis) -> Diagnosis:
    """The same, or another where passes change parameters or what the task keeps: a state may have any effect."""
    quantity, kept = pattern.first.quantity, pattern.root.kept_by_task
    by_factor = bool(kept) and pattern.worst.step > 1 and diagnosis.is_factor
    is_open = quantity in _OF_PASSES and (diagnosis.is_neutral or by_factor)
    drifts = quantity == "outputs" and diagnosis.fault == FaultName.REPLICA_DRIFT
    if (is_open or drifts) and (why := pattern.root.changed_by_passes):
        return build_diagnosis(FaultName.FORWARD_CHANGES_PARAMETERS, why)
    late = pattern.root.late_buffers if pattern.worst.step > 1 and not pattern.is_resumed else []
    if is_open and late and not kept:
        agree = f"rows and weights of step {pattern.worst.step} agree"
        because = (
            f"{agree}; passes change {join_names(late, 3)}, so what reads it depends on how many there were before"
        )
        return replace(build_diagnosis(diagnosis.fault, because), remedy=_KEPT_REMEDY)
    if not kept:
        return diagnosis
    if is_open and pattern.is_resumed and not diagnosis.is_of_the_call:
        agree = f"rows and weights of step {pattern.worst.step} agree, and what is computed from them does not"
        diagnosis = build_diagnosis(FaultName.STATE_NOT_CARRIED, agree)
    elif by_factor and quantity == "loss":
        diagnosis = loss_rules.diagnose_neutrally(pattern)
    elif by_factor:
        diagnosis = build_diagnosis(FaultName.GRADIENTS_BY_LAYOUT, diagnosis.because.partition(":")[0])
    if diagnosis.fault == FaultName.STATE_NOT_CARRIED:
        return build_diagnosis(diagnosis.fault, f"{diagnosis.because}; passes change {kept}, which no checkpoint has")
    if is_open or diagnosis.fault == FaultName.UNUSED_PARAMETERS:
        because = f"{diagnosis.because}; passes change {kept}, of which each process has its own"
        return replace(diagnosis, because=because, remedy=_KEPT_REMEDY)
    return diagnosis


def _consider_way(pattern: Pattern, diagnosis: Diagnosis) -> Diagnosis:
    """The same, with what the user has put between loss and update, where it lies there."""
    if diagnosis.fault != FaultName.GRADIENTS_BY_LAYOUT or not pattern.root.on_the_way:
        return diagnosis
    return replace(diagnosis, because=f"{diagnosis.because}; on the way are {join_names(pattern.root.on_the_way, 3)}")


def _consider_second_start(pattern: Pattern, diagnosis: Diagnosis) -> Diagnosis:
    """The same, or another where the first start was right and a second one is not."""
    starts, step, quantity = pattern.starts, pattern.worst.step, pattern.first.quantity
    is_known = diagnosis.fault == FaultName.FORWARD_CHANGES_PARAMETERS or (
        pattern.root.kept_by_task and diagnosis.fault == FaultName.STATE_NOT_CARRIED
    )
    # What ranks of the uninterrupted run show, too, is no matter of a resume.
    is_older = quantity == "buffers" and bool(pattern.reference_step.buffers)
    if len(starts) < 2 or step <= starts[1] or is_known or is_older or diagnosis.is_of_the_call:
        return diagnosis
    agree = f"all steps up to {starts[1]}, after the first resume too, agree"
    if quantity in _OF_PASSES:  # an average that was lost may equal its beginning for a step
        late = "either the second start lost it, or the first one, whose loss shows a step late"
        return replace(diagnosis, because=f"{diagnosis.because}; {agree}: {late}")
    because = f"{agree}; step {step}, after the second, does not; by itself it would be '{diagnosis.fault}'"
    return build_diagnosis(FaultName.SECOND_RESUME, because)


def diagnose_error(called: str, text: str = "") -> Diagnosis:
    """What the error means that ended a run.

    Args:
        called: the name of its fault, where the error has one.
        text: of the error; some of torch's and gloo's are known.
    """
    if called in REMEDIES:
        return build_diagnosis(FaultName(called), "the error says so")
    for words, fault in _ERRORS.items():
        if words.lower() in text.lower():
            found = build_diagnosis(fault, f"the error says '{words}'")
            return replace(found, remedy=_OF_STATIC_GRAPH) if words == _STATIC_GRAPH else found
    return build_diagnosis(FaultName.ERROR, "the error says so")


_STATIC_GRAPH = "not compatible with static_graph set to True"
_OF_STATIC_GRAPH = "leave out static_graph=True of DDP: which parameters a pass uses changes from step to step"
_ERRORS = {  # of torch and gloo, by what is always in them
    _STATIC_GRAPH: FaultName.UNUSED_PARAMETERS,
    "Expected to have finished reduction": FaultName.UNUSED_PARAMETERS,
    "Connection closed by peer": FaultName.DEADLOCK,
    "Connection reset by peer": FaultName.DEADLOCK,
    "Timed out waiting": FaultName.DEADLOCK,
    "Watchdog caught collective operation timeout": FaultName.DEADLOCK,
    "Detected mismatch between collectives": FaultName.DIFFERENT_COLLECTIVES,
}


# one rule per quantity: what it means that this is the first to differ ------------------------------------------------


def _diagnose_sample_ids(pattern: Pattern) -> Diagnosis:
    theirs_of_data = pattern.reference.facts.source_rows[:1]
    if theirs_of_data and (others := [n for n in pattern.mine.facts.source_rows if n != theirs_of_data[0]]):
        detail = f"data() has {others[0]} rows, and {theirs_of_data[0]} on one process"
        return build_diagnosis(FaultName.SAMPLES_BY_PROCESS, detail)
    ours, theirs, number = pattern.mine.facts.steps, pattern.reference.facts.steps, pattern.number
    if number >= min(len(ours), len(theirs)):
        return build_diagnosis(
            FaultName.DROPPED_ROWS, f"{len(ours)} steps instead of {len(theirs)}: the last batch is not there"
        )
    m, r, at = ours[number], theirs[number], f"step {number + 1}"
    if m.has_equal_ranks:
        return build_diagnosis(FaultName.EQUAL_ROWS, f"{at}: all ranks computed rows {m.by_rank[0][:6]}")
    if len(m.rows) < len(r.rows):
        return build_diagnosis(FaultName.DROPPED_ROWS, f"{at} has {len(m.rows)} rows instead of {len(r.rows)}")
    if len(m.rows) > len(r.rows):
        more = sorted((Counter(m.rows) - Counter(r.rows)).elements())
        because = f"{at} computed {len(m.rows)} rows instead of {len(r.rows)}: rows {more[:6]} as well"
        return build_diagnosis(FaultName.REPEATED_ROWS, because)
    if (period := _find_period(pattern.mine)) and not _find_period(pattern.reference):
        return build_diagnosis(FaultName.SAME_ORDER_EVERY_EPOCH, f"the order of samples repeats after {period} rows")
    if number and m.rows in (ours[number - 1].rows, ours[0].rows):
        return build_diagnosis(FaultName.REPLAYED_DATA, f"{at} computed rows that earlier steps had computed already")
    if sorted(m.rows) == sorted(r.rows):
        return build_diagnosis(FaultName.ORDER_INSIDE_BATCH, "same rows, other places")
    return build_diagnosis(FaultName.ORDER_BY_WORLD_SIZE, f"{at} computed other rows")


def _find_period(trace: Trace) -> int | None:
    """After how many rows the order of samples begins again, if it does."""
    rows = [row for step in trace.facts.steps for row in step.rows]
    again = next((n for n, row in enumerate(rows) if n and row == rows[0]), None)
    return again if again and rows[again:] == rows[: len(rows) - again] else None


def _diagnose_samples(pattern: Pattern) -> Diagnosis:
    """Every rank has made the same first samples: by them, and by their generators, one sees who differs."""
    where = f"same rows, other samples in {pattern.worst.name}"
    if why := pattern.root.unstable_samples:
        return build_diagnosis(FaultName.SAMPLES_BY_CALL, why)
    ours, theirs = pattern.mine.facts.first_samples, pattern.reference.facts.first_samples
    if not ours or not theirs:
        return build_diagnosis(FaultName.SAMPLES_BY_PROCESS, where)
    if any([pair[1] for pair in rank] != [pair[1] for pair in theirs[0]] for rank in ours):
        detail = f"{where}: the generators that sample() is given begin elsewhere"
        return build_diagnosis(FaultName.AUGMENTATION_BY_RANK, detail)
    wrong = _find_wrong_ranks(pattern)
    if not wrong and pattern.number == 0 and "[0" in pattern.worst.name:  # its rows are those that every rank makes
        detail = (
            f"{where}, although every rank, asked alone, makes what one process makes: what was made before decides"
        )
        return build_diagnosis(FaultName.SAMPLES_BY_CALL, detail)
    if not wrong:
        detail = f"{where}; on one process they are the same when they are made again, and in another order"
        return build_diagnosis(FaultName.SAMPLES_BY_PROCESS, detail)
    if all(rank == ours[0] for rank in ours):
        detail = f"{where}: all ranks make the same of a row, with the same generator, and one process another"
    else:
        detail = f"{where}: of the same row, with the same generator, ranks {wrong} make what one process does not"
    return build_diagnosis(FaultName.SAMPLES_BY_PROCESS, detail)


def _find_wrong_ranks(pattern: Pattern) -> list[int]:
    """The ranks that make other samples of the first rows than one process, with the same generators."""
    ours, theirs = pattern.mine.facts.first_samples, pattern.reference.facts.first_samples
    pairs = [list(zip(rank, theirs[0], strict=False)) for rank in ours] if theirs else []
    return [n for n, rank in enumerate(pairs) if any(a[0] != b[0] and a[1] == b[1] for a, b in rank)]


def _diagnose_initial(pattern: Pattern) -> Diagnosis:
    a, b = (trace.tensors("initial parameters") for trace in (pattern.mine, pattern.reference))
    for name in sorted({*a} - {*b}):
        if not np.ptp(a[name]):
            continue  # ones or zeros, which two parameters begin with that were never one
        twin = next((n for n in b if n in a and np.array_equal(a[n], a[name])), None)
        if twin is not None:
            return build_diagnosis(FaultName.UNTIED_WEIGHTS, f"'{name}' is a copy of '{twin}' now")
    if pattern.mine.facts.initial_buffers:
        return build_diagnosis(FaultName.INITIALISATION_BY_RANK, f"buffer {pattern.mine.facts.initial_buffers[0]}")
    if a.keys() != b.keys():
        detail = f"on one side only: {', '.join(sorted({*a} ^ {*b})[:3])}"
        return build_diagnosis(FaultName.INITIALISATION_BY_LAYOUT, detail)
    return build_diagnosis(FaultName.INITIALISATION_BY_LAYOUT, f"'{pattern.worst.name}' begins with other values")


def _diagnose_outputs(pattern: Pattern) -> Diagnosis:
    if pattern.is_resumed:
        return build_diagnosis(FaultName.STATE_NOT_CARRIED, f"rows and weights of step {pattern.worst.step} agree")
    if pattern.failed("replicas"):
        return build_diagnosis(
            FaultName.REPLICA_DRIFT, "outputs differ, and replicas too: the weights of a rank changed"
        )
    if why := pattern.root.unstable_forward:
        return build_diagnosis(FaultName.FORWARD_BY_CALL, why)
    if detail := pattern.other_draws:
        return build_diagnosis(FaultName.RANDOMNESS_BY_RANK, f"rows and weights agree, outputs do not; {detail}")
    drew = ", although random numbers of a micro-batch have the same key" if pattern.mine.facts.random else ""
    by_rank = ""
    if ranks := pattern.ranks_by_outputs:
        by_rank = f"; those of ranks {ranks[0]} agree, and those of ranks {ranks[1]} do not: look for the rank in what "
        by_rank += "outputs() computes, and in seeds and draws of its own"
    because = f"rows and weights agree, outputs do not{drew}{by_rank}"
    return build_diagnosis(FaultName.FORWARD_BY_LAYOUT, because)


def _diagnose_lr(pattern: Pattern) -> Diagnosis:
    worst, rates = pattern.worst, pattern.step.lr
    if any(rank != rates[0] for rank in rates):
        return build_diagnosis(FaultName.RATE_BY_RANK, f"rank {worst.ranks[0]} has {worst.mine:.4g}")
    detail = f"{worst.mine:.4g} instead of {worst.reference:.4g} in step {worst.step}"
    if pattern.is_resumed:
        return build_diagnosis(FaultName.STATE_NOT_CARRIED, detail)
    if worst.name.startswith("'"):  # a parameter
        because = f"{worst.name} has {detail}: its optimizer holds it in another group of parameters"
        return replace(build_diagnosis(FaultName.RATE_BY_WORLD_SIZE, because), remedy=OF_GROUPS)
    size = pattern.world_size
    ours, theirs = (
        [step.lr[0] for step in trace.facts.steps if step.lr] for trace in (pattern.mine, pattern.reference)
    )
    groups = range(min(map(len, (*ours, *theirs))))
    known = [pair for k, pair in enumerate(zip(ours, theirs, strict=False)) if size * k < len(theirs)]
    moved = any(not predictions.is_equal(mine[g], true[g]) for mine, true in known for g in groups)
    if moved and all(stepped_per_process([r[g] for r in ours], [r[g] for r in theirs], size) for g in groups):
        because = f"{detail}: the rate of update k is that of update {size} * k on one process"
        return build_diagnosis(FaultName.SCHEDULE_PER_PROCESS, because)
    begins = "; a schedule that is stepped too often agrees at step 1" if worst.step == 1 else ""
    return build_diagnosis(FaultName.RATE_BY_WORLD_SIZE, detail + begins)


def _diagnose_replicas(pattern: Pattern) -> Diagnosis:
    if average := pattern.step.average_apart:
        return build_diagnosis(FaultName.EMA_DRIFT, f"{average}, and their weights are")
    apart = pattern.step.replicas
    because = f"what rank 0 has is that of one process, and others differ{f': {apart[0]}' if apart else ''}"
    if counted := next((said for said in apart if said.startswith("'optimizer/") and "/step' " in said), ""):
        because += (
            f"; {counted}: a rank has not restored the optimizer's state, has begun it anew, or left out an update"
        )
    return build_diagnosis(FaultName.REPLICA_DRIFT, because)


def _diagnose_buffers(pattern: Pattern) -> Diagnosis:
    if apart := pattern.step.buffers:
        detail = f"parameters agree, and buffer {apart[0]}"
        if all(any(said.startswith(f"'{name}'") for name in pattern.root.rowless_buffers) for said in apart):
            detail += "; on one process a pass does not change it by its rows: look for ranks, draws, calls and clocks"
            return build_diagnosis(FaultName.BUFFERS_BY_LAYOUT, detail)
        return build_diagnosis(FaultName.LOCAL_BUFFERS, detail)
    checked = [c.mark for c in pattern.compared if c.quantity == EQUAL_BUFFERS]  # of a script; a task's always are
    alike = "" if pattern.mine.facts.optimizer and checked != ["PASS"] else "is the same on all ranks and "
    detail = f"buffer '{pattern.worst.name}' {alike or 'is '}not that of one process, parameters agree"
    return build_diagnosis(FaultName.BUFFERS_BY_LAYOUT, detail)


def _diagnose_average(pattern: Pattern) -> Diagnosis:
    detail = f"the average of '{pattern.worst.name}' differs, parameters agree{_describe_average(pattern)}"
    return build_diagnosis(FaultName.EMA_LOST if pattern.is_resumed else FaultName.EMA_DRIFT, detail)


def _describe_average(pattern: Pattern) -> str:
    """How often the average was updated, where its decay says it."""
    name, number = pattern.worst.name, pattern.number
    decays = []
    for trace in (pattern.mine, pattern.reference):
        before = trace.tensors("EMA", number - 1) if number else trace.tensors("initial parameters")
        kept, new, now = before.get(name), trace.tensors("EMA", number).get(name), trace.tensors("parameters", number)
        if kept is None or new is None or name not in now or kept.shape != new.shape:
            return ""
        decays.append(predictions.common_factor({"": new - now[name]}, {"": kept - now[name]}, 1e-6))
    mine, reference = decays
    if mine is None or reference is None or not 0 < reference < 1:
        return ""
    if predictions.is_equal(mine, 1.0, 1e-6):
        return "; it was not updated"
    times = math.log(mine) / math.log(reference) if 0 < mine < 1 else math.nan
    whole = math.isfinite(times) and abs(times - round(times)) < 1e-3
    return (
        f"; it was updated {round(times)} times" if whole else f"; its decay was {mine:.4g} instead of {reference:.4g}"
    )


_RULES: dict[str, Callable[[Pattern], Diagnosis]] = {
    "initial parameters": _diagnose_initial,
    "sample ids": _diagnose_sample_ids,
    "samples": _diagnose_samples,
    "outputs": _diagnose_outputs,
    "loss": loss_rules.diagnose_loss,
    ADDED: loss_rules.diagnose_later,
    "raw gradients": gradient_rules.diagnose_gradients,
    "gradient norm": clipping_rules.diagnose_norm,
    "clipped gradients": clipping_rules.diagnose_clipped,
    "learning rate": _diagnose_lr,
    "update": update_rules.diagnose_update,
    "optimizer state": update_rules.diagnose_update,
    "parameters": update_rules.diagnose_parameters,
    "replicas": _diagnose_replicas,
    "buffers": _diagnose_buffers,
    "EMA": _diagnose_average,
    "metrics": report_rules.diagnose_metrics,
    "evaluation": report_rules.diagnose_evaluation,
    "evaluation repeats": report_rules.diagnose_repeated_evaluation,
}

# What passes make: a neutral name of it is followed by what they leave behind.
_OF_PASSES = ("outputs", "loss", "raw gradients", "gradient norm", "clipped gradients", "evaluation")

_AFTER_THE_GRADIENT = (
    "raw gradients", "gradient norm", "clipped gradients", "optimizer state", "parameters", "EMA", "evaluation",
)  # fmt: skip

# By what the facts of the run on one process may tell: the fault, and what it makes differ, whatever else is right.
_SEEN_ALONE = {
    # Rounding was measured with that loss, too.
    "unstable_loss": (FaultName.LOSS_BY_CALL, (*_AFTER_THE_GRADIENT, "evaluation repeats")),
    "unstable_gradient": (FaultName.GRADIENTS_BY_CALL, _AFTER_THE_GRADIENT),
    "changed_by_passes": (
        FaultName.FORWARD_CHANGES_PARAMETERS,
        (
            "the forward pass repeats", "the loss repeats", "initial parameters", "update", "parameters", "replicas",
            "frozen parameters did not move", "evaluation leaves things as they were",
        ),
    ),
}  # fmt: skip

_INVARIANTS = {
    "the loss moved": FaultName.NOTHING_LEARNT,
    GRADIENT: FaultName.NO_GRADIENT,
    "steps begin without gradients": FaultName.GRADIENTS_NOT_CLEARED,
    INITIALISED: FaultName.NEVER_INITIALISED,
    "the model is built alike": FaultName.INITIALISATION_BY_CALL,
    "samples repeat": FaultName.SAMPLES_BY_CALL,
    "the forward pass repeats": FaultName.FORWARD_BY_CALL,
    "the loss repeats": FaultName.LOSS_BY_CALL,
    "the gradient repeats": FaultName.GRADIENTS_BY_CALL,
    "evaluation leaves things as they were": FaultName.EVALUATION_CHANGES_TRAINING,
    NEIGHBOURS: FaultName.ROW_BY_NEIGHBOURS,
    DOCUMENTS: FaultName.DOCUMENTS_NOT_SEPARATE,
    PADDING: FaultName.PADDING_IN_LOSS,
    COLLATED: FaultName.SAMPLE_BY_NEIGHBOURS,
    SWITCHED: FaultName.EVALUATION_BY_LAYOUT,
    "rows keep their places": FaultName.MIXED_ROWS,
    "ranks computed different rows": FaultName.EQUAL_ROWS,
    "trained parameters moved": FaultName.PARAMETERS_NOT_TRAINED,
    "frozen parameters did not move": FaultName.FROZEN_PARAMETER_TRAINED,
}
