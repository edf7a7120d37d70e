"""Mixtures with groups: a row of the global batch keeps its source, and no micro-batch has rows of two."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from packages.unisono.tests.data.order.test_mixture import Numbers, joined
from packages.unisono.tests.runs import configuration
from unisono.config.batch_split import resolve_split, rows_of_sources
from unisono.config.schema.run import RunConfig
from unisono.data.order.grouped import GroupedOrder, plan_evaluation
from unisono.data.order.mixture import Joined
from unisono.data.order.order import Order
from unisono.data.order.planning import build_plan
from unisono.runtime.errors import ConfigError
from unisono.task import Task


def config(weights: dict[str, float], data: dict[str, Any] | None = None, **layout: Any) -> RunConfig:
    return configuration(
        data={"mixture": {"weights": weights, "grouped": True}, **(data or {})},
        train={"steps": 5, "global_batch": 12},
        layout=layout,
    )


def test_each_source_has_the_same_rows_of_every_batch_and_goes_through_its_own_stream() -> None:
    streams = (Order(10, 1), Order(4, 2), Order(7, 3))
    order = GroupedOrder(streams, (0, 10, 14, 21), (3, 1, 2), seed=0)
    positions = np.arange(60)
    rows, epochs = order.locate(positions)
    for number, (begin, end, own) in enumerate([(0, 3, 3), (3, 4, 1), (4, 6, 2)]):
        here = (positions % 6 >= begin) & (positions % 6 < end)
        expected, passes = streams[number].locate(np.arange(10 * own))
        assert (rows[here] == expected + order.starts[number]).all() and (epochs[here] == passes).all()
    late, _ = order.locate(np.array([47, 13, 58]))  # any position without those before it
    assert late.tolist() == rows[[47, 13, 58]].tolist()


@pytest.mark.parametrize(("until", "positions"), [("first", 21), ("all", 23)])
def test_an_epoch_ends_with_the_last_row_of_the_first_source_or_of_all(until: str, positions: int) -> None:
    order = GroupedOrder((Order(12, 1), Order(4, 2), Order(7, 3)), (0, 12, 16, 23), (3, 1, 2), 0, until)
    assert order.size == positions
    rows, _ = order.locate(np.arange(order.size))
    read = [len({row for row in rows.tolist() if begin <= row < end}) for begin, end in [(0, 12), (12, 16), (16, 23)]]
    assert read == ([12, 4, 7] if until == "all" else [12, 3, 6])


def test_the_micro_batch_is_the_largest_that_has_rows_of_one_source() -> None:
    asked = config({"a": 3, "b": 1}, world_size=2, strategy="ddp")  # 9 and 3 of 12 rows, 6 rows a process
    assert rows_of_sources(asked, 12) == [9, 3] and resolve_split(asked).micro_batch == 3
    with pytest.raises(ConfigError, match=r"micro_batch=6 would put rows of two sources .* 9, 3 rows .* not: \[1, 3\]"):
        resolve_split(config({"a": 3, "b": 1}, world_size=2, strategy="ddp", micro_batch=6))
    with pytest.raises(ConfigError, match=r"global_batch=12 cannot be divided into whole rows .* can: .*10"):
        resolve_split(config({"a": 4, "b": 1}))


@pytest.mark.parametrize(
    ("data", "said"),
    [({"group_by_length": 4}, "data.group_by_length moves them"), ({"shuffle": "blocks"}, "data.shuffle=blocks moves")],
)
def test_what_would_move_rows_between_sources_is_refused(data: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_plan(object.__new__(_Nothing), joined(8, 8), config({"s0": 1, "s1": 1}, data))


@pytest.mark.parametrize("more", [{"by": "tokens"}, {"changes": [{"step": 3, "weights": {"a": 2, "b": 1}}]}])
def test_shares_that_change_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"data\.mixture\.(by=tokens|changes): with grouped=true"):
        configuration(data={"mixture": {"weights": {"a": 1, "b": 1}, "grouped": True, **more}})


@pytest.mark.parametrize("rows", [30, 11])
def test_an_evaluation_reads_every_chosen_row_once_and_no_batch_has_two_sources(rows: int) -> None:
    held_out = Joined({"one": Numbers("one", 13), "more": joined(9, 8)})
    plan = plan_evaluation(held_out, config({"a": 3, "b": 1}), batch=4, rows=rows)
    taken = [plan.samples(step, range(plan.rows(step))).rows.tolist() for step in range(plan.steps)]
    assert all(
        0 < len(batch) <= 4 and len({np.digitize(row, [13, 22]).item() for row in batch}) == 1 for batch in taken
    )
    chosen = sorted(row for batch in taken for row in batch)
    other = plan_evaluation(held_out, configuration(), batch=4, rows=rows)
    assert chosen == sorted(
        other.samples(0, range(4)).rows.tolist()
        + [row for step in range(1, other.steps) for row in other.samples(step, range(other.rows(step))).rows.tolist()]
    )


class _Nothing(Task):
    def data(self) -> Any: ...
    def build(self) -> Any: ...
    def counts(self, batch: Any) -> Any: ...
    def outputs(self, model: Any, batch: Any, context: Any) -> Any: ...
    def loss(self, outputs: Any, batch: Any, context: Any) -> Any: ...
