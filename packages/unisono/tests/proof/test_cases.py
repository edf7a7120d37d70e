"""Which runs a proof makes, and what each has to equal."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest

from packages.unisono.tests.runs import configuration
from unisono.config.key_values import parse_settings
from unisono.launch.processes.exit_report import WorkerError
from unisono.proof.case_process import Progress, Work
from unisono.proof.cases import QUICK, Case, ProofSettings, Variation, build_cases, parse_layout
from unisono.proof.prove import plan_phases, run_lanes, split_lanes
from unisono.proof.recording.trace import trace_folder
from unisono.runtime.errors import ConfigError

EVERY = [*get_args(Variation)]


def made(precision: str = "fp32", **settings: Any) -> dict[str, Case]:
    proof = ProofSettings.model_validate(settings)
    return {case.name: case for case in build_cases(proof, configuration(train={"precision": precision}))}


@pytest.mark.parametrize(
    ("text", "world", "keys"),
    [
        ("ddp:2", 2, {"strategy": "ddp"}),
        ("fsdp:4", 4, {"strategy": "fsdp"}),
        ("hsdp:2x3", 6, {"strategy": "hsdp", "shards": 3}),
        ("ddp:1x4", 1, {"strategy": "ddp", "devices": 4}),
        ("dp", 1, {"strategy": "dp"}),
    ],
)
def test_a_layout_is_read(text: str, world: int, keys: dict[str, Any]) -> None:
    assert parse_layout(text) == (world, keys)


@pytest.mark.parametrize("text", ["ddp", "ddp:x", "hsdp:4", "tp:2", "ddp:2x2x2", "dp:2", ""])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a layout; write ddp:2, fsdp:2, hsdp:2x2, dp, or for JAX ddp:2x4"):
        parse_layout(text)


@pytest.mark.parametrize("layout", ["ddp:3", "ddp:1", "ddp:1x1", "fsdp:2x3", "ddp:2x8"])
def test_processes_that_do_not_share_the_batch_evenly_are_refused(layout: str) -> None:
    with pytest.raises(ConfigError, match="at least 2 and divide global_batch=8"):
        made(layouts=[layout])


def test_devices_share_the_batch_and_have_processes_of_their_own() -> None:
    every = list(made(vary=["accumulate", "workers"], layouts=["ddp:1x2", "fsdp:2x2", "ddp:2"]).values())
    assert {case.micro_batch for case in every} == {2, 1}
    assert "ddp:1x2 m2 workers fp64" in {case.name for case in every}, "several devices are a layout to vary"
    for phase in plan_phases(every):
        assert len({(case.world_size, case.devices) for case in phase}) == 1
    assert {case.reference for case in every if case.devices > 1} >= {"single m2 fp64", "ddp:1x2 m2 fp64"}


def test_references_come_before_what_is_compared_with_them() -> None:
    seen: set[str] = set()
    for case in made(vary=EVERY).values():
        assert case.reference == "" or case.reference in seen
        seen.add(case.name)


def test_a_case_is_run_after_the_one_that_it_continues_and_processes_start_seldom() -> None:
    every = list(made(vary=EVERY, layouts=["ddp:2", "hsdp:2x2", "fsdp:4"]).values())
    runs = plan_phases(every)
    done: set[str] = {""}
    for phase in runs:
        assert len({case.world_size for case in phase}) == 1
        for case in phase:
            assert case.starts_from in done
            done.add(case.name)
    assert [case.name for case in every if case.name not in done] == []
    assert [phase[0].world_size for phase in runs] == [1, 2, 4, 1]


def test_a_case_saves_the_checkpoints_that_others_need_and_no_more() -> None:
    every = made(vary=EVERY, layouts=["ddp:2", "fsdp:2"], steps=6, resume_every=2)
    needed = {(case.starts_from, case.starts_after) for case in every.values() if case.starts_from}
    needed |= {(case.reference, 1) for case in every.values() if case.repeats_update}
    assert needed == {(case.name, updates) for case in every.values() for updates in case.saves}
    assert {(1,), (1, 4), ()} <= {case.saves for case in every.values()}


def test_every_run_of_many_processes_has_a_reference_of_its_precision() -> None:
    for case in made("bf16").values():
        assert case.world_size == 1 or case.reference
        assert case.reference == "" or case.reference.endswith(case.precision)


def test_runs_with_another_number_of_processes_are_compared_with_one_process_of_their_micro_batch() -> None:
    every = made()
    for case in every.values():
        if case.world_size > 1 and not case.bitwise:  # of the default variations
            reference = every[case.reference]
            assert (reference.world_size, reference.micro_batch) == (1, case.micro_batch)


def test_what_must_be_equal_in_every_bit_is_the_same_layout() -> None:
    every = made()
    found = [case for case in every.values() if case.bitwise]
    assert {case.name.split(" ")[2] for case in found} == {"workers", "resumed"}
    assert all(case.layout == every[case.reference].layout for case in found)


def test_fp64_is_varied_and_what_the_run_is_trained_in_is_not() -> None:
    every = made("bf16").values()
    assert {case.precision for case in every} == {"fp64", "bf16"}
    assert {case.precision for case in every if case.bitwise} == {"fp64"}
    assert {case.precision for case in every if case.perturbed} == {"fp64", "bf16"}
    assert {case.precision for case in made("fp64").values()} == {"fp64"}


def test_workers_are_varied_once_for_every_number_of_processes() -> None:
    every = made(layouts=["ddp:2", "fsdp:2", "fsdp:4", "ddp:4", "fsdp:2x2"])
    found = {name.partition(" ")[0] for name in every if "workers" in name}
    assert found == {"ddp:2", "fsdp:4", "fsdp:2x2"}, "rows are loaded before they meet a wrapper"


def test_an_evaluation_is_repeated_by_the_plain_layouts_of_the_first_precision() -> None:
    every = made()
    repeated = [case.name for case in every.values() if case.evaluates_again and not (case.bitwise or case.starts)]
    assert repeated == ["single m4 fp64", "ddp:2 m4 fp64", "fsdp:2 m4 fp64"]


def test_a_quick_proof_has_the_plain_layouts_and_other_micro_batches_alone() -> None:
    """A statistic of the micro-batch passed, since every layout had the same micro-batches."""
    settings, rest = parse_settings([*QUICK, "steps=4"], ProofSettings)
    assert rest == [] and settings.steps == 4, "what is said counts"
    every = build_cases(settings, configuration(train={"precision": "fp32"}))
    names = ["single m4 fp64", "single m4 perturbed fp64", "ddp:2 m4 fp64", "fsdp:2 m4 fp64"]
    assert [case.name for case in every] == [*names, "single m1 fp64", "ddp:2 m1 fp64", "fsdp:2 m1 fp64"]


def test_the_micro_batch_is_one_row_where_accumulation_is_varied() -> None:
    assert {case.micro_batch for case in made().values()} == {4, 1}
    assert {case.micro_batch for case in made(vary=[]).values()} == {4}
    assert {case.micro_batch for case in made(layouts=["ddp:4", "ddp:2"], vary=[]).values()} == {2}


def synchronised(**settings: Any) -> dict[str, Case]:
    config = configuration(layout={"sync_batch_norm": True})
    return {case.name: case for case in build_cases(ProofSettings.model_validate(settings), config)}


def test_with_common_batch_statistics_every_layout_is_compared_with_the_whole_batch_on_one_process() -> None:
    every = synchronised(layouts=["ddp:2", "fsdp:4"])
    for name, micro in (("ddp:2 m4 fp64", 4), ("fsdp:4 m2 fp64", 2)):
        assert (every[name].micro_batch, every[name].reference, every[name].synchronised) == (
            micro, "single m8 fp64", False,
        )  # fmt: skip
    parts = [case for case in every.values() if case.synchronised]
    assert {case.name for case in parts} == {"ddp:2 m1 fp64", "fsdp:4 m1 fp64"}
    assert "ddp:2 m2 fp64" in synchronised(layouts=["ddp:2"]), "a row alone has no variance"
    assert not any(case.synchronised for case in made().values())


def test_an_order_that_no_layout_changes_is_not_asked_of_common_batch_statistics() -> None:
    with pytest.raises(ConfigError, match=r"does not work with layout\.sync_batch_norm=true"):
        synchronised(vary=["ordered"])


def test_the_last_batch_is_short_and_the_others_are_full() -> None:
    for batch in (2, 4, 8, 12):
        rows = ProofSettings(global_batch=batch).rows
        assert 0 < rows - 2 * batch < batch or batch == 2


def test_a_run_is_interrupted_after_every_kth_update_and_resumed_in_new_processes() -> None:
    every = made(steps=6, resume_every=2, layouts=["ddp:2"])
    assert {case.interrupted for case in every.values()} == {(), (2, 4)}
    there = {case.starts_from: case for case in every.values() if case.starts_from}
    assert (there["single m4 fp64"].world_size, there["single m4 fp64"].starts_after) == (2, 4)
    back = there["ddp:2 m4 fp64"]
    assert (back.world_size, back.starts_after, back.reference) == (1, 4, "single m4 fp64")
    phases = plan_phases([*every.values()])
    begun = {case.name: number for number, phase in enumerate(phases) for case in phase}
    assert all(begun[case.name] > begun[case.starts_from] for case in there.values()), "the processes are others"


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_cases_of_one_process_are_parted_into_lanes_that_do_not_wait_for_each_other(count: int) -> None:
    for phase in plan_phases(list(made(vary=EVERY, layouts=["ddp:2"]).values())):
        lanes = split_lanes(phase, count)
        assert sorted(case.name for lane in lanes for case in lane) == sorted(case.name for case in phase)
        assert len(lanes) <= (count if phase[0].world_size == 1 else 1)
        for lane in lanes:
            begun: set[str] = set()
            for case in lane:
                needed = {case.starts_from, *([] if case.other_micro_batch else [case.reference])}
                inside = needed & {one.name for one in phase}
                assert inside <= begun, "what a case needs comes before it, in its own lane"
                begun.add(case.name)
        assert phase[0] in [lane[0] for lane in lanes], "what takes longest begins at once"


def test_the_first_case_shares_its_lane_only_with_those_that_differ_from_it_by_rounding() -> None:
    first, *_, last = plan_phases(list(made(layouts=["ddp:2", "fsdp:2"]).values()))
    lane = next(lane for lane in split_lanes(first, 2) if first[0] in lane)
    assert [case for case in lane[1:] if not case.perturbed] == []
    for case in first:
        together = [lane for lane in split_lanes(first, 2) if case in lane]
        roots = [one for one in first if not (one.reference or one.perturbed) and one.precision == case.precision]
        assert not case.perturbed or roots[0] in together[0], "a process has a clock, a number and a hash of its own"
    assert [len(lane) for lane in split_lanes(last, 2)] == [1, 1]


@pytest.mark.parametrize("lanes", [1, 2])
def test_what_a_process_of_several_leaves_is_run_once_more_in_one_lane(tmp_path: Path, lanes: int) -> None:
    first = plan_phases(list(made(layouts=["ddp:2"]).values()))[0]
    done, other = first[0], first[-1]
    phase = [done, other]
    asked: list[list[list[Case]]] = []
    started: list[int | None] = []
    work = partial(Work, ProofSettings(), Progress(2), {})

    def start(count: int | None) -> None:
        asked.append(Work.read(tmp_path).lanes)
        started.append(count)
        if len(started) == 1:
            for case in phase:
                trace_folder(tmp_path, case.name).mkdir()
            (trace_folder(tmp_path, done.name) / "facts.json").touch()
            raise WorkerError("a process ended", 1)
        assert trace_folder(tmp_path, done.name).exists()
        assert not trace_folder(tmp_path, other.name).exists(), "what was begun is not taken for a case"

    split = split_lanes(phase, lanes)
    assert len(split) == lanes
    if lanes == 1:  # it is known whose fault it is
        with pytest.raises(WorkerError):
            run_lanes(phase, split, tmp_path, work, start)
        assert (asked, started) == ([split], [None])
    else:
        run_lanes(phase, split, tmp_path, work, start)
        assert (asked, started) == ([split, [[other]]], [2, None])


def test_no_place_for_an_interruption_is_refused() -> None:
    with pytest.raises(ConfigError, match="resume_every=3 must be smaller than steps=3"):
        made(resume_every=3)
    assert made(resume_every=3, vary=["workers"])


def test_what_only_executes_otherwise_is_compared_with_the_same_layout() -> None:
    every = made(vary=EVERY, layouts=["ddp:2"])
    words = {name.removeprefix("ddp:2 m4 ").removesuffix(" fp64"): case.reference for name, case in every.items()}
    for kind in ("recompute", "compile", "attention by matmul", "optimizer loop", "workers", "resumed twice"):
        assert words[kind] == "ddp:2 m4 fp64"
    assert words["ranks reversed"] == words["resumed from single"] == "single m4 fp64"
