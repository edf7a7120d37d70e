"""A prediction holds for the fault it is of, to rounding, and not for one that looks like it."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from unisono.proof.diagnoses import predictions
from unisono.proof.diagnoses.predictions import PartGradients
from unisono.proof.recording.trace import Part

# Four micro-batches on two ranks: their sums and counts are uneven on purpose.
PARTS = [
    Part(0, 0, 2, {"next": 7.0}, {"next": 5.0}),
    Part(1, 0, 2, {"next": 30.0}, {"next": 16.0}),
    Part(2, 1, 2, {"next": 41.0}, {"next": 22.0}),
    Part(3, 1, 1, {"next": 3.0}, {"next": 11.0}),
]
RNG = np.random.default_rng(3)
OF_PARTS = {number: {"a": RNG.normal(size=(5,)), "b": RNG.normal(size=(7,))} for number in range(4)}
GRADIENTS = PartGradients(PARTS, {"next": OF_PARTS})


def summed(weights: list[float]) -> dict[str, np.ndarray]:
    return {name: sum(w * OF_PARTS[i][name] for i, w in enumerate(weights)) for name in ("a", "b")}


# ways to reduce -------------------------------------------------------------------------------------------------------


def test_a_mean_over_ranks_is_told_from_one_over_micro_batches() -> None:
    over_ranks = (37 / 21 + 44 / 33) / 2
    over_micro_batches = (7 / 5 + 30 / 16 + 41 / 22 + 3 / 11) / 4
    ways = predictions.means(PARTS)
    for value, words in ((over_ranks, "over ranks"), (over_micro_batches, "over micro-batches")):
        found = predictions.find_reduction(PARTS, {"next": value}, ways)
        assert found is not None and words in found.words


@pytest.mark.parametrize("value", [81 / 54, 1.5, (37 / 21 + 44 / 33) / 2 * (1 + 1e-6)])
def test_what_is_no_mean_of_means_to_rounding_is_not_called_so(value: float) -> None:
    assert predictions.find_reduction(PARTS, {"next": value}, predictions.means(PARTS)) is None


def test_a_loss_of_one_rank_is_recognised_by_its_rows() -> None:
    found = predictions.find_reduction(PARTS, {"next": 44 / 33}, predictions.of_some(PARTS))
    assert found is not None and found.words == "the sums and counts of rank 1 alone"


def test_nothing_is_predicted_without_recorded_sums() -> None:
    assert predictions.find_reduction([], {"next": 1.0}, predictions.means([])) is None
    assert predictions.find_reduction(PARTS, {"other": 1.0}, predictions.means(PARTS)) is None


def test_a_micro_batch_that_counts_nothing_is_in_the_mean_or_not() -> None:
    parts = [*PARTS[:3], Part(3, 1, 1, {"next": 0.0}, {"next": 0.0})]
    means = {way.words: predictions.predict_value(parts, "next", way) for way in predictions.means(parts)}
    own = 7 / 5 + 30 / 16 + 41 / 22
    assert {own / 3, own / 4} <= set(means.values())


# gradients ------------------------------------------------------------------------------------------------------------


def test_the_weights_that_predict_the_loss_predict_the_gradient() -> None:
    (way,) = (w for w in predictions.means(PARTS) if w.words.endswith("ranks of what each divides by its own count"))
    observed = summed([1 / 42, 1 / 42, 1 / 66, 1 / 66])
    assert predictions.reproduces(GRADIENTS.predict(way.weigh), observed)
    assert not predictions.reproduces(GRADIENTS.predict(way.weigh), summed([1 / 54] * 4))


def test_terms_that_count_other_things_are_weighed_apart() -> None:
    other = {number: {"a": RNG.normal(size=5), "b": RNG.normal(size=7)} for number in range(4)}
    parts = [
        Part(p.number, p.rank, p.rows, {**p.sums, "rows": 1.0}, {**p.counts, "rows": 2.0}, {"next": 1.0, "rows": 0.3})
        for p in PARTS
    ]
    gradients = PartGradients(parts, {"next": OF_PARTS, "rows": other})
    way = predictions.means(parts)[3]  # over ranks
    wanted = summed([1 / 42, 1 / 42, 1 / 66, 1 / 66])
    wanted = {n: v + 0.3 / 8 * sum(other[i][n] for i in range(4)) for n, v in wanted.items()}
    assert predictions.reproduces(gradients.predict(way.weigh), wanted)


def test_a_factor_is_one_for_every_tensor_or_none() -> None:
    a = summed([1.0] * 4)
    assert predictions.common_factor({n: 2 * v for n, v in a.items()}, a) == pytest.approx(2)
    assert predictions.common_factor({**a, "b": 2 * a["b"]}, a) is None
    assert predictions.common_factor({n: 2 * v * (1 + 1e-5 * (n == "b")) for n, v in a.items()}, a) is None


def test_weights_of_parts_are_found_and_only_where_there_is_one_answer() -> None:
    each = [OF_PARTS[i] for i in range(4)]
    assert predictions.fit_weights(summed([1, 2, 1, 0]), each) == pytest.approx([1, 2, 1, 0], abs=1e-9)
    assert predictions.fit_weights({n: v + 1e-3 for n, v in summed([1, 1, 1, 1]).items()}, each) is None
    assert predictions.fit_weights(summed([1, 1, 1, 1]), [*each, each[0]]) is None  # two parts are alike


# rounding, clipping, rates --------------------------------------------------------------------------------------------


def shares() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [{"a": rng.normal(size=200), "b": 1e-3 * rng.normal(size=50)} for _ in range(2)]


def test_rounding_to_a_precision_is_what_torch_does() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(0).normal(size=1000)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        wanted = torch.from_numpy(values).to(dtype).double().numpy()
        np.testing.assert_allclose(predictions.round_to(values, predictions.LOWER[name]), wanted, rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", predictions.LOWER)
def test_a_sum_of_rounded_parts_is_recognised_by_its_precision(name: str) -> None:
    parts, bits = shares(), predictions.LOWER[name]
    observed = {n: sum(predictions.round_to(2 * part[n], bits) for part in parts) / 2 for n in parts[0]}
    assert predictions.find_lower_precision(observed, parts) == name


@pytest.mark.parametrize("size", [1e-3, 1e-6])
def test_a_difference_of_that_size_that_is_no_rounding_is_not(size: float) -> None:
    parts = shares()
    observed = {n: (parts[0][n] + parts[1][n]) * (1 + size) for n in parts[0]}
    assert predictions.find_lower_precision(observed, parts) == ""


def test_gradients_that_were_clipped_before_their_mean_are_recognised_by_their_norms() -> None:
    parts = shares()
    norms = [2 * math.sqrt(sum(float(np.square(v).sum()) for v in part.values())) for part in parts]
    limit = min(norms) / 2
    assert predictions.find_clipping([limit / norm for norm in norms], parts, limit)
    assert not predictions.find_clipping([0.5, 0.5], parts, limit * 0.9)
    assert not predictions.find_clipping([1.0, 1.0], parts, 2 * max(norms))


def test_a_schedule_stepped_per_process_is_that_of_later_updates() -> None:
    rates = [0.0, 1.0, 0.75, 0.5, 0.25]
    assert predictions.stepped_per_process(rates[::2], rates, 2)
    assert not predictions.stepped_per_process([0.0, 2.0, 1.5], rates, 2)  # scaled by the number of processes
    assert not predictions.stepped_per_process([0.5, 0.75], rates, 2)  # wrong at step 1
    assert not predictions.stepped_per_process([0.0, 0.25], rates[:2], 4)  # nobody knows the rate of update 4


# a loss of some of its rows -------------------------------------------------------------------------------------------

VALUES, TARGETS = [3.0, 1.0, 4.0, 1.5], [2.0, 5.0, 1.0, 3.0]
SETS = [rows for size in range(1, 5) for rows in combinations(range(4), size)]


def mean(rows: tuple[int, ...]) -> float:
    return sum(VALUES[r] * TARGETS[r] for r in rows) / sum(TARGETS[r] for r in rows)


def test_a_sum_over_rows_is_one() -> None:
    assert predictions.is_additive({rows: sum(VALUES[r] for r in rows) for rows in SETS})
    assert not predictions.is_additive({rows: mean(rows) for rows in SETS})


def test_a_constant_beside_the_sum_of_rows_is_found_and_nothing_else_is_taken_for_one() -> None:
    with_constant = {rows: sum(VALUES[r] for r in rows) + 0.3 for rows in SETS}
    assert predictions.find_constant(with_constant) == pytest.approx(0.3)
    assert predictions.find_constant({rows: sum(VALUES[r] for r in rows) for rows in SETS}) is None
    assert predictions.find_constant({rows: mean(rows) for rows in SETS}) is None
    assert predictions.find_constant({rows: len(rows) ** 2 + 0.3 for rows in SETS}) is None
    pairs = {rows: value for rows, value in with_constant.items() if len(rows) < 3}
    assert predictions.find_constant(pairs) is None  # any three numbers would do


def test_a_loss_that_divides_by_its_own_targets_shows_their_numbers() -> None:
    weights = predictions.own_mean_weights({rows: mean(rows) for rows in SETS})
    assert weights == pytest.approx([target / 5 for target in TARGETS])


@pytest.mark.parametrize(
    "loss",
    [
        lambda rows: float(np.var([VALUES[r] for r in rows])) + 1,  # a statistic
        lambda rows: max(VALUES[r] for r in rows),
        lambda rows: mean(rows) * (1 + 0.01 * len(rows)),  # depends on how many they are
    ],
)
def test_what_is_no_mean_of_its_rows_is_not(loss: object) -> None:
    assert callable(loss)
    assert predictions.own_mean_weights({rows: loss(rows) for rows in SETS}) is None


def test_no_weights_are_fitted_to_what_is_not_finite() -> None:
    parts = [OF_PARTS[0], {name: value * np.nan for name, value in OF_PARTS[1].items()}]
    assert predictions.fit_weights(summed([1, 1, 0, 0]), parts) is None
    assert predictions.fit_weights(parts[1], [OF_PARTS[0], OF_PARTS[1]]) is None
