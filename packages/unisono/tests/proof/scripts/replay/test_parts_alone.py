"""A cause is named by what one process has computed of each rank's rows alone, and only where that shows it."""

from __future__ import annotations

import numpy as np
import pytest

from unisono.proof.diagnoses.remedies import build_diagnosis
from unisono.proof.scripts.recording.script_collectives import Exchange
from unisono.proof.scripts.replay.parts_alone import (
    Computed,
    explain_exchange,
    explain_parts,
    explain_process,
    find_factor,
)
from unisono.runtime.fault_names import FaultName

LIMIT = 1e-9


def made(loss: float, *gradient: float, beside: tuple[str, ...] = (), standardised: bool = False) -> Computed:
    return Computed(loss, {"w": np.array(gradient)}, beside, standardised)


RANKS = [made(1.0, 0.5, 2.0), made(3.0, -1.0, 4.0)]


def test_the_loss_of_all_rows_that_is_no_sum_of_the_ranks_is_a_statistic_of_parts() -> None:
    found = explain_parts(RANKS, RANKS, made(2.5, 0.1, 0.1), None, LIMIT)
    assert found is not None and found.fault == FaultName.STATISTIC_OF_PARTS


@pytest.mark.parametrize("loss", [2.0, 4.0])
def test_losses_that_add_up_are_no_statistic_where_only_gradients_differ(loss: float) -> None:
    found = explain_parts(RANKS, RANKS, made(loss, 0.1, 0.1), None, LIMIT)
    assert found is not None and found.fault == FaultName.GRADIENTS_BY_LAYOUT


def test_a_term_of_every_process_is_what_the_same_rows_given_twice_lack() -> None:
    """Rows of rank 0 have 0.8 and (0.4, 1.5), those of rank 1 2.8 and (-1.1, 3.5), and the term 0.2 and (0.1, 0.5)."""
    whole, twice = made(3.8, -0.6, 5.5), made(1.8, 0.9, 3.5)
    found = explain_parts(RANKS, RANKS, whole, twice, LIMIT)
    assert found is not None and found.fault == FaultName.TERM_PER_MICRO_BATCH
    found = explain_parts(RANKS, RANKS, whole, made(1.8, 0.9, 3.6), LIMIT)  # the gradient is not that of the term
    assert found is not None and found.fault == FaultName.STATISTIC_OF_PARTS


def test_what_goes_past_the_model_is_named_before_the_loss() -> None:
    by_own = [made(1.0, 0.5, 2.0, beside=("2 times …: their mean is 0",), standardised=True), RANKS[1]]
    found = explain_parts(RANKS, by_own, made(2.0, 0.1, 0.1), None, LIMIT)
    assert found is not None and found.fault == FaultName.STATISTIC_OF_PARTS
    found = explain_parts(RANKS, [made(1.0, 0.5, 2.0, beside=("no multiple",)), RANKS[1]], RANKS[0], None, LIMIT)
    assert found is not None and found.fault == FaultName.LOSS_BY_PROCESS


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
    found = explain_process(RANKS, [RANKS[0], made(3.1, -1.0, 4.0)], LIMIT)
    assert found.fault == FaultName.LOSS_BY_PROCESS
    assert "on rank 1" in found.because and "on rank 0" not in found.because


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_number_of_processes_in_the_loss_hides_no_statistic_of_parts(factor: float) -> None:
    ranks = [one.times(factor) for one in RANKS]
    assert find_factor(ranks, RANKS, LIMIT) == factor
    found = explain_parts(ranks, ranks, made(2.5, 0.1, 0.1), None, LIMIT, factor)
    assert found is not None and found.fault == FaultName.STATISTIC_OF_PARTS
    assert f"{factor:g} times" in found.because
    assert find_factor([ranks[0], RANKS[1]], RANKS, LIMIT) is None  # of one rank alone
    assert find_factor([made(1.0, 1.0, 4.0), made(3.0, -2.0, 8.0)], RANKS, LIMIT) is None  # of the gradient alone
