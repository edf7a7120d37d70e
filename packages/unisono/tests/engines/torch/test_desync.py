"""Two processes train a task that makes collectives of its own, and one of them makes others than the other."""

from __future__ import annotations

import inspect
import multiprocessing
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from packages.unisono.tests import collectives, processes
from packages.unisono.tests.collectives import Outcome
from packages.unisono.tests.ports import free_port
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.runtime.errors import DesyncError
from unisono.supervise.hangs import collective_mismatch

SILENT = ("order", "reduce", "dtype", "shape", "line")  # to which gloo has nothing to say
CASES: dict[str, dict[str, Any]] = {
    **{f"{kind} {strategy}": {"wrong": kind, "strategy": strategy} for kind in SILENT for strategy in ("ddp", "fsdp")},
    **{f"{kind} unseen": {"wrong": kind, "launch": {"desync": False}} for kind in ("order", "reduce", "dtype")},
    **{f"clean {strategy}": {"wrong": "", "strategy": strategy} for strategy in ("ddp", "fsdp")},
    **{f"well {strategy}": {"wrong": "well", "strategy": strategy} for strategy in ("ddp", "fsdp")},
    "clean ordered": {"wrong": "", "reduction": "ordered"},
    "clean ddp again": {"wrong": ""},
    "clean unseen": {"wrong": "", "launch": {"desync": False}},
}


def every_case(place: ProcessInfo, group: Communicator, folder: Path) -> dict[str, Outcome]:
    return {
        name: collectives.train(place, group, folder, number=number, **case)
        for number, (name, case) in enumerate(CASES.items())
    }


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    return processes.run(every_case, 2, tmp_path_factory.mktemp("runs"))


def line(method: str, text: str) -> str:
    """Where the task's source has it, as the error names it."""
    lines, first = inspect.getsourcelines(getattr(collectives.Talking, method))
    return f"packages/unisono/tests/collectives.py:{first + next(n for n, each in enumerate(lines) if text in each)}"


USUAL, OTHER = line("talk", "# the usual line"), line("talk", "# another line")
ONES, TENS = line("of_ones", "dist.all_reduce"), line("of_tens", "dist.all_reduce")
SUM = "SUM, float32, [4]"
DID = {  # by rank: what it reduced, and where
    "order": ((SUM, ONES), (SUM, TENS)),
    "reduce": ((SUM, USUAL), ("MAX, float32, [4]", USUAL)),
    "dtype": ((SUM, USUAL), ("SUM, int32, [4]", USUAL)),
    "shape": ((SUM, USUAL), ("SUM, float32, [2, 2]", USUAL)),
    "line": ((SUM, USUAL), (SUM, OTHER)),
}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", SILENT)
def test_another_collective_is_told_by_every_rank_in_the_same_step(
    ran: list[dict[str, Outcome]], kind: str, strategy: str
) -> None:
    one, other = (rank[f"{kind} {strategy}"] for rank in ran)
    assert one.error == other.error
    assert (one.kind, one.code) == ("DesyncError", DesyncError.exit_code) == ("DesyncError", 8)
    assert one.error.startswith(f"step {collectives.STEP + 1}: ranks made different collectives. call ")
    mine, theirs = (f"all_reduce({what}) at {where}" for what, where in DID[kind])
    assert f"rank 0 did {mine}, rank 1 did {theirs}. No update was made" in one.error
    assert not one.updated
    assert not other.updated


def test_without_the_comparison_the_same_runs_end_well_with_wrong_numbers(ran: list[dict[str, Outcome]]) -> None:
    for kind in ("order", "reduce", "dtype"):
        for rank in ran:
            assert (rank[f"{kind} unseen"].kind, rank[f"{kind} unseen"].calls) == ("none", [])
    for rank in ran:
        assert set(rank["clean unseen"].seen) == {30.0}
    assert set(ran[0]["order unseen"].seen) == {30.0, 10.0 + 2.0}
    assert set(ran[1]["order unseen"].seen) == {30.0, 20.0 + 1.0}


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("clean", "well"))])
def test_what_is_right_is_let_through(ran: list[dict[str, Outcome]], name: str) -> None:
    for rank in ran:
        assert (rank[name].kind, rank[name].error) == ("none", "")
        assert rank[name].loss is not None
        if name.startswith("clean"):
            assert set(rank[name].seen) == {30.0}


@pytest.mark.parametrize("name", ["clean ddp", "clean fsdp", "clean ordered", "well ddp", "well fsdp"])
def test_ranks_have_equal_digests_of_many_calls(ran: list[dict[str, Outcome]], name: str) -> None:
    one, other = (rank[name] for rank in ran)
    assert one.digests == other.digests
    assert sum(turn for turn, _ in one.digests.values()) > 60
    ring = [[(call.turn, call.fingerprint) for call in rank[name].calls if call.turn] for rank in ran]
    if name.startswith("clean"):
        assert ring[0] == ring[1]


def test_a_run_made_again_makes_the_same_collectives_and_the_same_numbers(ran: list[dict[str, Outcome]]) -> None:
    one, again, unseen = (ran[0][name] for name in ("clean ddp", "clean ddp again", "clean unseen"))
    assert list(one.digests.values()) == list(again.digests.values())  # the groups have other names
    assert one.loss == again.loss == unseen.loss


def test_collectives_of_ddp_fsdp_and_functional_ones_are_seen(ran: list[dict[str, Outcome]]) -> None:
    def told(name: str) -> set[str]:
        return {str(call.what) for call in ran[0][name].calls}

    assert "all_reduce(SUM, float32, [41]) at gradient bucket 0" in told("clean ddp")
    assert "all_gather(float32, [41] [41]) at gradient bucket 0" in told("clean ordered")
    fsdp = " ".join(told("clean fsdp"))
    assert re.search(r"all_gather_into_tensor\(float32, \[\d+\]\) at the outermost FSDP unit", fsdp)
    assert re.search(r"reduce_scatter_tensor\(SUM, float32, \[\d+\]\) at the outermost FSDP unit", fsdp)
    well = " ".join(told("well ddp"))
    for call in (
        f"all_reduce(MAX, float32, [3]) at {line('talk_well', 'functional.all_reduce')}",
        f"broadcast(float32, [3], root 0) at {line('talk_well', 'dist.broadcast')}",
        f"all_to_all_single(float32, [2]) at {line('talk_well', 'all_to_all_single')}",
        f"send(float32, [3]) at {line('talk_well', 'dist.send')}",
        "barrier() at packages/unisono/tests/collectives.py",
    ):
        assert call in well


# what gloo ends, or never ends ----------------------------------------------------------------------------------------


@dataclass
class Ended:
    """What two processes of a job left behind."""

    codes: list[int | None]
    told: list[str]
    explained: str | None


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["packages.unisono.tests.collectives"]
    )  # torch is imported once, not by each of them
    folders = {wrong: tmp_path_factory.mktemp(wrong) for wrong in ("skip", "size", "evaluation", "unused")}
    found = {}
    for wrong, folder in folders.items():
        port = free_port()
        job = [
            context.Process(target=collectives.process, args=(rank, port, folder, wrong), daemon=True)
            for rank in (0, 1)
        ]
        for process in job:
            process.start()
        for process in job:
            process.join(timeout=90)
            process.kill()
            process.join()
        told = [(folder / f"rank-{rank}.txt").read_text() for rank in (0, 1)]
        found[wrong] = Ended([process.exitcode for process in job], told, collective_mismatch.describe_mismatch(folder))
    return found


@pytest.mark.slow
def test_sizes_at_which_gloo_aborts_are_told_from_the_rings(ended: dict[str, Ended]) -> None:
    found = ended["size"]
    assert sorted(found.codes) in ([-6, 8], [8, 8])  # whom the other's size reaches first is ended in C++
    theirs = f"all_reduce(SUM, float32, [40000]) at {USUAL}"
    differs = f"rank 0 did all_reduce(SUM, float32, [4]) at {USUAL}, rank 1 did {theirs}"
    assert found.explained is not None
    assert differs in found.explained
    assert any(differs in told for told in found.told)


def test_a_skipped_collective_is_told_from_the_rings(ended: dict[str, Ended]) -> None:
    found = ended["skip"]
    differs = f"rank 0 did all_reduce({SUM}) at {USUAL}, rank 1 did all_reduce({SUM}) at {ONES}"
    assert 0 not in found.codes
    assert 8 in found.codes
    assert found.explained is not None
    assert differs in found.explained


def test_who_waits_for_a_rank_in_another_collective_says_so_before_the_deadline(ended: dict[str, Ended]) -> None:
    found = ended["evaluation"]
    assert found.codes[0] == 8
    assert found.codes[1] != 0
    extra = f"rank 1 did all_reduce(SUM, float32, [2]) at {line('talk', 'torch.zeros(2)')}"
    assert re.search(rf"the evaluation after step 2: .* rank 0 made no such call, {re.escape(extra)}", found.told[0])
    assert "Timed out" not in found.told[0]
    assert found.explained is not None
    assert f"rank 0 came to the comparison of collectives, {extra}" in found.explained


def test_parameters_that_one_rank_alone_left_out_are_named(ended: dict[str, Ended]) -> None:
    found = ended["unused"]
    assert found.codes[1] == 2
    assert "rank 1, step 3: a pass did not use parameters that the first pass used (2.weight, 2.bias)" in found.told[1]
