"""Which micro-batch fits is found from few peaks, and none is tried that does not fit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unisono.config.batch_split import divisors
from unisono.launch.autobatch import memory_fit


def search(
    sizes: list[int], base: float, per_row: float, room: float, breaks: float = float("inf")
) -> tuple[int, dict]:
    """What is measured, size by size, where sizes from `breaks` on run out of memory."""
    peaks: dict[int, float] = {}
    failed, measured = float("inf"), 0
    while (size := memory_fit.next_size(sizes, peaks, room, failed)) is not None:
        measured += 1
        assert size not in peaks
        assert size < failed
        if size >= breaks:
            failed = size
        else:
            peaks[size] = base + per_row * size
    return measured, peaks


@given(st.integers(1, 5000), st.floats(1, 1e9), st.floats(1e-3, 1e6), st.floats(0, 3000))
def test_the_largest_that_fits_is_found_and_nothing_larger_is_tried(
    rows: int, base: float, per_row: float, most: float
) -> None:
    sizes = divisors(rows)
    room = (base + per_row * (most + 0.5)) * (1 + 1e-9)
    measured, peaks = search(sizes, base, per_row, room)
    fitting_sizes = [size for size in sizes if base + per_row * size <= room]
    found = memory_fit.largest_fitting(peaks, room)
    if fitting_sizes:
        assert found is not None
        # Sizes that lie within rounding of the line may be one less.
        assert found == fitting_sizes[-1] or abs(base + per_row * fitting_sizes[-1] - room) < 1e-6 * room
        assert measured <= 14
    else:
        assert found is None
        assert measured == 1
    over = [size for size in peaks if peaks[size] > room]
    # Of one size nothing is known of the next one; from two on, none is tried that does not fit.
    assert over in ([], [sizes[0]], sizes[1:2])


def test_a_size_that_ran_out_of_memory_is_not_tried_again() -> None:
    sizes = divisors(720)
    measured, peaks = search(sizes, 100.0, 1.0, room=10_000.0, breaks=100)
    assert memory_fit.largest_fitting(peaks, 10_000.0) == 90
    assert measured <= 10


def test_steps_are_small_where_the_first_sizes_say_little() -> None:
    """What is taken before the step hides that of few rows."""
    sizes = divisors(5040)
    peaks: dict[int, float] = {}
    while (size := memory_fit.next_size(sizes, peaks, 1000.0, float("inf"))) is not None:
        peaks[size] = max(500.0, 100.0 + size)
        assert peaks[size] <= 1000.0
    assert memory_fit.largest_fitting(peaks, 1000.0) == 840


def test_a_line_is_no_flatter_than_between_its_last_points() -> None:
    line = memory_fit.MemoryLine.fit({1: 100.0, 2: 100.0, 4: 102.0})
    assert line.per_row == 1.0
    assert line.rows(110.0) == 12.0
    assert memory_fit.MemoryLine.fit({3: 50.0}).rows(60.0) == float("inf")
