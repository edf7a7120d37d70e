"""Mixtures: exact shares that never drift, each source in epochs of its own, any position without those before it."""

from __future__ import annotations

import tracemalloc
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from unisono.config.schema import data as config
from unisono.data.order.lanes import SINGLE_LANE, Lanes
from unisono.data.order.mixture import Joined, MixtureOrder, count_places, whole_weights
from unisono.data.order.order import Indices, Order
from unisono.runtime.errors import ConfigError

weights = st.lists(
    st.one_of(st.just(0.0), st.integers(1, 9).map(float), st.floats(1e-3, 100.0).map(lambda w: round(w, 3))),
    min_size=1,
    max_size=9,
).filter(any)


class Numbers:
    """Rows that say where they are from, with lengths."""

    def __init__(self, name: str, rows: int, length: int = 1) -> None:
        self.name, self.rows, self.lengths = name, rows, np.full(rows, length)

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> tuple[str, int]:
        if not 0 <= row < self.rows:
            raise IndexError(row)
        return self.name, row


def joined(*sizes: int) -> Joined:
    return Joined({f"s{number}": Numbers(f"s{number}", size) for number, size in enumerate(sizes)})


def mixed(
    sources: Joined, asked: list[float], lanes: Lanes = SINGLE_LANE, batch: int = 12, seed: int = 0, **more: Any
) -> MixtureOrder:
    names = list(sources.sources)
    changes = [
        {"step": step, "weights": dict(zip(names, other, strict=True))} for step, other in more.pop("changes", [])
    ]
    how = config.Mixture(weights=dict(zip(names, asked, strict=True)), changes=changes, **more)
    streams = [Order(len(source), 100 + number) for number, source in enumerate(sources.sources.values())]
    return MixtureOrder.from_config(how, sources, streams, seed, batch, lanes)


def numbers(sources: Joined, rows: Indices) -> Indices:
    """The source of each row."""
    return np.searchsorted(sources.starts, rows, side="right") - 1


# sources as one -------------------------------------------------------------------------------------------------------


def test_joined_rows_are_those_of_their_sources_one_after_the_other() -> None:
    sources = joined(3, 1, 4)
    expected = [(name, row) for name, size in (("s0", 3), ("s1", 1), ("s2", 4)) for row in range(size)]
    assert [sources[row] for row in range(len(sources))] == expected
    assert [sources.name(row) for row in range(len(sources))] == expected


@pytest.mark.parametrize("row", [-1, 8])
def test_a_row_that_is_not_there_is_an_index_error(row: int) -> None:
    with pytest.raises(IndexError, match="of 8"):
        joined(3, 1, 4)[row]


def test_joined_sources_have_what_all_of_them_have() -> None:
    one, other = Numbers("a", 2, length=5), Numbers("b", 3, length=7)
    together = Joined({"a": one, "b": other})
    assert together.lengths.tolist() == [5, 5, 7, 7, 7]
    assert getattr(together, "blocks", None) is getattr(together, "fingerprint", None) is None
    one.blocks, other.blocks = np.array([2]), np.array([1, 2])  # type: ignore[attr-defined]
    assert Joined({"a": one, "b": other}).blocks.tolist() == [2, 1, 2]


def test_the_fingerprint_of_several_is_of_each_and_of_their_names_and_order() -> None:
    def told(**prints: str) -> str:
        sources = {name: Numbers(name, 2) for name in prints}
        for name, text in prints.items():
            sources[name].fingerprint = text  # type: ignore[attr-defined]
        return Joined(sources).fingerprint

    same = told(a="1", b="2")
    assert told(a="1", b="2") == same
    assert len({same, told(a="1", b="3"), told(b="2", a="1"), told(a="1", c="2"), told(a="2", b="1")}) == 5


# shares ---------------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(asked=weights, places=st.integers(0, 10**15))
def test_counts_add_up_and_are_less_than_two_away_from_the_shares_however_far(asked: list[float], places: int) -> None:
    weights = whole(asked)
    counts = count_places(weights, places)
    assert sum(counts) == places
    for number, (count, weight) in enumerate(zip(counts, asked, strict=True)):
        assert abs(count - places * share(weights, number)) < 2
        assert float(share(weights, number)) == pytest.approx(weight / sum(asked))
        assert weight or not count


@settings(max_examples=60, deadline=None)
@given(one=st.integers(1, 999), other=st.integers(1, 999), places=st.integers(0, 10**12))
def test_of_two_sources_each_has_its_share_rounded(one: int, other: int, places: int) -> None:
    first, _ = count_places((one, other), places)
    assert abs(first - places * Fraction(one, one + other)) <= Fraction(1, 2)


def test_the_shares_of_many_very_different_sources_do_not_add_up_their_errors() -> None:
    weights = whole([1.5**number for number in range(40)])
    worst = max(
        abs(count - n * share(weights, number))
        for n in range(600)
        for number, count in enumerate(count_places(weights, n))
    )
    assert 0.5 < worst < 1.7


@settings(max_examples=60, deadline=None)
@given(asked=weights, first=st.integers(0, 10**12))
def test_each_place_more_is_one_more_of_one_source(asked: list[float], first: int) -> None:
    weights = whole(asked)
    counts = np.array([count_places(weights, first + more) for more in range(40)])
    steps = np.diff(counts, axis=0)
    assert steps.min() >= 0
    assert (steps.sum(axis=1) == 1).all()


def whole(asked: list[float]) -> tuple[int, ...]:
    names = [f"s{number}" for number in range(len(asked))]
    weights = dict(zip(names, asked, strict=True))
    return whole_weights(config.Mixture(weights=weights), {name: [1] for name in names})[0]


def share(weights: tuple[int, ...], number: int) -> Fraction:
    return Fraction(weights[number], sum(weights))


@settings(max_examples=40, deadline=None)
@given(asked=weights, block=st.integers(1, 9), seed=st.integers(0, 99))
def test_every_block_has_the_same_counts_where_they_are_whole(asked: list[float], block: int, seed: int) -> None:
    sources = joined(*range(3, 3 + len(asked)))
    quotas = [round(weight) for weight in asked]
    if not sum(quotas):
        quotas[0] = 1
    mixture = mixed(sources, [float(w) for w in quotas], seed=seed, block=sum(quotas) * block)
    seen = numbers(sources, mixture(np.arange(4 * sum(quotas) * block)))
    for part in np.split(seen, 4):
        assert np.bincount(part, minlength=len(quotas)).tolist() == [weight * block for weight in quotas]


def test_shares_that_are_not_whole_take_turns() -> None:
    sources = joined(50, 50, 50)
    seen = numbers(sources, mixed(sources, [1, 1, 1], block=10)(np.arange(300)))
    per_block = np.array([np.bincount(part, minlength=3) for part in np.split(seen, 30)])
    assert set(per_block.ravel().tolist()) == {3, 4}
    assert np.bincount(seen).tolist() == [100, 100, 100]


def test_a_block_is_mixed_and_each_one_otherwise() -> None:
    sources = joined(500, 500)
    seen = numbers(sources, mixed(sources, [1, 1], block=100)(np.arange(2000)))
    blocks = [tuple(part.tolist()) for part in np.split(seen, 20)]
    assert len(set(blocks)) == 20
    assert abs(np.corrcoef(seen[:-1], seen[1:])[0, 1]) < 0.1


def test_weights_of_tokens_share_out_tokens() -> None:
    sources = Joined({"long": Numbers("long", 90, length=30), "short": Numbers("short", 400, length=10)})
    how = config.Mixture(weights={"long": 3, "short": 1}, by="tokens")
    assert len(set(whole_weights(how, sources.sources)[0])) == 1
    streams = [Order(len(source), 0) for source in sources.sources.values()]
    rows = MixtureOrder.from_config(how, sources, streams, 0, 8, SINGLE_LANE)(np.arange(5000))
    tokens = np.bincount(numbers(sources, rows), weights=sources.lengths[rows])
    assert tokens.tolist() == [75_000, 25_000]


# each source in its own epochs ----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    data=st.data(),
    block=st.integers(1, 50),
    seed=st.integers(0, 99),
)
def test_each_source_gives_each_row_once_per_epoch_of_its_own(
    sizes: list[int], data: st.DataObject, block: int, seed: int
) -> None:
    asked = data.draw(st.lists(st.integers(0, 5).map(float), min_size=len(sizes), max_size=len(sizes)).filter(any))
    sources = joined(*sizes)
    mixture = mixed(sources, asked, seed=seed, block=block)
    positions = np.arange(600)
    rows, epochs = mixture.locate(positions)
    for number, size in enumerate(sizes):
        own = numbers(sources, rows) == number
        order = Order(size, 100 + number)
        assert np.array_equal(rows[own] - sources.starts[number], order(np.arange(own.sum())))
        assert np.array_equal(epochs[own], np.arange(own.sum()) // size)


@settings(max_examples=30, deadline=None)
@given(asked=weights, block=st.integers(5, 50), cuts=st.lists(st.integers(0, 500), max_size=6), far=st.booleans())
def test_a_mixture_is_the_same_for_any_way_of_cutting_positions(
    asked: list[float], block: int, cuts: list[int], far: bool
) -> None:
    sources = joined(*range(5, 5 + len(asked)))
    mixture, positions = mixed(sources, asked, block=block, changes=[(7, asked[::-1])]), np.arange(500)
    positions += 10**12 if far else 0
    rows = mixture(positions)
    assert np.array_equal(np.concatenate([mixture(part) for part in np.split(positions, sorted(cuts))]), rows)
    assert np.array_equal(mixture(positions[::-1])[::-1], rows)


def test_a_source_of_weight_zero_is_never_asked() -> None:
    class Never(Order):
        def __call__(self, positions: Indices) -> Indices:
            raise AssertionError

    sources = joined(5, 5)
    how = config.Mixture(weights={"s0": 1, "s1": 0})
    mixture = MixtureOrder.from_config(how, sources, [Order(5, 0), Never(5, 0)], 0, 4, SINGLE_LANE)
    assert mixture(np.arange(50)).max() < 5
    never = MixtureOrder.from_config(
        config.Mixture(weights={"s0": 1, "s1": 1}), sources, [Order(5, 0), Never(5, 0)], 0, 4, SINGLE_LANE
    )
    with pytest.raises(AssertionError):
        never(np.arange(50))


def test_seeking_far_needs_no_memory() -> None:
    sources = Joined({"large": range(10**12), "middle": range(10**9), "small": range(10)})
    mixture = mixed(sources, [0.7, 0.25, 0.05])
    mixture(np.arange(64))  # what is kept of a first block
    tracemalloc.start()
    rows = mixture(10**12 + np.arange(64))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(rows) == 64
    assert peak < 500_000


def test_the_order_of_a_mixture_is_pinned() -> None:
    """A change of these numbers would change every mixed run that was ever interrupted."""
    mixture = mixed(joined(4, 6, 2), [2, 1, 1], block=8)
    assert mixture(np.arange(16)).tolist() == [3, 0, 11, 2, 9, 1, 10, 5, 1, 10, 7, 8, 2, 11, 0, 3]


# changes --------------------------------------------------------------------------------------------------------------


def test_a_change_begins_exactly_at_its_step_and_the_block_before_is_short() -> None:
    sources = joined(100, 100)
    mixture = mixed(sources, [1, 0], changes=[(5, [0, 1]), (9, [1, 1])], batch=12, block=100)
    seen = numbers(sources, mixture(np.arange(308)))
    assert seen[:60].tolist() == [0] * 60
    assert seen[60:108].tolist() == [1] * 48
    assert np.bincount(seen[108:208]).tolist() == [50, 50]


@settings(max_examples=60, deadline=None)
@given(first=weights, step=st.integers(1, 30), block=st.integers(1, 70))
def test_shares_are_kept_up_to_a_change_and_from_it_on(first: list[float], step: int, block: int) -> None:
    sources = joined(*range(5, 5 + len(first)))
    mixture = mixed(sources, first, changes=[(step, first[::-1])], batch=12, block=block)
    cut, after = 12 * step, 7 * block
    seen = numbers(sources, mixture(np.arange(cut + after)))
    assert tuple(np.bincount(seen[:cut], minlength=len(first))) == count_places(whole(first), cut)
    assert tuple(np.bincount(seen[cut:], minlength=len(first))) == count_places(whole(first[::-1]), after)


def test_sources_go_on_where_they_were_at_a_change() -> None:
    sources = joined(40, 40)
    mixture = mixed(sources, [3, 1], changes=[(2, [1, 3])], batch=10, block=8)
    rows = mixture(np.arange(60))
    first = rows[rows < 40]
    assert np.array_equal(first, Order(40, 100)(np.arange(len(first))))


# lanes ----------------------------------------------------------------------------------------------------------------


def test_each_lane_mixes_for_itself() -> None:
    sources, lanes = joined(300, 300), Lanes(4, 3)
    positions = np.arange(12 * 60)
    seen = numbers(sources, mixed(sources, [2, 1], lanes, block=30)(positions))
    of, _ = lanes(positions)
    by_lane = [tuple(seen[of == lane].tolist()) for lane in range(4)]
    assert len(set(by_lane)) == 4
    for own in by_lane:
        assert [sum(own[start : start + 30]) for start in range(0, 180, 30)] == [10] * 6


def test_in_lanes_a_change_begins_at_the_same_step_for_all() -> None:
    sources, lanes = joined(300, 300), Lanes(4, 3)
    seen = numbers(sources, mixed(sources, [1, 0], lanes, changes=[(7, [0, 1])], batch=12)(np.arange(12 * 12)))
    assert seen.tolist() == [0] * 84 + [1] * 60


# epochs of a mixture --------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    data=st.data(),
    block=st.integers(1, 50),
    change=st.integers(1, 9),
)
def test_an_epoch_ends_when_the_first_or_the_last_source_is_used_up(
    sizes: list[int], data: st.DataObject, block: int, change: int
) -> None:
    draw = st.lists(st.integers(1, 5).map(float), min_size=len(sizes), max_size=len(sizes))
    sources, asked, later = joined(*sizes), data.draw(draw), data.draw(draw)
    ends = {}
    for until in ("first", "all"):
        mixture = mixed(sources, asked, block=block, until=until, changes=[(change, later)], batch=5)
        rows = mixture(np.arange(mixture.size))
        seen = [len(set(rows[numbers(sources, rows) == number].tolist())) for number in range(len(sizes))]
        full = [count == size for count, size in zip(seen, sizes, strict=True)]
        assert any(full) if until == "first" else all(full)
        short = mixture(np.arange(mixture.size - 1))
        assert len(set(short.tolist())) == len(set(rows.tolist())) - 1, "the last position completes a source"
        ends[until] = mixture.size
    assert ends["first"] <= ends["all"]


def test_a_source_of_weight_zero_does_not_count_for_an_epoch() -> None:
    assert mixed(joined(10, 10), [1, 0], until="all").size == 10


def test_an_epoch_that_would_never_end_is_refused_with_what_to_do() -> None:
    mixture = mixed(joined(10, 1000), [1, 1], changes=[(1, [1, 0])])
    with pytest.raises(
        ConfigError, match=r"'s1' of data.mixture is never used up, since its weight becomes 0 before; set the length"
    ):
        _ = mixture.size
    assert mixed(joined(10, 1000), [1, 1], changes=[(1, [1, 0])], until="first").size < 30


# refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"web": 1, "cdoe": 1}, r"there is no source 'cdoe', did you mean 'code'\?$"),
        ({"web": 1}, r"has no weight for 'code'; give it one \(0 to leave it out\)$"),
        ({}, r"weights sum to 0; at least one must be positive"),
        ({"web": 0, "code": 0}, r"weights sum to 0; at least one must be positive"),
        ({"web": -1, "code": 2}, r"greater than or equal to 0"),
        ({"web": float("nan"), "code": 2}, r"finite number"),
    ],
)
def test_weights_that_do_not_fit_are_refused_with_what_to_do(asked: dict[str, float], message: str) -> None:
    sources = {"web": Numbers("web", 3), "code": Numbers("code", 3)}
    with pytest.raises((ConfigError, ValidationError), match=message):
        whole_weights(config.Mixture(weights=asked), sources)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([(4, {"a": 1, "b": 1}), (4, {"a": 1, "b": 2})], r"step 4 comes after step 4; put them in order"),
        ([(4, {"a": 1, "b": 1}), (3, {"a": 1, "b": 2})], r"step 3 comes after step 4; put them in order"),
        ([(4, {"a": 0, "b": 0})], r"changes\.0\.weights sum to 0"),
        ([(4, {"a": 1, "c": 0})], r"changes\.0\.weights: 'c' is not in weights, valid here: a, b"),
        ([(4, {"a": 1})], r"changes\.0\.weights has no weight for 'b'"),
        ([(0, {"a": 1, "b": 1})], r"greater than 0"),
    ],
)
def test_changes_that_do_not_fit_are_refused_with_what_to_do(changes: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config.Mixture(weights={"a": 1, "b": 2}, changes=[{"step": s, "weights": w} for s, w in changes])


def test_tokens_without_lengths_are_refused_naming_the_source() -> None:
    sources = {"known": Numbers("known", 3), "unknown": [1, 2, 3]}
    with pytest.raises(ConfigError, match=r"by=tokens needs the lengths of its sources, but 'unknown' has no lengths"):
        whole_weights(config.Mixture(weights={"known": 1, "unknown": 1}, by="tokens"), sources)
    assert whole_weights(config.Mixture(weights={"known": 1, "unknown": 0}, by="tokens"), sources)[0][1] == 0


def test_a_source_without_a_token_is_refused_where_tokens_are_shared_out() -> None:
    with pytest.raises(ConfigError, match=r"the source 'empty' has no tokens"):
        whole_weights(config.Mixture(weights={"empty": 1}, by="tokens"), {"empty": Numbers("empty", 3, length=0)})
