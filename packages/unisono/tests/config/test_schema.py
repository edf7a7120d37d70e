"""What values may stand beside each other."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from unisono.config.schema import Settings
from unisono.config.schema.layout import Launch, Layout
from unisono.config.schema.optimizers import Sgd
from unisono.config.schema.run import Run, RunConfig, Train


def refusal(kind: type[Settings], /, **values: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        kind(**values)
    return "\n".join(error["msg"] for error in caught.value.errors())


def config(**groups: Any) -> dict[str, Any]:
    return {"recipe": "x", "train": {"steps": 1}, "optim": {"kind": "adamw"}, **groups}


# a run -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a/b", "/a", "..", ".", "", "a/", "../a"])
def test_a_run_s_name_that_is_not_one_folder_is_refused(name: str):
    assert f"run.name must be the name of one folder, not {name!r}" in refusal(Run, name=name)


@pytest.mark.parametrize("name", ["a", "a.b", "a b", "v1.0-ä", "...a"])
def test_a_run_s_name_may_be_any_one_folder(name: str):
    assert Run(name=name).name == name


@pytest.mark.parametrize("name", ["a\nb", "a\0b", "a\x1b[1m", "a\udc80"])
def test_a_run_s_name_that_cannot_be_printed_is_refused(name: str):
    assert "contains characters that cannot be printed; choose another name" in refusal(Run, name=name)


# a layout --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"strategy": "single", "world_size": 2}, "layout.strategy=single is one process, but layout.world_size=2"),
        (
            {"strategy": "dp", "world_size": 2},
            "all devices of its host, but layout.world_size=2; use ddp, fsdp or hsdp",
        ),
        ({"strategy": "dp", "compile": True}, "layout.compile=true does not go with layout.strategy=dp"),
        (
            {"strategy": "dp", "sync_batch_norm": True},
            "layout.sync_batch_norm=true does not go with layout.strategy=dp",
        ),
        ({"strategy": "dp", "reduction": "ordered"}, "layout.reduction=ordered works with single and ddp, not with dp"),
        ({"sync_batch_norm": True, "reduction": "ordered"}, "adds up batch statistics process by process"),
        ({"strategy": "fsdp", "shards": 2}, "layout.shards belongs to layout.strategy=hsdp, but the strategy is fsdp"),
        ({"shards": 2}, "layout.shards belongs to layout.strategy=hsdp, but the strategy is auto"),
        (
            {"reduction": "ordered", "strategy": "fsdp"},
            "layout.reduction=ordered works with single and ddp, not with fsdp",
        ),
        (
            {"reduction": "ordered", "strategy": "hsdp", "shards": 2},
            "layout.reduction=ordered works with single and ddp, not with hsdp",
        ),
        ({"defer_reduction": True, "strategy": "ddp"}, "layout.defer_reduction belongs to fsdp and hsdp; ddp reduces"),
        ({"offload": True, "strategy": "ddp"}, "the strategy is ddp; set layout.strategy=fsdp, or leave it out"),
        ({"offload": True, "engine": "jax", "strategy": "fsdp"}, "layout.offload belongs to layout.engine=torch"),
        ({"defer_reduction": True}, "layout.defer_reduction belongs to fsdp and hsdp; auto reduces"),
        ({"bucket_mb": 25, "strategy": "fsdp"}, "layout.bucket_mb belongs to ddp, but the strategy is fsdp"),
        ({"bucket_mb": 25, "strategy": "single"}, "layout.bucket_mb belongs to ddp, but the strategy is single"),
    ],
)
def test_a_layout_whose_keys_do_not_fit_each_other_is_refused(values: dict[str, Any], told: str):
    assert told in refusal(Layout, **values)


@pytest.mark.parametrize(
    "values",
    [
        {"strategy": "single", "world_size": 1},
        {"strategy": "hsdp", "world_size": 4, "shards": 2},
        {"strategy": "hsdp", "world_size": "auto", "shards": 3},
        {"strategy": "ddp", "reduction": "ordered"},
        {"strategy": "fsdp", "defer_reduction": True},
        {"strategy": "fsdp", "offload": True},
        {"strategy": "auto", "bucket_mb": 25},
    ],
)
def test_a_layout_whose_keys_fit_each_other_is_taken(values: dict[str, Any]):
    assert Layout(**values).model_dump(include=set(values)) == values


def test_shards_that_do_not_divide_the_processes_are_refused_with_all_numbers_that_do():
    told = refusal(Layout, strategy="hsdp", world_size=12, shards=5)
    assert "layout.shards=5 does not divide layout.world_size=12" in told
    listed = [int(number) for number in re.findall(r"\d+", told.partition("these do:")[2])]
    assert listed == [1, 2, 3, 4, 6, 12]
    assert all(Layout(strategy="hsdp", world_size=12, shards=number).shards == number for number in listed)


# several nodes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {"nodes": 2},
            "launch.nodes=2 needs launch.node_rank and launch.rendezvous: node_rank is the number",
        ),
        ({"nodes": 2, "node_rank": 0}, "launch.nodes=2 needs launch.rendezvous: "),
        ({"nodes": 2, "node_rank": 2, "rendezvous": "a:1"}, "launch.node_rank=2 of launch.nodes=2: nodes are numbered"),
        ({"node_rank": 1}, "launch.node_rank=1 of launch.nodes=1: nodes are numbered from 0 to 0"),
    ],
)
def test_nodes_that_are_not_numbered_are_refused(values: dict[str, Any], told: str):
    assert told in refusal(Launch, **values)


@pytest.mark.parametrize(("world", "use"), [(1, "use 2"), (5, "use 4 or 6")])
def test_processes_that_cannot_be_divided_among_nodes_are_refused(world: int, use: str):
    values = {"recipe": "a", "train": {"steps": 1}, "optim": {"kind": "sgd"}, "layout": {"world_size": world}}
    told = refusal(RunConfig, **values, launch={"nodes": 2, "node_rank": 0, "rendezvous": "a:1"})
    assert f"layout.world_size={world} is the number of processes on all nodes" in told
    assert told.endswith(use) or use in told


# a length --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "values", "told"),
    [
        (
            Train,
            {"steps": 3, "epochs": 1.5},
            "give one of train.steps, train.epochs and train.tokens (got steps=3 and epochs=1.5)",
        ),
        (Train, {}, "train.tokens (got none)"),
        (Train, {"steps": 1, "step": 2}, "Extra inputs are not permitted"),
        (Train, {"steps": 1, "clip_norm": float("inf")}, "finite"),
        (Train, {"steps": 1, "clip_norm": float("nan")}, "finite"),
        (Run, {"resume": "must"}, "run.resume=must needs run.name"),
        (Sgd, {"kind": "sgd", "nesterov": True}, "optim.nesterov=true needs optim.momentum > 0"),
    ],
)
def test_values_that_cannot_be_or_do_not_go_together_are_refused(kind: Any, values: dict[str, Any], told: str):
    assert told in refusal(kind, **values)


def test_values_that_go_together_are_taken():
    assert Train(epochs=0.5).epochs == 0.5
    assert Launch(nodes=2, node_rank=0, rendezvous="a:1").nodes == 2
    assert Sgd(kind="sgd", nesterov=True, momentum=0.9).nesterov
    assert RunConfig(**config(schedules={"depth": {"kind": "linear", "peak": 4}})).schedules["depth"].peak == 4


# optimizers and schedules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "schedule", "told"),
    [
        (
            "lr",
            {"kind": "constant", "peak": 2.0},
            "schedules.lr.peak=2.0 would contradict optim.lr=0.0003; leave it",
        ),
        ("weight_decay", {"kind": "constant", "peak": 2.0}, "peak=2.0 would contradict optim.weight_decay=0.01"),
        ("clip_norm", {"kind": "constant", "peak": 2.0}, "peak=2.0 would contradict train.clip_norm=1.0"),
        ("depth", {"kind": "linear"}, "schedules.depth.peak is missing: the largest value of 'depth'"),
        ("loss", {"kind": "constant", "peak": 1.0}, "schedules.loss: events use the name 'loss'; choose another"),
    ],
)
def test_a_schedule_has_one_largest_value_and_a_name_of_its_own(name: str, schedule: dict[str, Any], told: str):
    assert told in refusal(RunConfig, **config(schedules={name: schedule}))


def test_a_schedule_of_a_value_that_is_not_set_is_refused():
    told = refusal(
        RunConfig, **config(train={"steps": 1, "clip_norm": None}, schedules={"clip_norm": {"kind": "linear"}})
    )
    assert "schedules.clip_norm" in told
    assert "train.clip_norm" in told


# all settings ----------------------------------------------------------------------------------------------------


def test_settings_cannot_be_changed_after_they_were_checked():
    with pytest.raises(ValidationError, match="frozen"):
        Train(steps=1).steps = 2  # type: ignore[misc]


def test_the_defaults_of_all_settings_are_checked_themselves():
    class Wrong(Settings):
        width: int = "wide"  # type: ignore[assignment]

    assert "valid integer" in refusal(Wrong)
