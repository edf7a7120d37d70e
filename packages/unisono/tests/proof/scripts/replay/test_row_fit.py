"""What a rank has of some rows is held against what one process has of them: the same, standardised, or another."""

from __future__ import annotations

import torch

from unisono.proof.scripts.replay.row_fit import RowFit, describe_fit, find_rows, fit_parts

RETURNS = torch.tensor([0.3, -1.2, 2.0, 0.7, 1.1, -0.4, 0.9, 1.6], dtype=torch.float64)


def standardise(rows: torch.Tensor) -> torch.Tensor:
    return (rows - rows.mean()) / (rows.std() + 1e-8)


def test_rows_are_found_in_any_order_and_not_where_one_is_missing_or_there_twice() -> None:
    rows = torch.arange(12.0).reshape(4, 3)
    assert find_rows(rows, rows[[2, 0]]) == [2, 0]
    assert find_rows(rows, rows + 1) is None
    assert find_rows(torch.cat([rows, rows]), rows) is None


def test_what_is_standardised_by_the_rows_of_a_rank_is_told_from_what_is_multiplied() -> None:
    mine, every = RETURNS[:6], standardise(RETURNS)[:6]
    standard, doubled, squared = (describe_fit(every, one) for one in (standardise(mine), 2 * every + 0.5, every**2))
    assert standard is not None and standard.standardised and "their mean is 0" in standard.words
    assert doubled is not None and not doubled.standardised and doubled.words.startswith("2 times")
    assert describe_fit(every, every.clone()) is None
    assert squared == RowFit("no multiple of what one process has for the same rows")


def test_parts_that_are_scaled_by_their_own_statistics_are_found_by_stride_and_by_stretch() -> None:
    whole = torch.randn(16, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for parts in ([whole[0::2], whole[1::2]], [whole[:8], whole[8:]]):
        found = fit_parts({"x": whole}, [{"x": part * (2 + n) - n} for n, part in enumerate(parts)])
        assert found is not None
        factors = torch.tensor(found, dtype=torch.float64)
        assert torch.allclose(factors, torch.tensor([[2.0, 0.0]] * 3 + [[3.0, -1.0]] * 3, dtype=torch.float64))
        assert fit_parts(whole, parts) is None
        assert fit_parts(whole, [part**3 for part in parts]) is None


def test_other_stretches_of_a_grid_and_other_flags_are_no_scaled_rows() -> None:
    grid = torch.linspace(-3, 3, 96, dtype=torch.float64).unsqueeze(1)
    assert fit_parts(grid[:16], [grid[:8], grid[48:56]]) is None
    flags = (torch.arange(96) % 2).double().unsqueeze(1)
    assert fit_parts(flags[:16], [flags[1:9], flags[48:56]]) is None
    measured = torch.cat([grid, grid.sin()], 1)
    scaled = [2 * part + 1 for part in (measured[0:16:2], measured[1:16:2])]
    assert fit_parts(measured[:16], scaled) is not None
