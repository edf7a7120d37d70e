"""All probes of a task, and where their results stand."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from unisono.data.loading.batch_builder import BatchBuilder
from unisono.data.order.plan import Plan, SampleIndices
from unisono.evaluation.held_out import HeldOut
from unisono.proof.probes.loss_probe import probe_loss
from unisono.proof.probes.model_probe import (
    find_remembered_by_evaluation,
    find_rowless_buffers,
    find_switched,
    probe_evaluation,
)
from unisono.proof.probes.neighbour_probe import probe_neighbours
from unisono.proof.probes.report_probe import find_unsummed
from unisono.proof.probes.row_probe import probe_documents
from unisono.proof.probes.sample_probe import probe_samples
from unisono.proof.probes.trial import Trial
from unisono.proof.recording.trace import RunFacts
from unisono.runtime.errors import UnisonoError
from unisono.task import Source, Task

log = logging.getLogger(__name__)


def probe_task(
    facts: RunFacts,
    trial: Trial,
    fresh: Task,
    source: Source,
    plan: Plan,
    held_out: HeldOut | None,
    mask: bool = False,
) -> None:
    """Try the task's functions by themselves; one that cannot be tried so is left untried.

    Args:
        facts: to write what was found into.
        trial: of the first micro-batch.
        fresh: the task as it was before it made anything.
        source: its rows.
        plan: of the run.
        held_out: to evaluate on, if there are any.
        mask: leave samples out that cannot be made.
    """
    task, packed, changing = trial.task, plan.capacity is not None, trial
    if facts.carried:
        trial = trial.with_same_buffers()
    some = trial  # of which some rows are taken

    def indices() -> SampleIndices:
        return plan.samples(0, range(trial.micro.size))

    def build_samples() -> Sequence[Any]:
        return BatchBuilder(copy.copy(task), source, plan.seed, "train", mask=mask).pieces(indices())[1]

    def samples() -> None:
        try:
            facts.unstable_samples = probe_samples(fresh, source, plan.seed, indices(), mask, packed)
        except UnisonoError:  # it needs what data() has left in it
            facts.unstable_samples = probe_samples(task, source, plan.seed, indices(), mask, packed)

    def cutting() -> None:
        nonlocal some
        if not packed:
            some = trial.with_samples(build_samples())

    def evaluation() -> None:
        if held_out is not None and not task.draws_in_evaluation:
            held = next(one for batches in held_out.batches() for one in batches if not one.idle)
            # First, since one evaluation may be what decides all later passes.
            facts.evaluation_remembered = find_remembered_by_evaluation(trial, held)
            facts.evaluation_draws = probe_evaluation(trial, held)
            facts.evaluation_switched = find_switched(trial, held)
            if not facts.evaluation_draws:
                facts.unsummed_evaluated = find_unsummed(replace(trial, micro=held), training=False)

    def buffers() -> None:
        with changing.undone():
            facts.rowless_buffers = find_rowless_buffers(changing)

    def loss() -> None:
        probe_loss(facts, some)

    def reports() -> None:
        if not packed:
            facts.unsummed = find_unsummed(some)

    def neighbours() -> None:
        if packed or facts.unstable_loss or facts.unstable_samples or trial.draws():
            return
        probe_neighbours(facts, trial, build_samples())

    def documents() -> None:
        if plan.capacity is not None:
            made = BatchBuilder(copy.copy(task), source, plan.seed, "train", mask=mask, capacity=plan.capacity)
            probe_documents(facts, trial, plan.capacity, made.pieces(indices())[1])

    facts.probed = True
    try_probe(samples)
    if not facts.unrepeatable:
        try_probe(evaluation)
        try_probe(documents)
        try_probe(buffers)
        if not facts.neighbours:
            try_probe(cutting)
            try_probe(loss)
            try_probe(reports)
            try_probe(neighbours)


def try_probe(probe: Callable[[], Any], of_what: str = "") -> None:
    """Try something of a task; code of the user that raises is left untried."""
    try:
        probe()
    except Exception as error:
        log.debug("%s could not be tried by themselves: %s", of_what or probe.__name__, error)
