"""How the gradient of an update is made of those of the ranks."""

from __future__ import annotations

import pytest

from packages.unisono.tests.proof.script_traces import DRAW, OWN, combine
from unisono.proof.recording.trace import Array
from unisono.proof.scripts.judging.gradient_sums import explain_reduction, have_other_weights, is_left_alone


@pytest.mark.parametrize(
    ("reduced", "shown"),
    [
        (combine(0.5, 0.5), "mean"),
        (combine(1, 1), "sum"),
        (combine(0.25, 0.25), "sum × 0.25"),
        (combine(0.5 + 1e-8, 0.5 - 1e-8), "mean"),  # to rounding of fp32
        (combine(0.75, 0.25), "sum weighted by 0.75, 0.25"),
        (combine(0.5, 0.5) | {"b": OWN[0]["b"]}, "nothing of the kind"),
    ],
)
def test_a_reduction_is_recognised(reduced: dict[str, Array], shown: str) -> None:
    made = explain_reduction(OWN, reduced)
    assert str(made) == shown
    assert bool(made.off) == (made.weights is None)


def test_a_pass_that_is_not_reduced_beside_one_that_is_stays_on_its_rank() -> None:
    passes = [[OWN[0], OWN[1]], [combine(1, 2), combine(2, -1)]]
    first = {name: (passes[0][0][name] + passes[1][0][name]) / 2 for name in OWN[0]}
    last = [{name: first[name] + rank[1][name] for name in OWN[0]} for rank in passes]
    assert not is_left_alone(passes, last, ["a", "b"], "fp64"), "two directions are too few for four passes"
    passes = [[{"a": DRAW.normal(size=12)} for _ in range(2)] for _ in range(2)]
    last = [{"a": (passes[0][0]["a"] + passes[1][0]["a"]) / 2 + rank[1]["a"]} for rank in passes]
    assert is_left_alone(passes, last, ["a"], "fp64")


def test_only_sums_of_all_the_same_parts_are_weighted_otherwise() -> None:
    own = [{"a": DRAW.normal(size=(4, 5))} for _ in range(2)]

    def add(*weights: float) -> dict[str, Array]:
        return {"a": sum(w * one["a"] for w, one in zip(weights, own, strict=True))}  # type: ignore[dict-item]

    assert have_other_weights(own, add(0.5, 0.5), add(0.625, 0.375), "fp64")
    assert not have_other_weights(own, add(0.5, 0.5), add(0.5, 0.5), "fp64")
    assert not have_other_weights(own, add(0.5, 0.5), add(1, 0), "fp64")  # one process reads the rows of rank 0 alone
    assert not have_other_weights(own, add(0.5, 0.5), {"a": DRAW.normal(size=(4, 5))}, "fp64")  # of other rows
    few = [{"a": one["a"][0]} for one in own]
    assert not have_other_weights(few, {"a": few[0]["a"] + few[1]["a"]}, {"a": few[0]["a"] + 2 * few[1]["a"]}, "fp64")
