"""How the gradient of an update is made of those of the ranks, and what is wrong when it is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from unisono.proof.recording.trace import Array, RunFacts, StepFacts, Trace, write_facts, write_tensors
from unisono.proof.scripts import script_remedies, self_check
from unisono.proof.scripts.rank_facts import RankFacts, buffers_moment, reduced_moment

DRAW = np.random.default_rng(0)
OWN = [{"a": DRAW.normal(size=(3, 4)), "b": DRAW.normal(size=4)} for _ in range(2)]


def combine(*weights: float) -> dict[str, Array]:
    return {name: sum(w * rank[name] for w, rank in zip(weights, OWN, strict=True)) for name in OWN[0]}  # type: ignore[misc]


SAME = [OWN[0]] * 2


@pytest.mark.parametrize(
    ("reduced", "shown"),
    [
        (combine(0.5, 0.5), "mean"),
        (combine(1, 1), "sum"),
        (combine(0.25, 0.25), "sum × 0.25"),
        (combine(0.75, 0.25), "sum weighted by 0.75, 0.25"),
        (combine(0.5, 0.5) | {"b": OWN[0]["b"]}, "nothing of the kind"),
    ],
)
def test_a_reduction_is_recognised(reduced: dict[str, Array], shown: str) -> None:
    made = self_check.explain_reduction(OWN, reduced)
    assert str(made) == shown
    assert bool(made.off) == (made.weights is None)


def write_trace(folder: Path, ranks: list[RankFacts], reduced: list[dict[str, Array]], lr: list[list[float]]) -> Trace:
    """A trace of one step on two processes, whose own gradients are equal if `reduced` is `SAME`."""
    folder.mkdir()
    local = [OWN[0]] * 2 if reduced is SAME else OWN
    apart = any(not np.array_equal(value, reduced[1].get(name)) for name, value in reduced[0].items())
    step = StepFacts([], [[], []], None, {}, 1.0, lr, [], replicas=["'a' is not the same on ranks [0] and [1]"] * apart)
    for rank, (own, after) in enumerate(zip(local, reduced, strict=True)):
        write_tensors(folder, f"local gradients {rank}", 0, {f"0/{name}": value for name, value in own.items()})
        write_tensors(folder, reduced_moment(rank), 0, after)
        values = {name: np.array([float(digest)]) for name, digest in ranks[rank].buffers.items()}
        write_tensors(folder, buffers_moment(rank), 0, values)
    (folder / "ranks.json").write_text(json.dumps([[asdict(rank) for rank in ranks]]))
    write_facts(folder, RunFacts(steps=[step]))
    return Trace(folder)


def build_ranks(change: Callable[[RankFacts], None] = lambda rank: None) -> list[RankFacts]:
    """Two processes; the second is changed."""
    ranks = [
        RankFacts([loss], [row, f"{row}2"], "x", {"a": 1}, {"n": 3}, {"a": 5}) for loss, row in ((1.0, "r"), (4.0, "s"))
    ]
    change(ranks[1])
    return ranks


def find_failed(trace: Trace) -> tuple[list[str], str]:
    check = self_check.check_run(trace, "fp64")
    return [c.quantity for c in check.found if c.mark == "FAIL"], check.diagnosis.fault if check.diagnosis else ""


def test_a_correct_run_passes_and_its_loss_is_that_of_the_reduction(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t", build_ranks(), [combine(0.5, 0.5)] * 2, [[0.1], [0.1]])
    check = self_check.check_run(trace, "fp64")
    assert {c.mark for c in check.found} == {"PASS"}
    assert len(check.found) == 6
    assert check.losses == [pytest.approx(2.5)]  # the mean of 1 and 4
    assert check.diagnosis is None


def test_gradients_that_stay_on_their_rank_are_not_synchronised(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t", build_ranks(), OWN, [[0.1], [0.1]])
    assert find_failed(trace) == ([self_check.EQUAL], "Gradients are not synchronised")
    assert self_check.check_run(trace, "fp64").losses == [None]  # no one function was minimised


def test_gradients_that_an_optimizer_reduces_inside_of_its_step_are_not_seen(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t", build_ranks(), OWN, [[0.1], [0.1]])
    trace.facts.steps[0].replicas = []
    check = self_check.check_run(trace, "fp64")
    assert (find_failed(trace), check.inside) == (([], ""), self_check.INSIDE)
    assert self_check.EQUAL in {c.quantity for c in check.found if c.mark == "ABSTAIN"}


def test_a_state_that_an_optimizer_keeps_of_each_ranks_own_gradients_is_no_drift_of_parameters(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t", build_ranks(), OWN, [[0.1], [0.1]])
    trace.facts.steps[0].replicas = ["'optimizer/a/momentum' is not the same on ranks [0] and [1]"]
    check = self_check.check_run(trace, "fp64")
    assert (find_failed(trace), check.inside) == (([], ""), self_check.OWN_STATE)


def test_a_gradient_that_is_rounding_is_not_called_synchronised(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t", build_ranks(), [own | {"c": np.full(3, 1e-18)} for own in OWN], [[0.1], [0.1]])
    assert find_failed(trace) == ([self_check.EQUAL], "Gradients are not synchronised")


def test_one_parameter_that_stays_on_its_rank_is_named_so(tmp_path: Path) -> None:
    reduced = [combine(0.5, 0.5) | {"b": rank["b"]} for rank in OWN]
    trace = write_trace(tmp_path / "t", build_ranks(), reduced, [[0.1], [0.1]])
    assert find_failed(trace) == ([self_check.EQUAL], "Some parameters are not synchronised")


@pytest.mark.parametrize(
    ("early", "sharded", "remedy"),
    [(False, False, ""), (True, False, script_remedies.STEP_LATER), (False, True, script_remedies.SHARD_THE_ROOT)],
)
def test_gradients_that_stay_on_their_rank_are_told_by_why(
    tmp_path: Path, early: bool, sharded: bool, remedy: str
) -> None:
    ranks = build_ranks(lambda rank: setattr(rank, "early", early))
    trace = write_trace(tmp_path / "t", ranks, OWN, [[0.1], [0.1]])
    if sharded:  # every rank has a piece of another one
        write_tensors(trace.folder, "raw gradients", 0, {**OWN[0], "c": np.ones(3)})
    found = self_check.check_run(trace, "fp64").diagnosis
    assert found is not None
    assert script_remedies.reword(found).remedy == remedy or not remedy
    assert ("fully_shard" in found.because, "inside of the backward" in found.because) == (sharded, early)
    assert (found.fault == "Some parameters are not synchronised") == sharded


def test_gradients_that_differ_only_when_they_are_clipped_were_clipped_too_early(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t", build_ranks(), OWN, [[0.1], [0.1]])
    write_tensors(trace.folder, "clipped gradients", 0, combine(0.5, 0.5))
    assert find_failed(trace) == ([self_check.CLIPPED], "Clipped before synchronisation")


def test_the_check_that_fails_in_the_earliest_step_gives_the_name(tmp_path: Path) -> None:
    ranks = build_ranks(lambda rank: rank.buffers.update(n=4))
    trace = write_trace(tmp_path / "t", ranks, [combine(0.5, 0.5)] * 2, [[0.1], [0.1]])
    second = replace(trace.facts.steps[0], lr=[[0.1], [0.2]])
    (trace.folder / "ranks.json").write_text(json.dumps([[asdict(r) for r in each] for each in (ranks, build_ranks())]))
    trace.facts.steps.append(second)
    check = self_check.check_run(trace, "fp64")
    assert [c.quantity for c in check.found if c.mark == "FAIL"] == [self_check.RATES, self_check.BUFFERS]
    assert check.failed is not None and check.diagnosis is not None
    assert (check.failed.quantity, check.diagnosis.fault) == (self_check.BUFFERS, "Buffers are those of one process")


@pytest.mark.parametrize(
    ("change", "check", "fault"),
    [
        (lambda rank: rank.initial.update(a=6), self_check.BEGIN, "Initialisation depends on the rank"),
        (lambda rank: rank.buffers.update(n=4), self_check.BUFFERS, "Buffers are those of one process"),
        (
            lambda rank: rank.inputs.__setitem__(slice(None), ["r", "r2"]),
            self_check.DIFFERENT,
            "Every rank reads the same rows",
        ),
        (lambda rank: rank.evaluating.append("2"), self_check.MODES, "Evaluation changes the training"),
    ],
)
def test_what_differs_or_should_between_ranks_is_named(
    tmp_path: Path, change: Callable[[RankFacts], None], check: str, fault: str
) -> None:
    reduced = SAME if check == self_check.DIFFERENT else [combine(0.5, 0.5)] * 2
    trace = write_trace(tmp_path / "t", build_ranks(change), reduced, [[0.1], [0.1]])
    assert find_failed(trace) == ([check], fault)


def test_ranks_that_begin_an_update_of_equal_gradients_with_other_weights_have_drifted_apart(tmp_path: Path) -> None:
    """As a script does that changes the weights of one rank after the optimizer has sent them to all."""
    mean = combine(0.5, 0.5)
    trace = write_trace(tmp_path / "t", build_ranks(), [mean] * 2, [[0.1], [0.1]])
    later = build_ranks(lambda rank: rank.begun.update(a=2))
    later[0].begun.update(a=1)
    (trace.folder / "ranks.json").write_text(json.dumps([[asdict(r) for r in each] for each in (build_ranks(), later)]))
    trace.facts.steps.append(trace.facts.steps[0])
    for rank, own in enumerate(OWN):
        write_tensors(trace.folder, f"local gradients {rank}", 1, {f"0/{name}": value for name, value in own.items()})
        write_tensors(trace.folder, reduced_moment(rank), 1, mean)
    assert find_failed(trace) == ([self_check.APART], "Replicas drift apart")


@pytest.mark.parametrize("sent", [True, False])
def test_parameters_that_their_owners_send_to_others_after_the_update_are_no_drift(tmp_path: Path, sent: bool) -> None:
    mean = combine(0.5, 0.5)
    trace = write_trace(tmp_path / "t", build_ranks(), [mean] * 2, [[0.1], [0.1]])
    trace.facts.steps[0].replicas = ["'a' is not the same on ranks [0] and [1]"]
    later = build_ranks()
    for number, rank in enumerate(later):
        rank.begun.update(a=1 if sent else number)
    (trace.folder / "ranks.json").write_text(json.dumps([[asdict(r) for r in each] for each in (build_ranks(), later)]))
    trace.facts.steps.append(replace(trace.facts.steps[0]))
    check = self_check.check_run(trace, "fp64")
    assert (check.inside == self_check.SENT) == sent
    assert {c.quantity for c in check.found if c.mark == "PASS"} >= {self_check.EQUAL, self_check.REDUCED}


def test_rows_that_all_ranks_share_in_some_steps_only_are_left_open(tmp_path: Path) -> None:
    """As the first updates are that search for a rate, all on the same rows."""
    alike = build_ranks(lambda rank: rank.inputs.__setitem__(slice(None), ["r", "r2"]))
    trace = write_trace(tmp_path / "t", alike, SAME, [[0.1], [0.1]])
    apart = build_ranks()
    apart[0].inputs = ["t", "t2"]
    written = [[asdict(rank) for rank in each] for each in (alike, apart)]
    (trace.folder / "ranks.json").write_text(json.dumps(written))
    trace.facts.steps.append(trace.facts.steps[0])
    check = self_check.check_run(trace, "fp64")
    (left,) = [c for c in check.found if c.quantity == self_check.DIFFERENT]
    assert (left.mark, check.diagnosis) == ("ABSTAIN", None)
    assert "the same inputs in steps 1, and not in others" in left.why


def test_rates_that_differ_between_ranks_fail(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t", build_ranks(), [combine(0.5, 0.5)] * 2, [[0.1], [0.2]])
    assert find_failed(trace) == ([self_check.RATES], "The learning rate differs between ranks")


def test_gradients_that_the_script_changes_afterwards_leave_the_question_open(tmp_path: Path) -> None:
    reduced = {name: value + 1 for name, value in combine(0.5, 0.5).items()}
    check = self_check.check_run(write_trace(tmp_path / "t", build_ranks(), [reduced] * 2, [[0.1], [0.1]]), "fp64")
    assert [c.quantity for c in check.found if c.mark == "ABSTAIN"] == [self_check.REDUCED]
    assert check.reduction == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_gradients_that_are_not_finite_leave_the_question_open(tmp_path: Path, rank: int) -> None:
    trace = write_trace(tmp_path / "t", build_ranks(), [{"a": np.zeros((3, 4)), "b": np.zeros(4)}] * 2, [[0.1], [0.1]])
    broken = {"0/a": np.full((3, 4), np.nan), "0/b": OWN[rank]["b"]}
    write_tensors(trace.folder, f"local gradients {rank}", 0, broken)
    check = self_check.check_run(trace, "fp64")
    (abstained,) = [c for c in check.found if c.mark != "PASS"]
    assert (abstained.quantity, abstained.mark) == (self_check.REDUCED, "ABSTAIN")
    assert abstained.why == "step 1: those of a are not all finite numbers"
    assert check.losses == [None]


def test_gradients_that_one_rank_changes_after_the_reduction_are_not_called_its_own(tmp_path: Path) -> None:
    mean = combine(0.5, 0.5)
    trace = write_trace(tmp_path / "t", build_ranks(), [mean, mean | {"b": 0.75 * mean["b"]}], [[0.1], [0.1]])
    assert find_failed(trace) == ([self_check.EQUAL], "The gradients depend on the layout")
    scaled = {name: 0.75 * value for name, value in mean.items()}
    trace = write_trace(tmp_path / "scaled", build_ranks(), [mean, scaled], [[0.1], [0.1]])
    found = self_check.check_run(trace, "fp64").diagnosis
    assert found is not None
    assert (found.fault, "0.75 times those of rank 0" in found.because) == ("The gradients depend on the layout", True)


def test_gradients_whose_parts_were_not_seen_are_not_said_to_be_no_rank_s_own(tmp_path: Path) -> None:
    mean = combine(0.5, 0.5)
    apart = [mean | {"c": np.full(3, 1.0 + rank)} for rank in range(2)]
    found = self_check.check_run(write_trace(tmp_path / "t", build_ranks(), apart, [[0.1], [0.1]]), "fp64").diagnosis
    assert found is not None
    assert (found.fault, "could not be seen" in found.because) == ("The gradients depend on the layout", True)
    assert "no rank has its own" not in found.because


def test_a_pass_that_is_not_reduced_beside_one_that_is_stays_on_its_rank() -> None:
    passes = [[OWN[0], OWN[1]], [combine(1, 2), combine(2, -1)]]
    first = {name: (passes[0][0][name] + passes[1][0][name]) / 2 for name in OWN[0]}
    last = [{name: first[name] + rank[1][name] for name in OWN[0]} for rank in passes]
    assert not self_check.is_left_alone(passes, last, ["a", "b"], "fp64"), "two directions are too few for four passes"
    passes = [[{"a": DRAW.normal(size=12)} for _ in range(2)] for _ in range(2)]
    last = [{"a": (passes[0][0]["a"] + passes[1][0]["a"]) / 2 + rank[1]["a"]} for rank in passes]
    assert self_check.is_left_alone(passes, last, ["a"], "fp64")


def test_ranks_losses_are_averaged_by_their_rows(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t", build_ranks(), [combine(1, 1)] * 2, [[0.1], [0.1]])
    trace.facts.steps[0].by_rank = [[0, 1, 2], [3]]
    check = self_check.check_run(trace, "fp64")
    assert (check.losses, check.averages) == ([pytest.approx(5.0)], [pytest.approx(1.75)])


def test_buffers_that_differ_by_rounding_are_equal(tmp_path: Path) -> None:
    ranks = build_ranks(lambda rank: rank.buffers.update(n=4))
    trace = write_trace(tmp_path / "t", ranks, [combine(0.5, 0.5)] * 2, [[0.1], [0.1]])
    write_tensors(trace.folder, buffers_moment(1), 0, {"n": np.array([3 + 1e-15])})
    assert find_failed(trace) == ([], "")


def test_parameters_that_come_together_before_the_next_update_leave_the_question_open(tmp_path: Path) -> None:
    ranks = build_ranks()
    trace = write_trace(tmp_path / "t", ranks, OWN, [[0.1], [0.1]])
    trace.facts.steps.append(trace.facts.steps[0])
    for begun, inside in ((1, self_check.TOGETHER), (2, "")):
        after = build_ranks()
        after[0].begun["a"], after[1].begun["a"] = 1, begun
        (trace.folder / "ranks.json").write_text(json.dumps([[asdict(r) for r in each] for each in (ranks, after)]))
        check = self_check.check_run(trace, "fp64")
        assert check.inside == inside
        assert (self_check.EQUAL in {c.quantity for c in check.found if c.mark == "FAIL"}) == (not inside)


@pytest.mark.parametrize("parted", [True, False])
def test_ranks_that_compute_a_row_together_are_given_the_same_rows(tmp_path: Path, parted: bool) -> None:
    """By pieces of parameters, or by hand: then gradients differ from the same inputs, and nothing is drawn."""
    ranks = build_ranks(lambda rank: rank.inputs.__setitem__(slice(None), ["r", "r2"]))
    for rank in ranks:
        rank.parted = parted
    trace = write_trace(tmp_path / "t", ranks, [combine(0.5, 0.5)] * 2, [[0.1], [0.1]])
    assert find_failed(trace) == ([], "")
