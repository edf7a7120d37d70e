"""What gradients that differ first are called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packages.unisono.tests.proof.patterns import (
    EVEN,
    OTHER,
    RNG,
    TERMS,
    UNEVEN,
    diagnose,
    failed,
    name,
    pair,
    passed,
    reported,
    summed,
    told,
    trace,
)
from unisono.proof.diagnoses import predictions
from unisono.proof.diagnoses.gradient_rules import find_extra_gradients
from unisono.proof.recording.gradient_sample import norm_of
from unisono.proof.recording.trace import Part, write_tensors

# gradients ------------------------------------------------------------------------------------------------------------


def of_terms(folder: Path, ours: dict[str, float], theirs: dict[str, float], crosses: str) -> str:
    folder.mkdir(exist_ok=True)
    mine, reference = trace(folder / "mine", EVEN, crosses=crosses), trace(folder / "one", [[8], [8]])
    mine.facts.steps[0].terms, reference.facts.steps[0].terms = ours, theirs
    return name((mine, reference), failed("loss", 1), failed("raw gradients", 1))


@pytest.mark.parametrize(
    ("ours", "crosses", "fault"),
    [
        ({"pairs": 0.5, "own": 2.0}, "rows", "The loss across samples depends on the layout"),
        ({"pairs": 0.5, "own": 2.0}, "whole", "The loss across samples depends on the layout"),
        ({"pairs": 0.5, "own": 2.5}, "rows", "The loss depends on the layout"),
        ({"pairs": 0.5, "own": 2.0}, "", "The loss depends on the layout"),
    ],
)
def test_a_loss_across_samples_of_which_another_term_agrees(
    tmp_path: Path, ours: dict[str, float], crosses: str, fault: str
) -> None:
    assert of_terms(tmp_path, ours, {"pairs": 1.0, "own": 2.0}, crosses) == fault


def test_a_loss_across_samples_that_a_resume_changes_has_lost_a_state(tmp_path: Path) -> None:
    mine, reference = trace(tmp_path / "mine", EVEN, crosses="whole"), trace(tmp_path / "one", [[8], [8]])
    mine.facts.steps[1].terms, reference.facts.steps[1].terms = {"row": 0.5}, {"row": 1.0}
    found = diagnose((mine, reference), passed("outputs"), failed("loss", 2), starts=[1]).fault
    assert found == "The state was not carried on"


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("statistic", "A statistic of the batch is taken of its parts"),
        ("statistic of outputs", "The loss depends on the micro-batch"),
        ("constant", "A term is added once per micro-batch"),
        ("mean", "A mean of means"),
        ("", "The loss depends on the micro-batch"),
        ("places", "The loss depends on the micro-batch"),
        ("largest", "The loss depends on the micro-batch"),
        ("number", "The loss depends on the micro-batch"),
    ],
)
def test_a_term_of_other_micro_batches_is_what_it_is_on_some_rows(tmp_path: Path, kind: str, fault: str) -> None:
    found = pair(tmp_path, None)
    for step in found[0].facts.steps:
        step.parts = [replace(part, counts={"next": part.counts["next"] / 2}) for part in step.parts * 2]
    kind, _, found[1].facts.by_number = kind.partition(" of ")
    found[1].facts.probed, found[1].facts.additivity = True, {"next": kind} if kind else {}
    assert name(found, reported(found, 3.7), failed("raw gradients", 1), world_size=1) == fault


@pytest.mark.parametrize(
    ("size", "crosses", "fault"),
    [
        (6e-2, "rows", "The gradients across samples depend on the layout"),
        (3e-3, "rows", "The gradients depend on the layout"),
        (6e-2, "whole", "The gradients depend on the layout"),
        (6e-2, "", "The gradients depend on the layout"),
    ],
)
def test_gradients_of_another_direction_where_the_loss_crosses_samples(
    tmp_path: Path, size: float, crosses: str, fault: str
) -> None:
    first = failed("raw gradients", 1, size=size)
    assert told(tmp_path, first, gradient=OTHER, crosses=crosses).fault == fault


EIGHTH = [1 / 8, 1 / 8]


@pytest.mark.parametrize(
    ("observed", "fault"),
    [
        (summed([1 / 8, 0]), "Gradients are not synchronised"),  # rank 0's own
        (summed([0, 2 / 8]), "Gradients are not synchronised"),  # rank 1's, whose loss was scaled for an average
        ({**summed(EIGHTH), "b": summed([2 / 8, 0])["b"]}, "Some parameters are not synchronised"),
        ({**summed(EIGHTH), "b": summed([1 / 4, 1 / 12])["b"]}, "The gradients depend on the layout"),
        (summed([1 / 4, 1 / 12]), "A mean of means"),
        (summed([1.3 / 8, 0.9 / 8]), "The gradients depend on the layout"),
        ({n: 1.37 * v for n, v in summed(EIGHTH).items()}, "The gradients depend on the layout"),
        ({n: v * (1 + 1e-3) ** (n == "b") for n, v in summed(EIGHTH).items()}, "The gradients depend on the layout"),
    ],
)
def test_gradients_are_what_reproduces_them(tmp_path: Path, observed: Any, fault: str) -> None:
    assert name(pair(tmp_path, observed), failed("raw gradients", 1)) == fault


@pytest.mark.parametrize(("factor", "said"), [(1, "those of the other ranks were zero"), (2, "all ranks have the")])
def test_a_gradient_of_one_rank_that_all_have_says_how(tmp_path: Path, factor: int, said: str) -> None:
    found = pair(tmp_path, summed([factor / 8, 0]))
    diagnosed = diagnose(found, failed("raw gradients", 1), passed("replicas"))
    assert diagnosed.fault == "Gradients are those of a part of the batch" and said in diagnosed.because


def test_a_parameter_that_is_frozen_on_several_processes_only_is_not_left_out_by_a_pass(tmp_path: Path) -> None:
    found = pair(tmp_path, {"a": summed(EIGHTH)["a"]})
    assert name(found, failed("raw gradients", 1, "b")) == "Parameters are left out"
    found[0].facts.frozen.append("b")
    assert name(found, failed("raw gradients", 1, "b")) == "The gradients depend on the layout"


def test_gradients_that_differ_by_little_are_not_said_to_be_scaled_by_one(tmp_path: Path) -> None:
    for number, observed in enumerate([{n: (1 + 3e-9) * v for n, v in summed(EIGHTH).items()}, summed([0.125, 0.125])]):
        found = pair(tmp_path / str(number), observed)
        diagnosed = diagnose(found, failed("raw gradients", 1, size=3e-9))
        assert diagnosed.fault == "The gradients depend on the layout" and "1 times" not in diagnosed.because


def test_a_factor_that_may_be_several_numbers_names_them_all(tmp_path: Path) -> None:
    found = told(tmp_path, failed("raw gradients", 1), gradient={"a": 4 * np.ones(3), "b": 4 * np.arange(3.0)})
    assert found.because.endswith("by the number of processes, twice")
    parts = [Part(n, n // 2, 2, {}, {}, {}) for n in range(4)]
    found_pair = pair(tmp_path / "more", {n: 4 * v for n, v in summed(EIGHTH).items()})
    found_pair[0].facts.steps[0].parts = parts
    diagnosed = diagnose(found_pair, failed("raw gradients", 1))
    assert diagnosed.because.endswith("by the number of processes, twice or the number of micro-batches")


def test_gradients_of_rounded_parts_are_of_a_lower_precision_and_others_are_not(tmp_path: Path) -> None:
    rounded = {n: sum(predictions.round_to(part[n] / 4, 8) for part in TERMS) / 2 for n in ("a", "b")}
    fault = name(pair(tmp_path, rounded), failed("raw gradients", 1, size=3e-3))
    assert fault == "Gradients are reduced in a lower precision"
    noisy = {n: v * (1 + 3e-3 * RNG.normal(size=v.shape)) for n, v in summed(EIGHTH).items()}
    fault = name(pair(tmp_path / "noisy", noisy), failed("raw gradients", 1, size=3e-3))
    assert fault == "The gradients depend on the layout"


def test_gradients_of_which_nothing_is_known_get_a_neutral_name(tmp_path: Path) -> None:
    more = failed("replicas", 2, "'a' is not the same on ranks [0] and [1]")
    found = told(tmp_path, failed("raw gradients", 2), more, counts=UNEVEN, gradient=OTHER, loss=None)
    assert found.fault == "The gradients depend on the layout"
    assert "what each micro-batch adds was not recorded" in found.because and found.because.endswith(
        "no loss was recorded"
    )


def test_a_term_that_counts_nothing_in_a_step_leaves_the_others_to_be_read(tmp_path: Path) -> None:
    found = pair(tmp_path, summed([1 / 4, 1 / 12]))
    for one in found:
        for part in one.facts.steps[0].parts:
            part.sums["rare"], part.counts["rare"] = 0.0, 0.0
    values = found[1].tensors("term gradients", 0)
    rare = {name.replace("next", "rare"): np.zeros_like(value) for name, value in values.items()}
    write_tensors(found[1].folder, "term gradients", 0, {**values, **rare})
    assert name(found, failed("raw gradients", 1)) == "A mean of means"


ADAPTERS = {"a.A": np.zeros(3), "b.A": np.zeros(3), "a.B": np.ones(3), "b.B": np.arange(3.0)}  # in their first step


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"a.B": 2 * np.ones(3), "b.B": 2 * np.arange(3.0)}, "All gradients are scaled by N"),
        ({"a.B": OTHER["a"], "b.B": OTHER["b"]}, "The gradients depend on the layout"),
        ({"a.B": OTHER["a"]}, "The gradients depend on the layout"),
    ],
)
def test_matrices_of_adapters_without_a_gradient_yet_say_nothing(tmp_path: Path, change: Any, fault: str) -> None:
    mine = trace(tmp_path / "mine", EVEN, {**ADAPTERS, **change})
    reference = trace(tmp_path / "one", [[sum(step)] for step in EVEN], ADAPTERS)
    assert name((mine, reference), failed("raw gradients", 1)) == fault


@pytest.mark.parametrize(("factor", "by"), [(2.0, ""), (0.5, ""), (4.0, ", twice")])
def test_gradients_that_are_scaled(tmp_path: Path, factor: float, by: str) -> None:
    scaled = {"a": factor * np.ones(3), "b": factor * np.arange(3.0)}
    found = told(tmp_path, failed("raw gradients", 1), gradient=scaled)
    assert found.fault == "All gradients are scaled by N"
    assert found.because.endswith(f"by the number of processes{by}")


WIDE = {"a": RNG.normal(size=(4, 3)), "b": RNG.normal(size=(6, 2))}


def scaled_shards(factors: list[float]) -> dict[str, Any]:
    """What two ranks make of a gradient whose shards each of them scales by itself."""
    return {
        n: np.concatenate([f * half for f, half in zip(factors, np.split(v, 2), strict=True)]) for n, v in WIDE.items()
    }


@pytest.mark.parametrize("known", [True, False])
def test_a_clipping_by_hand_with_the_norm_of_shards_is_known_by_their_norms(tmp_path: Path, known: bool) -> None:
    whole = norm_of(WIDE.values())
    norms = [norm_of(np.split(v, 2)[rank] for v in WIDE.values()) for rank in range(2)]
    observed = scaled_shards([whole / norm if known else 1.3 + norm / 99 for norm in norms])
    mine, reference = trace(tmp_path / "mine", EVEN, observed), trace(tmp_path / "one", [[8], [8]], WIDE)
    for found in (mine, reference):  # no call of torch's clipping was seen
        write_tensors(found.folder, "clipped gradients", 0, {})
    diagnosed = diagnose((mine, reference), failed("raw gradients", 1))
    assert diagnosed.fault == ("Clipped by a local norm" if known else "The gradients depend on the layout")
    assert known or diagnosed.because.endswith("a clipping by hand would be in them")


@pytest.mark.parametrize(
    ("bits", "both", "fault"),
    [
        (8, False, "Gradients are reduced in a lower precision"),
        (8, True, "Gradients are reduced in a lower precision"),
        (9, False, ""),
        (24, False, "Gradients are reduced in a lower precision"),
        (24, True, ""),
    ],
)
def test_gradients_whose_parts_are_not_known_are_of_the_precision_of_their_numbers(
    tmp_path: Path, bits: int, both: bool, fault: str
) -> None:
    parts = [{n: RNG.normal(size=v.shape) for n, v in WIDE.items()} for _ in range(2)]
    observed = {n: predictions.round_to(sum(predictions.round_to(p[n], bits) for p in parts), bits) for n in WIDE}
    right = {n: predictions.round_to(parts[0][n] + parts[1][n], bits if both else 53) for n in WIDE}
    found = trace(tmp_path / "mine", EVEN, observed), trace(tmp_path / "one", [[8], [8]], right)
    named = name(found, failed("raw gradients", 1, size=3e-3))
    assert named == (fault or "The gradients depend on the layout")


@pytest.mark.parametrize("known", [True, False])
def test_a_clipping_of_every_unsynchronised_pass_is_known_by_the_factors_of_ranks(tmp_path: Path, known: bool) -> None:
    passes = [[{n: RNG.normal(size=v.shape) for n, v in WIDE.items()} for _ in range(3)] for _ in range(2)]
    limit, made = 1.5, {n: np.zeros(v.shape) for n, v in WIDE.items()}
    for own in passes:
        total = {n: np.zeros(v.shape) for n, v in WIDE.items()}
        for number, one in enumerate(own):
            total = {n: total[n] + one[n] for n in total}
            if number < 2:
                scale = limit / norm_of(total.values()) if known else 0.8
                total = {n: scale * v for n, v in total.items()}
        made = {n: made[n] + total[n] / 2 for n in made}
    right = {n: sum(one[n] for own in passes for one in own) / 2 for n in WIDE}
    mine, reference = trace(tmp_path / "mine", EVEN, made), trace(tmp_path / "one", [[8], [8]], right)
    write_tensors(
        reference.folder, "clipped gradients", 0, {n: v * limit / norm_of(right.values()) for n, v in right.items()}
    )
    for rank, own in enumerate(passes):
        values = {f"{number}/{n}": v.ravel() for number, one in enumerate(own) for n, v in one.items()}
        write_tensors(mine.folder, f"local gradients {rank}", 0, values)
    found = name((mine, reference), failed("raw gradients", 1))
    assert found == ("Clipped before synchronisation" if known else "The gradients depend on the layout")


@pytest.mark.parametrize(("weights", "told"), [([4.0, 2.0, 1.0], True), ([4.0, 2.0, 1.5], False)])
def test_what_is_added_up_over_ranks_after_every_pass_is_in_the_sum_by_powers_of_their_number(
    tmp_path: Path, weights: list[float], told: bool
) -> None:
    passes = [[{n: RNG.normal(size=v.shape) for n, v in WIDE.items()} for _ in weights] for _ in range(2)]
    made, right = (
        {n: sum(w * one[n] for own in passes for w, one in zip(each, own, strict=True)) for n in WIDE}
        for each in (weights, [1.0] * 3)
    )
    mine, reference = trace(tmp_path / "mine", EVEN, made), trace(tmp_path / "one", [[8], [8]], right)
    for rank, own in enumerate(passes):
        values = {f"{number}/{n}": v.ravel() for number, one in enumerate(own) for n, v in one.items()}
        write_tensors(mine.folder, f"local gradients {rank}", 0, values)
    found = diagnose((mine, reference), failed("raw gradients", 1))
    assert f"in the sum {weights[0]:.4g}, 2, {weights[2]:.4g}" in found.because
    assert ("after every backward pass, and not once" in found.because) == told
    assert ("once per update" in found.remedy) == told


@pytest.mark.parametrize("own", [True, False])
def test_some_gradients_that_are_clipped_by_the_norm_of_these_alone_are_told(tmp_path: Path, own: bool) -> None:
    """As `clip_grad_norm_` does with the parameters that this rank's part of a ZeRO optimizer holds."""
    right, limit = {name: RNG.normal(size=5) for name in "abcd"}, 0.5
    mine, reference = trace(tmp_path / "mine", EVEN, right), trace(tmp_path / "one", [[8], [8]], right)
    write_tensors(
        reference.folder, "clipped gradients", 0, {n: v * limit / norm_of(right.values()) for n, v in right.items()}
    )
    part = {name: right[name] for name in "ab"}
    scale = limit / norm_of(part.values()) if own else 0.3
    write_tensors(mine.folder, "clipped gradients", 0, right | {n: v * scale for n, v in part.items()})
    found = diagnose((mine, reference), failed("clipped gradients", 1))
    assert (found.fault == "The norm is that of a part of the gradient") == own
    assert ("a, b are scaled" in found.because) == own


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["x.0", "x.1", "x.2"], "those of x.* (3 of 4) differ, 2 times what they should be (the number of processes"),
        (["x.0", "x.1", "y"], "those of all but x.2 differ, 2 times what they should be (the number of processes"),
    ],
)
def test_most_gradients_that_are_scaled_are_told_by_their_modules(tmp_path: Path, names: list[str], said: str) -> None:
    right = {name: RNG.normal(size=5) for name in ("x.0", "x.1", "x.2", "y")}
    wrong = {name: value * (2 if name in names else 1) for name, value in right.items()}
    mine, reference = trace(tmp_path / "mine", EVEN, wrong), trace(tmp_path / "one", [[8], [8]], right)
    found = diagnose((mine, reference), failed("raw gradients", 1))
    assert (found.fault, found.because.startswith(said)) == ("The gradients depend on the layout", True), found.because
    assert found.because.endswith("and all others agree")


def test_a_gradient_that_is_not_there(tmp_path: Path) -> None:
    found = told(tmp_path, failed("raw gradients", 1, size=float("inf")), gradient={"a": np.ones(3)})
    assert (found.fault, found.because) == ("Parameters are left out", "no gradient for b")


# other micro-batches on one process -----------------------------------------------------------------------------------


def in_pieces(extra: Any) -> Any:
    """Four micro-batches of two rows inside of two of four; each adds some gradient beside that of its rows."""
    small = {f"term/{n}/w": np.arange(3.0) + n + extra(n) for n in range(4)}
    large = {f"term/{n}/w": sum(np.arange(3.0) + k for k in (2 * n, 2 * n + 1)) + extra(0) for n in range(2)}
    parts = [[Part(n, 0, rows, {}, {}) for n in range(8 // rows)] for rows in (2, 4)]
    return find_extra_gradients((parts[0], small), (parts[1], large), 1e-9)


def test_what_every_further_micro_batch_adds_alike_is_told_from_a_statistic() -> None:
    assert in_pieces(lambda n: np.zeros(3)) is None
    assert in_pieces(lambda n: np.array([0.0, 0.5, 0.0])) == ("term", True, ["w"])
    assert in_pieces(lambda n: np.array([0.0, 0.5, 0.1 * n])) == ("term", False, ["w"])


def test_micro_batches_that_do_not_fit_into_one_another_say_nothing() -> None:
    parts = [[Part(n, 0, rows, {}, {}) for n in range(2)] for rows in (3, 4)]
    gradients = {f"term/{n}/w": np.ones(3) for n in range(2)}
    assert find_extra_gradients((parts[0], gradients), (parts[1], gradients), 1e-9) is None


def test_a_norm_that_is_right_for_the_gradients_of_the_run_is_no_fault_of_the_norm(tmp_path: Path) -> None:
    own = norm_of([np.ones(3), np.arange(3.0)])
    right = told(tmp_path / "own", failed("gradient norm", 1, "norm", mine=own, reference=own * 1.1))
    assert right.fault == "The gradients depend on the layout"
    found = told(tmp_path / "other", failed("gradient norm", 1, "norm", mine=own * 1.05, reference=own * 1.1)).fault
    assert found == "The norm depends on the layout"


@pytest.mark.parametrize("reduced", [True, False])
def test_tensors_of_one_rank_were_reduced_where_replicas_agree(tmp_path: Path, reduced: bool) -> None:
    right = summed([1 / 8, 1 / 8])
    found = pair(tmp_path, {"a": right["a"], "b": 2 * TERMS[0]["b"] / 8})
    replicas = passed("replicas") if reduced else failed("replicas", 1)
    named = name(found, failed("raw gradients", 1, "b"), replicas)
    assert named == ("The gradients depend on the layout" if reduced else "Some parameters are not synchronised")


@pytest.mark.parametrize(
    ("ours", "theirs", "fault"),
    [
        (1, 2, "All gradients are scaled by N"),  # as many rows in a pass, whose loss is divided as on one process
        (2, 1, "The gradients depend on the layout"),  # a sum over passes, or over ranks
    ],
)
def test_a_factor_that_the_number_of_passes_explains_too_is_told_with_both(
    tmp_path: Path, ours: int, theirs: int, fault: str
) -> None:
    gradients = {"a.B": np.ones(3), "b.B": np.arange(3.0)}
    mine = trace(tmp_path / "mine", [[4, 4]], {name: ours * value for name, value in gradients.items()})
    reference = trace(tmp_path / "one", [[8]], {name: theirs * value for name, value in gradients.items()})
    for rank in range(2):
        write_tensors(mine.folder, f"local gradients {rank}", 0, {f"{n}/a.B": np.ones(3) for n in range(ours)})
    write_tensors(reference.folder, "local gradients 0", 0, {f"{n}/a.B": np.ones(3) for n in range(theirs)})
    found = diagnose((mine, reference), failed("raw gradients", 1))
    assert found.fault == fault
    assert f"{ours} backward passes per update instead of {theirs}" in found.because


def test_a_hook_that_adds_the_same_with_every_backward_pass_is_no_term_of_the_loss(tmp_path: Path) -> None:
    found = pair(tmp_path, {n: v + 0.02 for n, v in summed(EIGHTH).items()})
    hooked = {n: v + 0.01 for n, v in summed(EIGHTH).items()}
    write_tensors(found[1].folder, "raw gradients", 0, hooked)
    found[0].facts.steps[0].parts = [Part(n, 0, 2, {}, {}, {}) for n in range(4)]
    diagnosed = diagnose(found, failed("raw gradients", 1), world_size=1)
    assert diagnosed.fault == "The gradients depend on the layout" and "a hook" in diagnosed.because


def test_gradients_that_are_all_zero_on_one_process_get_a_neutral_name(tmp_path: Path) -> None:
    zero = {"a": np.zeros(3), "b": np.zeros(3)}
    mine, reference = trace(tmp_path / "mine", EVEN), trace(tmp_path / "one", [[8], [8]], zero)
    write_tensors(tmp_path / "mine", "clipped gradients", 0, {})
    assert name((mine, reference), failed("raw gradients", 1)) == "The gradients depend on the layout"
