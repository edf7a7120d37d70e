"""What a run on two processes shows by itself, and what it is called when it is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from packages.unisono.tests.proof.script_traces import OWN, build_step, combine, write_script_trace
from unisono.proof.recording.trace import Array, write_tensors
from unisono.proof.scripts.judging import script_remedies, self_check
from unisono.proof.scripts.recording.rank_facts import RankFacts, ScriptTrace, buffers_moment, reduced_moment
from unisono.runtime.fault_names import FaultName

SAME = [OWN[0]] * 2
MEAN = combine(0.5, 0.5)


def write_trace(
    folder: Path,
    *steps: list[RankFacts],
    reduced: Sequence[dict[str, Array]] = (MEAN, MEAN),
    replicas: str | None = None,
    rates: Sequence[float] = (0.1, 0.1),
) -> ScriptTrace:
    """Steps of two processes, all with the same gradients, which are equal before the reduction if it gives `SAME`.

    Args:
        folder: to write to.
        steps: what each rank saw; if nothing is said, one step.
        reduced: gradients of each rank after the reduction.
        replicas: the parameter or state that differs after the update; by default `a` where gradients do.
        rates: of each rank.
    """
    steps = steps or (build_ranks(),)
    apart = any(not np.array_equal(value, reduced[1].get(name)) for name, value in reduced[0].items())
    differing = [replicas] if replicas else ["a"] * (apart and replicas is None)
    for number, ranks in enumerate(steps):
        for rank, (own, after) in enumerate(zip(SAME if reduced is SAME else OWN, reduced, strict=True)):
            passes = {f"0/{name}": value for name, value in own.items()}
            write_tensors(folder, f"local gradients {rank}", number, passes)
            write_tensors(folder, reduced_moment(rank), number, after)
            values = {name: np.array([float(digest)]) for name, digest in ranks[rank].buffers.items()}
            write_tensors(folder, buffers_moment(rank), number, values)
    facts = build_step(
        [[], []],
        lr=[[rate] for rate in rates],
        replicas=[f"'{name}' is not the same on ranks [0] and [1]" for name in differing],
    )
    return write_script_trace(folder, steps, [facts] * len(steps))


def build_ranks(change: Callable[[RankFacts], None] = lambda rank: None) -> list[RankFacts]:
    """Two processes; the second is changed."""
    ranks = [
        RankFacts([loss], [row, f"{row}2"], "x", {"a": 1}, {"n": 3}, {"a": 5}) for loss, row in ((1.0, "r"), (4.0, "s"))
    ]
    change(ranks[1])
    return ranks


def build_ranks_that_begin(*digests: int) -> list[RankFacts]:
    """Two processes whose parameters have these digests when the update begins."""
    return [replace(rank, begun={"a": digest}) for rank, digest in zip(build_ranks(), digests, strict=True)]


def give_the_same_rows(rank: RankFacts) -> None:
    rank.inputs[:] = ["r", "r2"]


def find_failed(trace: ScriptTrace) -> tuple[list[str], str]:
    check = self_check.check_run(trace)
    return [c.quantity for c in check.found if c.mark == "FAIL"], check.diagnosis.fault if check.diagnosis else ""


@pytest.mark.parametrize(("other", "failed"), [(0.7, True), (0.5 + 1e-13, False), (None, False), (math.nan, True)])
def test_a_scheduler_that_watches_a_number_of_its_rank_is_told_before_it_changes_a_rate(
    tmp_path: Path, other: float | None, failed: bool
) -> None:
    """As `val_loss` of Lightning without sync_dist; a rank that is given none decides nothing."""
    ranks = build_ranks(lambda rank: rank.watched.extend([] if other is None else [other]))
    ranks[0].watched = [0.5]
    found, name = find_failed(write_trace(tmp_path, build_ranks(), ranks))
    assert (found, name) == (([self_check.WATCHED], FaultName.RATE_BY_RANK) if failed else ([], ""))


def test_a_correct_run_passes_and_its_loss_is_that_of_the_reduction(tmp_path: Path) -> None:
    check = self_check.check_run(write_trace(tmp_path))
    assert {c.mark for c in check.found} == {"PASS"}
    assert len(check.found) == 6
    assert check.losses == [pytest.approx(2.5)]  # the mean of 1 and 4
    assert check.diagnosis is None


@pytest.mark.parametrize(("weights", "dropped"), [((0.5, 0.0), [1]), ((0.0, 0.0), [0, 1]), ((0.5, 0.5), [])])
def test_a_gradient_that_a_rank_throws_away_is_no_loss_of_0(
    tmp_path: Path, weights: tuple[float, float], dropped: list[int]
) -> None:
    check = self_check.check_run(write_trace(tmp_path, reduced=[combine(*weights)] * 2))
    assert check.dropped == {0: dropped}
    assert (check.losses == [None]) == bool(dropped)


def test_ranks_losses_are_averaged_by_their_rows(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, reduced=[combine(1, 1)] * 2)
    trace.facts.steps[0].by_rank = [[0, 1, 2], [3]]
    check = self_check.check_run(trace)
    assert (check.losses, check.averages) == ([pytest.approx(5.0)], [pytest.approx(1.75)])


ROUNDED = [own | {"c": np.full(3, 1e-18)} for own in OWN]  # a bias before a normalisation, say
PARTLY = [MEAN | {"b": rank["b"]} for rank in OWN]
CHANGED = [MEAN, MEAN | {"b": 0.75 * MEAN["b"]}]
SCALED = [MEAN, {name: 0.75 * value for name, value in MEAN.items()}]
UNSEEN = [MEAN | {"c": np.full(3, 1.0 + rank)} for rank in range(2)]


@pytest.mark.parametrize(
    ("reduced", "fault", "told"),
    [
        (OWN, "Gradients are not synchronised", "those of all parameters differ"),
        (ROUNDED, "Gradients are not synchronised", "those of all parameters differ"),
        (PARTLY, "Some parameters are not synchronised", "those of b differ"),
        (CHANGED, "The gradients depend on the layout", "no rank has its own"),
        (SCALED, "The gradients depend on the layout", "0.75 times those of rank 0"),
        (UNSEEN, "The gradients depend on the layout", "by itself could not be seen"),
    ],
    ids=["own", "rounded", "partly", "changed", "scaled", "unseen"],
)
def test_gradients_that_differ_after_the_reduction_are_told_by_what_they_are(
    tmp_path: Path, reduced: list[dict[str, Array]], fault: str, told: str
) -> None:
    trace = write_trace(tmp_path, reduced=reduced)
    assert find_failed(trace) == ([self_check.EQUAL], fault)
    check = self_check.check_run(trace)
    assert check.diagnosis is not None and told in check.diagnosis.because
    assert "no rank has its own" not in check.diagnosis.because or reduced is CHANGED
    assert check.losses == [None]  # no one function was minimised


@pytest.mark.parametrize(
    ("early", "sharded", "remedy"),
    [(False, False, ""), (True, False, script_remedies.STEP_LATER), (False, True, script_remedies.SHARD_THE_ROOT)],
)
def test_gradients_that_stay_on_their_rank_are_told_by_why(
    tmp_path: Path, early: bool, sharded: bool, remedy: str
) -> None:
    trace = write_trace(tmp_path, build_ranks(lambda rank: setattr(rank, "early", early)), reduced=OWN)
    if sharded:  # every rank has a piece of another one
        write_tensors(trace.folder, "raw gradients", 0, {**OWN[0], "c": np.ones(3)})
    found = self_check.check_run(trace).diagnosis
    assert found is not None
    assert script_remedies.reword(found).remedy == remedy or not remedy
    assert ("fully_shard" in found.because, "inside of the backward" in found.because) == (sharded, early)
    assert (found.fault == "Some parameters are not synchronised") == sharded


@pytest.mark.parametrize(("replicas", "inside"), [("", self_check.INSIDE), ("optimizer/a/m", self_check.OWN_STATE)])
def test_gradients_that_an_optimizer_reduces_inside_of_its_step_are_not_seen(
    tmp_path: Path, replicas: str, inside: str
) -> None:
    """Its state may be of each rank's own gradients, which is no drift of parameters."""
    trace = write_trace(tmp_path, reduced=OWN, replicas=replicas)
    check = self_check.check_run(trace)
    assert (find_failed(trace), check.inside) == (([], ""), inside)
    assert self_check.EQUAL in {c.quantity for c in check.found if c.mark == "ABSTAIN"}


def test_gradients_that_differ_only_when_they_are_clipped_were_clipped_too_early(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, reduced=OWN)
    write_tensors(trace.folder, "clipped gradients", 0, MEAN)
    assert find_failed(trace) == ([self_check.CLIPPED], "Clipped before synchronisation")


def test_the_check_that_fails_in_the_earliest_step_gives_the_name(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, build_ranks(lambda rank: rank.buffers.update(n=4)), build_ranks())
    trace.facts.steps[1] = replace(trace.facts.steps[0], lr=[[0.1], [0.2]])
    check = self_check.check_run(trace)
    assert [c.quantity for c in check.found if c.mark == "FAIL"] == [self_check.RATES, self_check.BUFFERS]
    assert check.failed is not None and check.diagnosis is not None
    assert (check.failed.quantity, check.diagnosis.fault) == (self_check.BUFFERS, "Buffers are those of one process")


@pytest.mark.parametrize(
    ("change", "check", "fault"),
    [
        (lambda rank: rank.initial.update(a=6), self_check.BEGIN, "Initialisation depends on the rank"),
        (lambda rank: rank.buffers.update(n=4), self_check.BUFFERS, "Buffers are those of one process"),
        (give_the_same_rows, self_check.DIFFERENT, "Every rank reads the same rows"),
        (lambda rank: rank.evaluating.append("2"), self_check.MODES, "Evaluation changes the training"),
    ],
)
def test_what_differs_or_should_between_ranks_is_named(
    tmp_path: Path, change: Callable[[RankFacts], None], check: str, fault: str
) -> None:
    reduced = SAME if check == self_check.DIFFERENT else [MEAN, MEAN]
    assert find_failed(write_trace(tmp_path, build_ranks(change), reduced=reduced)) == ([check], fault)


def test_rates_that_differ_between_ranks_fail(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, rates=(0.1, 0.2))
    assert find_failed(trace) == ([self_check.RATES], "The learning rate differs between ranks")
    trace = write_trace(tmp_path)
    trace.facts.steps[0].lr = [[0.1, 0.2]] * 2
    trace.facts.steps[0].groups = [{"a": 0, "b": 1}, {"a": 0, "b": 0}]
    check = self_check.check_run(trace)
    assert check.failed is not None and "rank 1 holds b in another group" in check.failed.worst.name


def test_buffers_that_differ_by_rounding_are_equal(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, build_ranks(lambda rank: rank.buffers.update(n=4)))
    write_tensors(trace.folder, buffers_moment(1), 0, {"n": np.array([3 + 1e-15])})
    assert find_failed(trace) == ([], "")


def test_buffers_of_which_only_digests_are_known_differ_as_these_do(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, build_ranks(lambda rank: rank.buffers.update(n=4)))
    for rank in range(2):
        write_tensors(trace.folder, buffers_moment(rank), 0, {})
    assert find_failed(trace) == ([self_check.BUFFERS], "Buffers are those of one process")


def test_ranks_that_begin_an_update_of_equal_gradients_with_other_weights_have_drifted_apart(tmp_path: Path) -> None:
    """As a script does that changes the weights of one rank after the optimizer has sent them to all."""
    trace = write_trace(tmp_path, build_ranks(), build_ranks_that_begin(1, 2))
    assert find_failed(trace) == ([self_check.APART], "Replicas drift apart")


@pytest.mark.parametrize("sent", [True, False])
def test_parameters_that_their_owners_send_to_others_after_the_update_are_no_drift(tmp_path: Path, sent: bool) -> None:
    check = self_check.check_run(
        write_trace(tmp_path, build_ranks(), build_ranks_that_begin(1, 1 if sent else 2), replicas="a")
    )
    assert (check.inside == self_check.SENT) == sent
    assert {c.quantity for c in check.found if c.mark == "PASS"} >= {self_check.EQUAL, self_check.REDUCED}


def test_a_moving_average_that_ranks_have_not_alike_says_nothing_of_how_parameters_are_sent(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, build_ranks(), build_ranks_that_begin(1, 1), replicas="ema/a")
    assert self_check.check_run(trace).inside == ""


@pytest.mark.parametrize("together", [True, False])
def test_parameters_that_come_together_before_the_next_update_leave_the_question_open(
    tmp_path: Path, together: bool
) -> None:
    check = self_check.check_run(
        write_trace(tmp_path, build_ranks(), build_ranks_that_begin(1, 1 if together else 2), reduced=OWN)
    )
    assert check.inside == (self_check.TOGETHER if together else "")
    assert (self_check.EQUAL in {c.quantity for c in check.found if c.mark == "FAIL"}) == (not together)


def test_rows_that_all_ranks_share_in_some_steps_only_are_left_open(tmp_path: Path) -> None:
    """As the first updates are that search for a rate, all on the same rows."""
    apart = [
        replace(rank, inputs=inputs) for rank, inputs in zip(build_ranks(), (["t", "t2"], ["s", "s2"]), strict=True)
    ]
    check = self_check.check_run(write_trace(tmp_path, build_ranks(give_the_same_rows), apart, reduced=SAME))
    (left,) = [c for c in check.found if c.quantity == self_check.DIFFERENT]
    assert (left.mark, check.diagnosis) == ("ABSTAIN", None)
    assert "the same inputs in steps 1, and not in others" in left.why


@pytest.mark.parametrize("parted", [True, False])
def test_ranks_that_compute_a_row_together_are_given_the_same_rows(tmp_path: Path, parted: bool) -> None:
    """By pieces of parameters, or by hand: then gradients differ from the same inputs, and nothing is drawn."""
    ranks = [replace(rank, parted=parted) for rank in build_ranks(give_the_same_rows)]
    assert find_failed(write_trace(tmp_path, ranks)) == ([], "")


def test_gradients_that_the_script_changes_afterwards_leave_the_question_open(tmp_path: Path) -> None:
    check = self_check.check_run(write_trace(tmp_path, reduced=[{name: value + 1 for name, value in MEAN.items()}] * 2))
    assert [c.quantity for c in check.found if c.mark == "ABSTAIN"] == [self_check.REDUCED]
    assert check.reduction == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_gradients_that_are_not_finite_leave_the_question_open(tmp_path: Path, rank: int) -> None:
    trace = write_trace(tmp_path, reduced=[{"a": np.zeros((3, 4)), "b": np.zeros(4)}] * 2)
    broken = {"0/a": np.full((3, 4), np.nan), "0/b": OWN[rank]["b"]}
    write_tensors(trace.folder, f"local gradients {rank}", 0, broken)
    check = self_check.check_run(trace)
    (abstained,) = [c for c in check.found if c.mark != "PASS"]
    assert (abstained.quantity, abstained.mark) == (self_check.REDUCED, "ABSTAIN")
    assert abstained.why == "step 1: those of a are not all finite numbers"
    assert check.losses == [None]


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("apart", [False, True])
def test_gradients_that_are_not_finite_after_the_reduction_are_equal_to_none_and_hide_no_others(
    tmp_path: Path, value: float, apart: bool
) -> None:
    broken = MEAN | {"a": np.where(np.eye(3, 4), value, MEAN["a"])}
    trace = write_trace(tmp_path, reduced=[broken, broken | {"b": MEAN["b"] * (2 if apart else 1)}], replicas="a")
    check = self_check.check_run(trace)
    assert [c.quantity for c in check.found if c.mark == "FAIL"] == [self_check.EQUAL]
    assert check.diagnosis is not None
    assert f"those of {'all parameters' if apart else 'a'} differ" in check.diagnosis.because
