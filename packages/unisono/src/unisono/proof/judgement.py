"""What the traces of a proof show: a verdict for every case against the one that it must equal, and for references."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from unisono.launch.processes import local_processes
from unisono.proof import comparison, engines, invariants
from unisono.proof.cases import EPSILON, Case
from unisono.proof.diagnoses import diagnosis, predictions
from unisono.proof.recording.trace import QUANTITIES, RunFacts, Trace
from unisono.proof.user_errors import describe_makers
from unisono.proof.verdict import ON_EVERY_LAYOUT, Verdict
from unisono.runtime.errors import ConfigError, KernelError
from unisono.runtime.text import join_names

# Of fp64, and of fp32 where it is a step of the ladder: how far sums in another order are from each other.
FLOOR = {"fp64": 1e-12, "fp32": 1e-5}
# In the last place, relative.
_UNIT = {"float16": 2.0 ** (1 - predictions.LOWER["fp16"]), "bfloat16": 2.0 ** (1 - predictions.LOWER["bf16"])}


def judge_cases(
    every: list[Case],
    traces: Mapping[str, Trace],
    adaptive: bool,
    ended: Mapping[str, local_processes.WorkerError] | None = None,
    recipe: str = "",
) -> tuple[list[Verdict], list[Verdict]]:
    """Compare every case with its reference; returns the verdicts, and those of references alone.

    Args:
        every: the cases.
        traces: of those that were run to their end, by name.
        adaptive: whether the optimizer divides by the size of gradients.
        ended: by the name of the case that was under way, the error that ended its processes.
        recipe: that a case on another engine is of.
    """
    verdicts: list[Verdict] = []
    alone: list[Verdict] = []
    proof = _Proof(every, traces, adaptive, ended or {}, recipe)
    for case in every:
        failed = {v.case for v in (*verdicts, *alone) if v.mark == "FAIL"}
        if case.reference and case.name in traces and (why := _fails_already(case, every, failed)):
            verdicts.append(Verdict(case.name, case.reference, case.bitwise, [_abstain(why)]))
        elif case.reference:
            verdicts.append(_judge_case(case, proof))
        elif case.name not in traces:
            alone.append(_not_run_verdict(case, proof))
        elif not case.perturbed:
            alone.append(_judge_reference(case, traces[case.name]))
    for one in (*verdicts, *alone):
        one.place = _find_place(one, proof)
    for one in alone:
        if one.case in traces and (why := _find_untried_layouts(one.case, every, verdicts)):
            one.compared.append(comparison.ComparedQuantity(ON_EVERY_LAYOUT, "ABSTAIN", why=why))
    return verdicts, alone


def _find_place(verdict: Verdict, proof: _Proof) -> str:
    """The functions of the user that make what differs first; empty where the diagnosis has a line already."""
    known = verdict.diagnosis.because if verdict.diagnosis else ""
    root = _root_reference(next(one for one in proof.every if one.name == verdict.case), proof.every)
    if verdict.first is None or root.name not in proof.traces or ".py:" in known or ", line " in known:
        return ""
    facts, quantity = proof.traces[root.name].facts, verdict.first.quantity
    # The first pass of all, before the first step, may have changed what build() has made.
    is_changed = quantity == "initial parameters" and facts.changed_by_passes
    return describe_makers("outputs" if is_changed else quantity, facts.places)


def _find_untried_layouts(root: str, every: list[Case], verdicts: list[Verdict]) -> str:
    """Why a layout is not proved of which no gradient was compared with one process, where others were left out.

    Where passes read buffers that they change, a run on one process may have neither the same micro-batches nor as many
    passes; then other executions of a layout agree with each other alone.
    """
    marks = {one.case: one.mark for one in verdicts}
    tried: dict[str, set[str]] = {}
    excused: dict[str, str] = {}
    for case in every:
        if case.reference != root or not case.whole or case.bitwise or case.starts or case.perturbed:
            continue
        name = case.name.partition(" ")[0]
        tried.setdefault(name, set()).add(marks.get(case.name, "ABSTAIN"))
        (one,) = (v for v in verdicts if v.case == case.name)
        for compared in one.abstained:
            if compared.quantity == "raw gradients":
                excused[name] = compared.why
    left = [name for name, found in tried.items() if found == {"ABSTAIN"} and name in excused]
    return f"no comparison of {join_names(left)} with one process could fail: {excused[left[0]]}" if left else ""


def _fails_already(case: Case, every: list[Case], failed: set[str]) -> str:
    """Why a case that begins with another's checkpoint says nothing of it, empty if it may."""
    if not case.starts_from:
        return ""
    if case.starts_from in failed:
        return f"it continues from {case.starts_from}, which failed"
    anew = replace(case, starts_from="", starts_after=0)
    plain = next((one.name for one in every if one == replace(anew, name=one.name, saves=one.saves)), "")
    return f"{plain}, which begins anew, failed too" if plain in failed else ""


@dataclass
class _Proof:
    """The runs of a proof, as `judge_cases` is given them; what several cases are judged by is found once."""

    every: list[Case]
    traces: Mapping[str, Trace]
    adaptive: bool
    ended: Mapping[str, local_processes.WorkerError]
    recipe: str
    _tolerances: dict[tuple[str, str], dict[str, float]] = field(init=False, default_factory=dict)
    _failed: dict[str, set[str]] = field(init=False, default_factory=dict)

    def first(self, case: Case) -> Trace:
        """Of the run on one process that a case is compared with in the end, and that was looked at most closely."""
        return self.traces[_root_reference(case, self.every).name]

    def tolerance(self, case: Case) -> dict[str, float]:
        """See `measure_tolerance`; the same for all cases of a precision that are compared with one run in the end."""
        key = case.precision, _root_reference(case, self.every).name
        if key not in self._tolerances:
            self._tolerances[key] = measure_tolerance(case, self.every, self.traces, self.adaptive)
        return self._tolerances[key]

    def failed_invariants(self, name: str) -> set[str]:
        """What the run of a case fails on by itself."""
        if name not in self._failed:
            found = invariants.check_invariants(self.traces[name])
            self._failed[name] = {one.quantity for one in found if one.mark == "FAIL"}
        return self._failed[name]


def _abstain(why: str) -> comparison.ComparedQuantity:
    return comparison.ComparedQuantity("the run", "ABSTAIN", why=why)


def _judge_case(case: Case, proof: _Proof) -> Verdict:
    known = case.name in proof.traces and case.reference in proof.traces and case.name not in proof.ended
    if not known or proof.traces[case.reference].facts.fault:
        return _not_run_verdict(case, proof)
    mine, reference, first = proof.traces[case.name], proof.traces[case.reference], proof.first(case)
    found = Verdict(case.name, case.reference, case.bitwise)
    if why := reason_to_abstain(case, mine, reference, first):
        found.compared = [_abstain(why)]
        if mine.facts.unstable_forward and not first.facts.unrepeatable:  # which the reference did not show, by chance
            found.invariants = [c for c in invariants.check_invariants(mine) if c.quantity in invariants.REPEATED]
            found.diagnosis = diagnosis.diagnose(mine, mine, found.invariants, 1)
        return found
    found.fault = mine.facts.fault
    if not found.fault:
        found.invariants = invariants.check_invariants(mine)
        if case.weights_from:
            rounding = engines.measure_rounding(case, proof.every, proof.traces)
            found.compared = engines.compared(mine, reference, proof.recipe, rounding)
        else:
            # What the reference fails on by itself is reported of the reference.
            failed = proof.failed_invariants(case.reference)
            has_none = any(c.quantity == invariants.GRADIENT and c.mark == "FAIL" for c in found.invariants)
            found.compared = _compare(case, proof, has_none and invariants.GRADIENT in failed)
            found.invariants = [c for c in found.invariants if c.quantity not in failed]
    compared = [*found.compared, *found.invariants]
    found.diagnosis = diagnosis.diagnose(mine, reference, compared, case.world_size, case.starts, first)
    return found


def _compare(case: Case, proof: _Proof, without_gradients: bool) -> list[comparison.ComparedQuantity]:
    """Hold a case against its reference; nothing is said of two runs in which nothing moves.

    Args:
        case: that was run, as its reference was.
        proof: with their traces.
        without_gradients: whether neither has a gradient.
    """
    mine, reference, first = proof.traces[case.name], proof.traces[case.reference], proof.first(case)
    if without_gradients:
        return [_abstain(f"neither it nor {case.reference} has a gradient: nothing moves that may differ")]
    if not case.bitwise and _vanishes(reference, first) and _vanishes(mine, first):
        why = f"its gradient and that of {case.reference} are rounding alone: nothing moves that may differ"
        return [_abstain(why)]
    allowed = dict.fromkeys(QUANTITIES, 0.0) if case.bitwise else proof.tolerance(case)
    compared = comparison.compare_traces(mine, reference, allowed, proof.adaptive and not case.bitwise)
    compared = [_excuse_rounding(one, case, first) for one in compared]
    why = _excuse(case, mine, reference, first)
    return [_excuse_difference(one, why) for one in compared] if why else compared


def _vanishes(trace: Trace, first: Trace) -> bool:
    """Whether its gradients are zero but for rounding, beside those of the run that all others are compared with."""
    norms, others = ([s.grad_norm or 0.0 for s in one.facts.steps if s.computed] for one in (trace, first))
    return bool(norms) and max(norms) < 1e-12 * max(others, default=0.0)


# What follows from a forward pass.
_OF_PASSES = frozenset(QUANTITIES) - {
    "initial parameters", "sample ids", "samples", "learning rate", "update", "replicas"
}  # fmt: skip


def _excuse(case: Case, mine: Trace, reference: Trace, first: Trace) -> str:
    """Why a difference of passes says nothing, where one process computes at once what several compute in parts."""
    if not case.whole or case.bitwise or not _is_cut_otherwise(mine, reference):
        return ""
    carried = join_names(first.facts.carried)
    if first.facts.carried and first.facts.neighbours:
        return (
            "what the model computes for a row depends on the rows beside it, and it reads buffers that it changes "
            f"({carried}): no run on one process has the same rows together and as many passes"
        )
    if mine.facts.random:
        why = f"it reads buffers that it changes ({carried})" if carried else "batch statistics are those of all rows"
        return (
            f"a pass draws random numbers, which belong to the micro-batch, and {why}: no run on one process "
            "has the same micro-batches and as many passes"
        )
    return ""


def _excuse_rounding(one: comparison.ComparedQuantity, case: Case, first: Trace) -> comparison.ComparedQuantity:
    """A difference of an evaluation that rounding inside may come to: it is measured in training passes alone."""
    used = {entry.rpartition(": ")[2] for entry in first.facts.lower}
    types = [name for name in _UNIT if name in used]
    if one.mark != "FAIL" or one.quantity not in ("metrics", "evaluation") or case.precision == "fp64" or not types:
        return one
    if one.worst.size > 64 * max(_UNIT[name] for name in types):
        return one
    why = (
        f"'{one.worst.name}' differs by {one.worst.size:.1g}, which rounding may come to: the run computes partly in "
        f"{' and '.join(types)} ({join_names(first.facts.lower)})"
    )
    return replace(one, mark="ABSTAIN", why=why)


def _excuse_difference(one: comparison.ComparedQuantity, why: str) -> comparison.ComparedQuantity:
    """What agrees is shown all the same, and buffers that ranks have with other bits are a fault in any case."""
    by_rank = one.quantity == "buffers" and one.worst.mine is None and one.worst.reference is None
    if one.mark != "FAIL" or one.quantity not in _OF_PASSES or by_rank:
        return one
    return replace(one, mark="ABSTAIN", why=why)


def _root_reference(case: Case, every: list[Case]) -> Case:
    """The run on one process that a case is compared with in the end, and that was looked at most closely."""
    by_name = {one.name: one for one in every}
    while case.reference:
        case = by_name[case.reference]
    return case


def reason_to_abstain(case: Case, mine: Trace, reference: Trace, first: Trace) -> str:
    """Why a run cannot be compared, empty if it can."""
    refused = mine.facts.fault.startswith(ConfigError.__name__) and not mine.facts.steps
    if refused and not mine.facts.called:  # of the layout: nothing was computed that could be wrong
        return mine.facts.fault
    for facts in (mine.facts, reference.facts, first.facts):
        if facts.unrepeatable:
            return f"it cannot be repeated: {facts.unrepeatable}"
    if case.attention and not first.facts.attention:
        return "the model uses none of torch's fused attention kernels, so there is no other kernel to compare with"
    if case.layout.get("strategy") == "dp" and (why := _dp_reason_to_abstain(mine, first)):
        return why
    if case.other_micro_batch and reference.facts.beside:
        return (
            "what the model computes for a row depends on some other rows of its micro-batch, not on all of them: "
            f"{reference.facts.beside}. Are rows mixed (roll, shift, reshape, mixup with a neighbour), is it made of a "
            "maximum or a minimum over rows, or do rows compete for places (experts with a capacity)? Different "
            "micro-batches are a different computation"
        )
    if case.other_micro_batch and reference.facts.neighbours:
        return (
            "what the model computes for a row depends on the other rows of its micro-batch (batch statistics, a "
            "maximum over rows, experts with a capacity, attention along the axis of the rows), so different "
            "micro-batches are a different computation"
        )
    if case.other_micro_batch and first.facts.accepted and (why := first.facts.padding or first.facts.collated):
        return f"{why}, so different micro-batches are a different computation"
    if first.facts.carried and not (case.whole or case.bitwise):
        return _carried_reason_to_abstain(case, first)
    if case.synchronised and first.facts.neighbours:
        return (
            "batch statistics are those of the rows that processes compute at the same time, and with several "
            "micro-batches per process no run on one process has these rows together (layout.sync_batch_norm)"
        )
    if case.other_micro_batch and mine.facts.random and not first.facts.reseeded:
        return "a pass draws random numbers, which belong to the micro-batch"
    return ""


def _carried_reason_to_abstain(case: Case, first: Trace) -> str:
    """Why a case says nothing of a model that reads buffers that it changes: passes are not as many on both sides."""
    said = (
        f"a forward pass reads buffers that it changes ({join_names(first.facts.carried)}), so that it begins with "
        "what the one before it left"
    )
    if case.other_micro_batch:
        return f"{said}: different micro-batches are a different computation"
    return f"{said}, and no run on one process makes as many passes as each of several does with several micro-batches"


def _is_cut_otherwise(mine: Trace, reference: Trace) -> bool:
    """Whether the rows of a step are in other micro-batches than those of the reference."""
    return any(len(a.samples) != len(b.samples) for a, b in zip(mine.facts.steps, reference.facts.steps, strict=False))


def _dp_reason_to_abstain(mine: Trace, first: Trace) -> str:
    """Why a run of one process on several devices cannot be compared, empty if it can."""
    if mine.facts.devices < 2:
        return "this host has fewer than two accelerators, so dp ran on one device, with nothing to split"
    if mine.facts.random or first.facts.random:
        return "a pass draws random numbers (dropout), and under dp every device draws for its own rows"
    if first.facts.carried:
        return f"under dp every device changes a copy of the buffers: {join_names(first.facts.carried)}"
    if first.facts.neighbours:
        return (
            "what the model computes for a row depends on the rows beside it (batch statistics, experts with a "
            "capacity), and under dp only those on the same device count"
        )
    return ""


def measure_tolerance(case: Case, every: list[Case], traces: Mapping[str, Trace], adaptive: bool) -> dict[str, float]:
    """How far a quantity may be from the reference.

    Rows, samples, initial parameters and learning rates are equal. For the rest it is measured: a run on one process
    whose initial weights, and whatever the model computes in lower precision inside, were changed in their last bit.
    What no model needs to stay below is the least that is allowed.
    """
    exact = {"sample ids": 0.0, "samples": 0.0, "initial parameters": 0.0, "learning rate": 0.0}
    floor = FLOOR.get(case.precision, 16 * EPSILON[case.precision])
    if case.precision != "fp64" and case.name in traces and (dtype := traces[case.name].facts.autocast) in _UNIT:
        floor = max(floor, 16 * _UNIT[dtype])
    result = {**dict.fromkeys(QUANTITIES, floor), **exact}
    first = _root_reference(case, every)
    perturbed = next((c for c in every if c.perturbed and c.precision == case.precision and c.name in traces), None)
    if perturbed and not traces[perturbed.name].facts.fault:
        pair = traces[perturbed.name], traces[first.name]
        infinite = dict.fromkeys(QUANTITIES, float("inf"))
        found = comparison.compare_traces(*pair, infinite, adaptive=False)
        if adaptive:  # what is left out of a comparison must not widen it: Lion and Adam-atan2 step as far by rounding
            (gradients,) = (c for c in found if c.quantity == "raw gradients")
            known = {**infinite, "raw gradients": max(floor, comparison.MARGIN * gradients.worst.size)}
            found = comparison.compare_traces(*pair, known, adaptive=True)
        same = all(not one.worst.size for one in found if one.quantity in ("sample ids", "samples"))
        for compared in found if same else ():  # else it is no rounding
            if compared.quantity not in exact:
                result[compared.quantity] = max(floor, comparison.MARGIN * compared.worst.size)
    # From equal gradients and equal state there is nothing to amplify.
    return {**result, "update": FLOOR["fp64" if case.precision == "fp64" else "fp32"]}


def _not_run_verdict(case: Case, proof: _Proof) -> Verdict:
    """Of a case that says nothing: its reference failed, or its processes ended, in it or in one before."""
    found = Verdict(case.name, case.reference, case.bitwise)
    reference = proof.traces.get(case.reference)
    if case.name in proof.ended:
        error = proof.ended[case.name]
        found.fault, found.diagnosis = str(error), diagnosis.diagnose_error(error.fault, str(error))
        return found
    if reference is not None and reference.facts.fault:
        why = f"{case.reference} could not be run: {reference.facts.fault}"
    elif case.reference and reference is None:
        why = f"{case.reference} was not run"
    else:
        why = "the processes ended before it"
    found.compared = [_abstain(why)]
    return found


def _judge_reference(case: Case, trace: Trace) -> Verdict:
    found = Verdict(case.name, "", False)
    if lacks_kernel(trace):
        found.compared = [
            comparison.ComparedQuantity("the run", "ABSTAIN", why=f"no {case.precision} kernel: {trace.facts.fault}")
        ]
        return found
    if trace.facts.unrepeatable:
        why = f"it cannot be repeated: {trace.facts.unrepeatable}"
        found.compared = [_abstain(why)]
        found.invariants = [c for c in invariants.check_invariants(trace) if c.quantity in invariants.REPEATED]
        found.diagnosis = diagnosis.diagnose(trace, trace, found.invariants, 1)
        return found
    found.fault = trace.facts.fault
    if not found.fault:
        found.invariants = invariants.check_invariants(trace)
    if case.engine:  # which is compared with another on the same micro-batches
        found.invariants = [c for c in found.invariants if c.quantity not in invariants.BY_NEIGHBOURS]
    if trace.facts.kernels:
        found.notes.append(f"kernels: {', '.join(f'{name} {how}' for name, how in trace.facts.kernels.items())}")
    if "neighbours" in trace.facts.accepted and (said := _describe_neighbours(trace.facts)):
        found.notes.append(f"accepted (accept=[neighbours]): {said}")
    if trace.facts.carried:
        found.notes.append(
            f"a forward pass reads buffers that it changes ({join_names(trace.facts.carried)}), so every process makes "
            "one micro-batch, and one process the whole global batch in one"
        )
    found.notes += [
        f"{' and '.join(names)} are several parameters in the same memory, so that the optimizer changes it several "
        "times per update, and sharding parts them; tie weights by assigning the parameter itself"
        for names in trace.facts.overlapping
    ]
    if zeros := _describe_zeros(trace.facts):
        found.notes.append(zeros)
    if trace.facts.overwritten:
        found.notes.append(f"outputs() or loss() changes '{trace.facts.overwritten}' of its batch in place")
    if trace.facts.lower:
        found.notes.append(
            f"computes partly in a lower precision, whose rounding was measured: {join_names(trace.facts.lower)}"
        )
    found.diagnosis = diagnosis.diagnose(trace, trace, found.invariants, 1)
    return found


def _describe_neighbours(facts: RunFacts) -> str:
    """How rows depend on their neighbours, empty if they do not."""
    normalised = f"{facts.normalised} normalises by the statistics of a micro-batch" if facts.normalised else ""
    return "; ".join(filter(None, [normalised, facts.dependent, facts.packed, facts.padding, facts.collated]))


def _describe_zeros(facts: RunFacts) -> str:
    """Which numbers are 0 all the time: they agree on every layout, whatever is wrong with them."""
    steps = [step for step in facts.steps if step.computed]
    numbers: dict[str, list[dict[str, float]]] = {
        "loss term": [step.terms for step in steps],
        "metric": [values for step in steps for values in step.metrics],
        "evaluated": facts.evaluation,
    }
    zeros = [
        f"{kind} '{name}'"
        for kind, values in numbers.items()
        for name in dict.fromkeys(name for each in values for name in each)
        if all(each.get(name, 0.0) == 0 for each in values)
    ]
    return f"0 in every step, so that nothing can differ there: {join_names(zeros)}" if zeros else ""


def lacks_kernel(trace: Trace) -> bool:
    """Whether torch has no kernel of an operation for a dtype, or the task none that it was asked for."""
    return "not implemented for" in trace.facts.fault or trace.facts.fault.startswith(KernelError.__name__)
