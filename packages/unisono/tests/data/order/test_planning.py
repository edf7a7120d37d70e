"""From settings to rows and a plan: the same order on every world size and after every interruption, or a refusal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.unisono.tests.data.made import OnlyBlocks
from packages.unisono.tests.runs import configuration
from packages.unisono.tests.tasks import LinearTask
from unisono.config.batch_split import BatchSplit
from unisono.data.order.blocks import CachedBlocks
from unisono.data.order.mixture import Joined
from unisono.data.order.order import Order
from unisono.data.order.plan import Plan, StreamPlan, cut_evenly, rows_of_micro_batches
from unisono.data.order.planning import build_plan, build_source, checkable_sources, source_facts
from unisono.data.sources import open_source
from unisono.runtime.errors import ConfigError, DataError
from unisono.task import Task


class Rows:
    """Rows that are numbers, in blocks."""

    def __init__(self, *blocks: int, first: int = 0) -> None:
        self.blocks, self.first = np.array(blocks), first

    def __len__(self) -> int:
        return int(self.blocks.sum())

    def __getitem__(self, row: int) -> int:
        if not 0 <= row < len(self):
            raise IndexError(row)
        return self.first + row


def task(given: Any) -> Task:
    return type("Rows", (LinearTask,), {"data": lambda self: given})()


def sources() -> dict[str, Rows]:
    return {"web": Rows(*[7] * 30), "code": Rows(*range(1, 29)), "books": Rows(*[3] * 25, first=1000)}


def planned(given: Any, batch: int = 48, world_size: int = 1, steps: int | None = 12, **data: Any) -> Plan:
    train = {"global_batch": batch, **({"steps": steps} if steps else {"epochs": data.pop("epochs")})}
    config = configuration(train=train, data=data)
    return build_plan(task(given), build_source(task(given), config, world_size), config, world_size)


WEIGHTS = {"web": 3, "code": 2, "books": 1}
CHANGES = [{"step": 5, "weights": {"web": 0, "code": 1, "books": 2}}]
HOW: dict[str, dict[str, Any]] = {
    "full": {},
    "none": {"shuffle": "none"},
    "blocks": {"shuffle": "blocks", "lanes": 24, "window": 2},
    "mixture": {"mixture": {"weights": WEIGHTS, "changes": CHANGES, "block": 30}},
    "mixture of rows in order": {"mixture": {"weights": WEIGHTS, "changes": CHANGES, "block": 30}, "shuffle": "none"},
    "mixture of blocks": {
        "mixture": {"weights": WEIGHTS, "changes": CHANGES, "block": 30},
        "shuffle": "blocks",
        "lanes": 24,
        "window": 2,
    },
}

# one order ------------------------------------------------------------------------------------------------------------


def consumed(plan: Plan, world_size: int, steps: range) -> list[list[tuple[int, int]]]:
    """The rows and epochs of each step, as the ranks take them, one after the other."""
    split = BatchSplit.create(plan.global_batch, world_size, None)
    result = []
    for step in steps:
        parts = [plan.samples(step, split.rows_of(rank)) for rank in range(world_size)]
        result.append([pair for part in parts for pair in zip(part.rows.tolist(), part.epochs.tolist(), strict=True)])
    return result


@pytest.fixture(scope="module")
def references() -> dict[str, list[list[tuple[int, int]]]]:
    return {name: consumed(planned(sources(), **how), 1, range(12)) for name, how in HOW.items()}


def test_the_orders_compared_are_different_ones(references: dict[str, list[list[tuple[int, int]]]]) -> None:
    assert len({str(order) for order in references.values()}) == len(HOW)
    for name, order in references.items():
        rows = [row for step in order for row, _ in step]
        assert (rows == sorted(rows)) == (name == "none")
        assert (len(set(rows)) > 300) or "mixture" in name


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(list(HOW)), world_size=st.sampled_from([1, 2, 3, 4, 8]), data=st.data())
def test_any_world_size_continues_the_same_order_after_any_interruption(
    references: dict[str, list[list[tuple[int, int]]]], name: str, world_size: int, data: st.DataObject
) -> None:
    made, then = data.draw(st.integers(0, 12)), data.draw(st.sampled_from([1, 2, 3, 4, 8]))
    before = consumed(planned(sources(), world_size=world_size, **HOW[name]), world_size, range(made))
    after = consumed(planned(sources(), world_size=then, **HOW[name]), then, range(made, 12))
    assert before + after == references[name]


class Long(Rows):
    """Rows of very different lengths."""

    @property
    def lengths(self) -> np.ndarray:
        return np.random.default_rng(0).integers(1, 1000, len(self))


@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 50), world_size=st.sampled_from([1, 2, 3, 4, 8]), steps=st.sampled_from([12, None]))
def test_grouping_by_length_moves_rows_within_their_batch_alone_and_alike_on_any_world_size(
    size: int, world_size: int, steps: int | None
) -> None:
    more = {} if steps else {"epochs": 1.3}  # its last batch is short
    plain, grouped = (planned(Long(200), steps=steps, **more, **how) for how in ({}, {"group_by_length": size}))
    number = 12 if steps else 5
    one, theirs = consumed(plain, 1, range(number)), consumed(grouped, 1, range(number))
    assert one != theirs
    assert [sorted(step) for step in one] == [sorted(step) for step in theirs]
    again = planned(Long(200), world_size=world_size, steps=steps, **more, group_by_length=size)
    assert consumed(again, world_size, range(number)) == theirs


def test_groups_need_little_padding_and_every_process_has_as_much_to_compute() -> None:
    lengths = Long(2000).lengths

    def padded_and_shares(**how: Any) -> tuple[float, float]:
        plan = planned(Long(2000), batch=64, **how)
        taken = [lengths[plan.samples(step, range(64)).rows] for step in range(12)]
        padded = sum(4 * part.max() for rows in taken for part in np.split(rows, 16))
        shares = np.sum([[4 * part.max() for part in np.split(rows, 16)] for rows in taken], axis=0).reshape(4, 4)
        return padded / np.concatenate(taken).sum(), float(np.ptp(shares.sum(1)) / shares.sum(1).mean())

    (before, _), (after, spread) = padded_and_shares(), padded_and_shares(group_by_length=4)
    assert before > 1.5 and after < 1.1 and spread < 0.05


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=9), data=st.data())
def test_no_other_cut_has_smaller_micro_batches(lengths: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(lengths)))
    longest_first = np.array(sorted(lengths, reverse=True))
    groups = cut_evenly(longest_first, count)
    assert [row for group in groups for row in group] == list(range(len(lengths)))
    assert len(groups) == count and all(groups)

    def largest(ends: Sequence[int]) -> int:
        return max((b - a) * max(1, int(longest_first[a])) for a, b in pairwise((0, *ends, len(lengths))))

    best = min(largest(ends) for ends in combinations(range(1, len(lengths)), count - 1))
    assert largest([group.stop for group in groups[:-1]]) == best


@pytest.mark.parametrize("steps", [12, None])
def test_balanced_micro_batches_are_the_same_on_any_world_size(steps: int | None) -> None:
    """The claim: of rows of 1 to 1000 units the largest takes a third less than four rows would."""
    more = {} if steps else {"epochs": 1.3}  # its last batch is short
    plan = planned(Long(200), steps=steps, **more, group_by_length="balanced")
    plain = planned(Long(200), steps=steps, **more)
    cut = [[], [], []]  # type: list[list[Any]]
    for step in range(plan.steps):
        assert sorted(plan.samples(step, range(plan.rows(step))).rows) == sorted(
            plain.samples(step, range(plan.rows(step))).rows
        )
        for found, world in zip(cut, (1, 2, 4), strict=True):
            split = BatchSplit(plan.global_batch, world, 4)
            passes = [list(rows_of_micro_batches(plan, split, step, rank)) for rank in range(world)]
            found.append([own for rank in passes for _, own, _ in rank if own])
            assert all(len(rank) == split.passes and all(take for *_, take in rank) for rank in passes)
    assert cut[0] == cut[1] == cut[2]
    lengths = Long(200).lengths
    rows = plan.samples(0, range(48)).rows
    sizes = [len(own) * lengths[rows[own.start : own.stop]].max() for own in cut[0][0]]
    assert max(sizes) < 0.67 * 4 * lengths[rows].max()


def test_what_balanced_micro_batches_do_not_fit_is_refused() -> None:
    config, own = configuration(data={"group_by_length": "balanced"}), task(Long(100))
    of_jax = config.model_copy(update={"layout": config.layout.model_copy(update={"engine": "jax"})})
    with pytest.raises(ConfigError, match=r"a program of layout\.engine=jax has one"):
        build_plan(own, build_source(own), of_jax, 1)
    type(own).initial_carry = lambda self, batch: {}  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="keeps a state of the rows of each"):
        build_plan(own, build_source(own), config, 1)


def test_grouping_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.group_by_length=4 needs the length of each row"):
        planned(Rows(100), group_by_length=4)
    for beside, why in (({"packing": {}}, "packed rows"), ({"shuffle": "blocks"}, "lane that reads their block")):
        with pytest.raises(ValueError, match=why):
            planned(Long(100), group_by_length=4, **beside)


def test_a_single_source_is_in_the_order_that_it_always_had() -> None:
    rows = np.arange(50)
    plan = planned(rows, batch=8)
    assert isinstance(plan, StreamPlan)
    assert np.array_equal(plan.batch(3), Order(50, 0)(np.arange(24, 32)))


def test_several_sources_without_weights_are_mixed_by_size() -> None:
    given = {"large": range(900), "small": range(100)}
    plan = planned(given, batch=50, steps=20)
    rows = np.concatenate([plan.samples(step, range(50)).rows for step in range(20)])
    assert sorted(rows.tolist()) == list(range(1000))


def test_a_mixture_over_blocks_has_its_shares_in_each_lane() -> None:
    plan = planned(sources(), steps=20, mixture={"weights": WEIGHTS, "block": 6}, shuffle="blocks", lanes=24)
    starts = build_source(task(sources())).starts  # type: ignore[attr-defined]
    rows = np.stack([plan.samples(step, range(48)).rows for step in range(18)])  # (step, row)
    for lane in range(24):
        own = np.searchsorted(starts, rows[:, 2 * lane : 2 * lane + 2].ravel(), side="right") - 1
        assert [np.bincount(part, minlength=3).tolist() for part in np.split(own, 6)] == [[1, 2, 3]] * 6


# epochs ---------------------------------------------------------------------------------------------------------------


def test_epochs_of_blocks_are_exact_where_lanes_end_together() -> None:
    plan = planned(Rows(*[6] * 16), batch=12, steps=None, epochs=2, shuffle="blocks", lanes=4)
    assert plan.steps == 16
    rows = np.concatenate([plan.samples(step, range(12)).rows for step in range(16)])
    assert np.bincount(rows).tolist() == [2] * 96
    half = planned(Rows(*[6] * 16), batch=12, steps=None, epochs=0.5, shuffle="blocks", lanes=4)
    rows = np.concatenate([half.samples(step, range(12)).rows for step in range(half.steps)])
    assert len(set(rows.tolist())) == len(rows) == 48


@pytest.mark.parametrize("blocks", [[6] * 15, [6] * 15 + [5], [5, 7] * 7 + [1, 11]])
def test_epochs_that_lanes_do_not_end_together_are_refused_with_the_steps(blocks: list[int]) -> None:
    steps = -(-sum(blocks) // 12)
    with pytest.raises(ConfigError, match=rf"train\.epochs=1 .*train\.steps={steps} train\.epochs=null"):
        planned(Rows(*blocks), batch=12, steps=None, epochs=1, shuffle="blocks", lanes=4)


def test_epochs_of_a_mixture_end_with_its_last_source() -> None:
    given = {"large": range(90), "small": range(10)}
    plan = planned(given, batch=12, steps=None, epochs=1, mixture={"weights": {"large": 1, "small": 1}, "block": 20})
    rows = np.concatenate([plan.samples(step, range(plan.rows(step))).rows for step in range(plan.steps)])
    assert np.bincount(rows)[:90].tolist() == [1] * 90
    assert set(np.bincount(rows)[90:].tolist()) <= {8, 9}


# sources --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [[1, 2], (1,), np.zeros((3, 2)), torch.zeros(2)])
def test_rows_that_can_be_had_by_number_are_taken_as_they_are(given: Any) -> None:
    assert build_source(task(given)) is given


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("given", "kind"), [(iter([1]), "list_iterator"), (None, "NoneType"), ({1, 2}, "set"), (Stream(), "Stream")]
)
def test_rows_that_cannot_be_had_by_number_are_refused_with_what_to_do(given: Any, kind: str) -> None:
    message = rf" returned a {kind}, whose rows cannot be accessed by index\. Give it __len__ and __getitem__"
    with pytest.raises(DataError, match=r"^Rows\.data\(\)" + message):
        build_source(task(given))
    with pytest.raises(DataError, match=r"^Rows\.data\(\)\['b'\]" + message):
        build_source(task({"a": [1], "b": given}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], " has no rows"),
        (np.zeros((0, 3)), " has no rows"),
        ({"a": [1], "b": []}, r"\['b'\] has no rows"),
        ({}, " returned no sources"),
        ({3: [1]}, r" names its sources \[3\]; names must be strings"),
    ],
)
def test_no_rows_no_sources_and_sources_without_names_are_refused(given: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"^Rows\.data\(\){message}$"):
        build_source(task(given))


@pytest.mark.parametrize("how", [HOW["full"], HOW["mixture"]])
def test_the_order_in_which_sources_are_named_changes_nothing(how: dict[str, Any]) -> None:
    backwards = dict(reversed(sources().items()))
    assert list(backwards) != list(sources())
    assert consumed(planned(backwards, **how), 1, range(12)) == consumed(planned(sources(), **how), 1, range(12))


def test_blocks_that_are_not_the_rows_are_refused() -> None:
    source = Rows(2, 3)
    source.blocks = np.array([2, 4])
    source.__class__ = type("Long", (Rows,), {"__len__": lambda self: 5})
    with pytest.raises(DataError, match=r"has 5 rows, but its blocks have 6"):
        build_source(task(source))


def test_a_source_of_blocks_alone_is_read_through_a_cache_that_fits_the_lanes_of_a_process() -> None:
    given = OnlyBlocks([4] * 24)
    config = configuration(train={"global_batch": 24}, data={"shuffle": "blocks", "window": 3, "lanes": 12})
    source = build_source(task(given), config, world_size=4)
    assert isinstance(source, CachedBlocks)
    assert (len(source), source[95], source._open.least) == (96, 95, (3 + 2) * 3)
    both = build_source(task({"a": given, "b": [7]}))
    assert [both[row] for row in (0, 95, 96)] == [0, 95, 7]


def test_a_source_with_a_cache_of_its_own_is_told_how_many_blocks_are_open() -> None:
    class Caching(Rows):
        kept = 0

        def keep_blocks(self, count: int) -> None:
            self.kept = count

    given = {"a": Caching(*[4] * 24), "b": Rows(4)}
    config = configuration(train={"global_batch": 24}, data={"shuffle": "blocks", "window": 3, "lanes": 12})
    source = build_source(task(given), config, world_size=6)
    assert source.sources["a"] is given["a"]  # type: ignore[attr-defined]
    assert given["a"].kept == (3 + 2) * 2  # type: ignore[attr-defined]


class Unread(Rows):
    def __getitem__(self, row: int) -> int:
        raise AssertionError


def test_a_source_of_weight_zero_is_never_read() -> None:
    given = {"a": Rows(5), "b": Unread(5)}
    config = configuration(data={"mixture": {"weights": {"a": 1, "b": 0}}})
    source = build_source(task(given), config)
    plan = build_plan(task(given), source, config)
    assert max(source[row] for step in range(4) for row in plan.samples(step, range(12)).rows) < 5
    with pytest.raises(DataError, match="building the sample failed"):
        build_source(task(given))


def test_facts_tell_rows_sources_and_the_fingerprint() -> None:
    one = Rows(3, 2)
    assert source_facts(one) == {"rows": 5}
    one.fingerprint = "ab"  # type: ignore[attr-defined]
    assert source_facts(one) == {"rows": 5, "fingerprint": "ab"}
    assert source_facts(Joined({"a": one, "b": [1]})) == {"rows": 6, "sources": {"a": 5, "b": 1}}


# refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "how", "message"),
    [
        (
            range(9),
            {"mixture": {"weights": {"a": 1}}},
            r"data\.mixture has weights for a, but Rows\.data\(\) returns a single",
        ),
        ({"a": [1]}, {"mixture": {"weights": {"b": 1}}}, r"there is no source 'b'"),
        (OnlyBlocks([4, 4]), {}, r"reads only whole blocks, and data\.shuffle=full .*; use data\.shuffle=blocks"),
        (range(9), {"shuffle": "blocks"}, r"needs sources with `blocks`, but this one \(range\) has none"),
        ({"a": [1]}, {"shuffle": "blocks"}, r"needs sources with `blocks`, but a \(list\) has none"),
        (Rows(*[2] * 60), {"shuffle": "blocks", "lanes": 5}, r"data\.lanes=5 does not divide"),
        (Rows(*[2] * 60), {"shuffle": "blocks", "lanes": 8, "world_size": 3}, r"world_size=3 does not divide the 8"),
        (Rows(*[2] * 6), {"shuffle": "blocks", "lanes": 8}, r"data\.lanes=8, but there are 6 blocks"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(given: Any, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(given, **how)


def test_lanes_and_windows_that_do_not_matter_are_refused() -> None:
    """The claim: they were accepted, and changed nothing."""
    with pytest.raises(ValueError, match=r"data\.lanes=5 is for rows that are read block by block, or packed"):
        planned(range(90), lanes=5)
    with pytest.raises(ValueError, match=r"data\.window=3 is for rows that are read block by block"):
        planned(range(90), window=3)


def test_a_large_source_and_a_small_one_of_a_single_block_can_be_mixed() -> None:
    given = {"large": Rows(*[5] * 48), "small": Rows(1)}
    plan = planned(given, shuffle="blocks", mixture={"weights": {"large": 9, "small": 1}, "block": 10})
    rows = np.concatenate([plan.samples(step, range(48)).rows for step in range(10)])
    assert (rows == 240).sum() == 48


def test_sources_that_have_files_are_watched_and_others_are_not(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    files = open_source(tmp_path, "text")
    assert checkable_sources(files) == [files]
    assert checkable_sources(Joined({"a": [1, 2], "b": files})) == [files]
    assert checkable_sources([1, 2]) == []


# counted in tokens ----------------------------------------------------------------------------------------------------


class Counted(Rows):
    """Rows whose lengths are known."""

    @property
    def lengths(self) -> np.ndarray:
        return np.arange(len(self)) % 7 + self.first


def counted_in_tokens(given: Any, tokens: float, **data: Any) -> Plan:
    config = configuration(train={"global_batch": 10, "steps": None, "tokens": tokens}, data=data)
    return build_plan(task(given), build_source(task(given), config, 1), config, 1)


def test_tokens_are_as_many_steps_as_rows_of_the_mean_length_take() -> None:
    rows = Counted(7, 7)  # 3 tokens each, on average
    assert [counted_in_tokens(rows, tokens).steps for tokens in (1, 30, 31, 3e6)] == [1, 1, 2, 100_000]
    plan = counted_in_tokens(rows, 2100)
    assert sum(int(rows.lengths[plan.batch(step)].sum()) for step in range(plan.steps)) == 2100
    assert counted_in_tokens(rows, 2100).steps == 70


def test_tokens_of_a_mixture_are_those_of_its_weights() -> None:
    both = {"short": Counted(70), "long": Counted(70, first=100)}  # 3 and 103
    halves = counted_in_tokens(both, 1e6, mixture={"weights": {"short": 1, "long": 1}}).steps
    assert halves == pytest.approx(1e6 / 530, rel=1e-3)
    shares = counted_in_tokens(both, 1e6, mixture={"weights": {"short": 9, "long": 1}}).steps
    assert shares == pytest.approx(1e6 / 130, rel=2e-3)


def test_packed_rows_count_as_full() -> None:
    packable = {"length": len, "cut": len, "pack": len, "capacity": 50}
    kind = type("Packable", (LinearTask,), {"data": lambda self: Counted(70), **packable})
    for length, steps in ((None, 20), (25, 40)):
        config = configuration(
            train={"global_batch": 10, "steps": None, "tokens": 1e4}, data={"packing": {"length": length}}
        )
        assert build_plan(kind(), build_source(kind(), config, 1), config, 1).steps == steps


def test_tokens_of_rows_whose_lengths_nobody_knows_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.tokens=100 needs to know how long rows are, but the source"):
        counted_in_tokens(Rows(7), 100)
    with pytest.raises(ConfigError, match="the rows are empty"):
        counted_in_tokens(type("Empty", (Counted,), {"lengths": np.zeros(7)})(7), 100)
