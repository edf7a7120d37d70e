"""A cause is named by what one process has computed of each rank's rows alone, and only where that shows it."""

from __future__ import annotations

import numpy as np
import pytest

from unisono.proof.diagnoses.remedies import build_diagnosis
from unisono.proof.scripts.recording.script_collectives import Exchange
from unisono.proof.scripts.replay.parts_alone import (
    Computed,
    combine,
    explain_exchange,
    explain_parts,
    explain_process,
    explain_rest,
    find_factor,
    find_rest,
    is_counted_alone,
)
from unisono.runtime.fault_names import FaultName

LIMIT = 1e-9


def made(loss: float, *gradient: float, beside: tuple[str, ...] = (), standardised: bool = False) -> Computed:
    return Computed(loss, {"w": np.array(gradient)}, beside, standardised)


RANKS = [made(1.0, 0.5, 2.0), made(3.0, -1.0, 4.0)]
TWICE = made(2.0, 1.0, 4.0)  # rows of rank 0 two times, in a loss without a term that no row has
DRAW = np.random.default_rng(1)
ROWS = [Computed(float(DRAW.normal()), {"w": DRAW.normal(size=12)}) for _ in range(2)]  # what they add, on each rank
TERM = Computed(0.3, {"w": DRAW.normal(size=12)})
OPEN = build_diagnosis(FaultName.LOSS_BY_LAYOUT, "it differs")


@pytest.mark.parametrize(("loss", "limit"), [(2.5, LIMIT), (2.001, 1e-3)])  # fp32 knows a loss better than a gradient
def test_the_loss_of_all_rows_that_is_no_sum_of_the_ranks_is_a_statistic_of_parts(loss: float, limit: float) -> None:
    """Unless nobody could try whether it has a term that no row has."""
    found = explain_parts(RANKS, RANKS, made(loss, 0.1, 0.1), TWICE, limit)
    assert found.fault == FaultName.STATISTIC_OF_PARTS
    assert explain_parts(RANKS, RANKS, made(2.5, 0.1, 0.1), None, LIMIT).is_neutral


def test_a_gradient_of_all_rows_that_is_a_weighted_sum_of_the_ranks_is_no_statistic() -> None:
    whole = combine((0.9, ROWS[0]), (0.3, ROWS[1]))
    found = explain_parts(ROWS, ROWS, whole, combine((2.0, ROWS[0])), LIMIT)
    assert found.fault == FaultName.LOSS_BY_LAYOUT and "weighted by 0.9, 0.3" in found.because


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_term_of_every_process_is_found_where_the_loss_of_rows_is_divided_by_the_number_of_processes(
    factor: float,
) -> None:
    """A mean over the rows of a rank, divided by two, and a penalty that is not."""
    ranks = [combine((factor, rows), (1.0, TERM)) for rows in ROWS]
    alone = [combine((1.0, rows), (1.0, TERM)) for rows in ROWS]
    rest = find_rest(ranks, alone, LIMIT)
    assert rest is not None and rest[0] == pytest.approx(factor)
    whole = combine(*((factor, rows) for rows in ROWS), (1.0, TERM))
    found = explain_rest(ranks, *rest, whole, LIMIT, OPEN, True)
    assert found.fault == FaultName.TERM_PER_MICRO_BATCH and "2 times" in found.because
    for other, alike in ((whole, False), (combine((1.1, whole)), True)):  # another reduction, another loss of all rows
        assert explain_rest(ranks, *rest, other, LIMIT, OPEN, alike).fault == OPEN.fault


def test_a_term_that_ranks_have_otherwise_and_a_factor_are_said_without_a_name() -> None:
    alone = [combine((1.0, rows), (1.0, TERM)) for rows in ROWS]
    rest = find_rest([combine((1.0, rows), (2.0, TERM)) for rows in ROWS], alone, LIMIT)
    assert rest is not None and rest[0] == pytest.approx(1.0)
    found = explain_rest(ROWS, *rest, ROWS[0], LIMIT, OPEN, True)
    assert found.fault == OPEN.fault and "the same loss more on each, 0.3" in found.because
    counted = find_rest([combine((2.1, one)) for one in alone], alone, LIMIT)
    assert counted is not None and counted[1] is None
    assert "2.1 times" in explain_rest(ROWS, *counted, ROWS[0], LIMIT, OPEN, True).because
    assert find_rest([alone[0], combine((1.1, alone[1]))], alone, LIMIT) is None  # of one rank alone


@pytest.mark.parametrize("loss", [2.0, 4.0])
def test_losses_that_add_up_are_no_statistic_where_only_gradients_differ(loss: float) -> None:
    found = explain_parts(RANKS, RANKS, made(loss, 0.1, 0.1), None, LIMIT)
    assert found.fault == FaultName.GRADIENTS_BY_LAYOUT


def test_a_term_of_every_process_is_what_the_same_rows_given_twice_lack() -> None:
    """Rows of rank 0 have 0.8 and (0.4, 1.5), those of rank 1 2.8 and (-1.1, 3.5), and the term 0.2 and (0.1, 0.5)."""
    whole, twice = made(3.8, -0.6, 5.5), made(1.8, 0.9, 3.5)
    found = explain_parts(RANKS, RANKS, whole, twice, LIMIT)
    assert found.fault == FaultName.TERM_PER_MICRO_BATCH
    assert explain_parts(RANKS, RANKS, whole, twice, LIMIT, reduced_alike=False).is_neutral
    found = explain_parts(RANKS, RANKS, whole, made(1.8, 0.9, 3.6), LIMIT)  # the gradient is not that of the term
    assert found.fault == FaultName.STATISTIC_OF_PARTS


def test_what_goes_past_the_model_is_named_before_the_loss() -> None:
    by_own = [made(1.0, 0.5, 2.0, beside=("2 times …: their mean is 0",), standardised=True), RANKS[1]]
    found = explain_parts(RANKS, by_own, made(2.0, 0.1, 0.1), None, LIMIT)
    assert found.fault == FaultName.STATISTIC_OF_PARTS
    found = explain_parts(RANKS, [made(1.0, 0.5, 2.0, beside=("no multiple",)), RANKS[1]], RANKS[0], None, LIMIT)
    assert found.fault == FaultName.LOSS_BY_LAYOUT


def test_what_is_not_finite_is_no_evidence() -> None:
    """One process that is given the rows of a rank may take the mean of none of them."""
    assert made(1.0, 2.0).is_finite
    assert not made(float("nan"), 2.0).is_finite and not made(1.0, float("inf")).is_finite


def test_an_exchange_without_a_backward_pass_is_blamed_only_where_losses_add_up() -> None:
    open_name = build_diagnosis(FaultName.GRADIENTS_BY_LAYOUT, "they differ; nothing else")
    whole, by_torch = made(2.0, 9.0, 9.0), {"all_reduce": Exchange.WITH_BACKWARD.value}
    called = by_torch | {"all_reduce in a.py, line 1": "count", "all_gather in a.py, line 3": "rows"}
    found = explain_exchange(RANKS, whole, called, open_name, LIMIT)
    assert found.fault == FaultName.CROSS_SAMPLE_GRADIENTS
    assert "all_gather in a.py, line 3 has no backward pass" in found.because
    assert explain_exchange(RANKS, whole, by_torch, open_name, LIMIT) is open_name
    assert explain_exchange(RANKS, made(2.1, 9.0, 9.0), called, open_name, LIMIT) is open_name


def test_a_rank_whose_rows_have_another_loss_on_one_process_reads_something_else() -> None:
    found = explain_process(RANKS, [RANKS[0], made(3.1, -1.0, 4.0)], LIMIT, OPEN)
    assert found.fault == OPEN.fault and "not found why" in found.because
    assert "on rank 1" in found.because and "on rank 0" not in found.because


@pytest.mark.parametrize(("divided", "counted"), [(1.0, True), (2.0, False)])
def test_a_loss_divided_by_a_size_that_one_process_keeps_excuses_no_gradient_that_is_divided_twice(
    divided: float, counted: bool
) -> None:
    """Each rank divides by the 8 rows that one process has by itself, which was given the 16 of both."""
    ranks, whole = [one.times(1 / divided) for one in ROWS], combine(*((1.0, one) for one in ROWS))
    mean = combine(*((0.5, one) for one in ranks)).gradient
    assert is_counted_alone(ranks, whole, [mean, whole.gradient], 8 / 16, LIMIT) == counted
    assert is_counted_alone(ranks, whole, [{}, {}], 8 / 16, LIMIT)  # held in parts
    assert not is_counted_alone([ranks[0], ROWS[1].times(1.1)], whole, [mean, whole.gradient], 8 / 16, LIMIT)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_number_of_processes_in_the_loss_hides_no_statistic_of_parts(factor: float) -> None:
    ranks = [one.times(factor) for one in RANKS]
    assert find_factor(ranks, RANKS, LIMIT) == factor
    found = explain_parts(ranks, ranks, made(2.5, 0.1, 0.1), TWICE, LIMIT, factor)
    assert found.fault == FaultName.STATISTIC_OF_PARTS
    assert f"{factor:g} times" in found.because
    assert find_factor([ranks[0], RANKS[1]], RANKS, LIMIT) is None  # of one rank alone
    assert find_factor([made(1.0, 1.0, 4.0), made(3.0, -2.0, 8.0)], RANKS, LIMIT) is None  # of the gradient alone
